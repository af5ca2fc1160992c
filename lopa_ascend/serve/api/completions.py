"""/v1/completions: texts that continue prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field, PlainValidator, WithJsonSchema

from lopa_ascend.config import ParameterError
from lopa_ascend.config.files import shown
from lopa_ascend.core import Request
from lopa_ascend.serve.api.answer import (
    SCORED,
    AnswerForm,
    AnyChoice,
    AnyCompletion,
    CompletionWriter,
    Details,
    ScoredText,
)
from lopa_ascend.serve.api.fields import HARMLESS
from lopa_ascend.serve.api.logprobs import TokenProb
from lopa_ascend.serve.api.request import LOGPROB, GenerationRequest, Planner
from lopa_ascend.serve.api.structured import ResponseFormat, asked_form, response_form, texts_of
from lopa_ascend.serve.api.tools import NO_TOOLS
from lopa_ascend.serve.http.encoding import Json
from lopa_ascend.text.gaps import Gap, Piece

MAX_CHOICES = 1024
"""Prompts times n."""

# ---- the request -----------------------------------------------------------------------------------------------------


def _is_token_ids(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


def _prompts(value: object) -> list[str | list[int]]:
    """One prompt or several, as text or as token ids."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if _is_token_ids(value):
            return [value]
        if len(value) > MAX_CHOICES:
            raise ValueError(f"must be at most {MAX_CHOICES} prompts, got {len(value)}")
        if all(isinstance(item, str) for item in value) or all(_is_token_ids(item) for item in value):
            return value
    choices = "a string, a list of strings, a list of token ids, or a list of such lists"
    raise ValueError(f"must be {choices}, got {shown(value)}")


def prompt_schema(max_prompts: int) -> Json:
    token_ids = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
    kinds = ({"type": "string", "minLength": 1}, token_ids)
    several = [{"type": "array", "items": kind, "minItems": 1, "maxItems": max_prompts} for kind in kinds]
    return {"anyOf": [*kinds, *several]}


BEST_OF: Json = {
    "type": ["integer", "null"],
    "minimum": 1,
    "description": "Not supported: taken only as 1, or with the value of n, where every answer is returned.",
}


class CompletionRequest(GenerationRequest):
    harmless = {**HARMLESS, "best_of": (1,)}
    writer_type: ClassVar[type[CompletionWriter]] = CompletionWriter

    prompt: Annotated[list[str | list[int]], PlainValidator(_prompts), WithJsonSchema(prompt_schema(MAX_CHOICES))]
    echo: bool | None = Field(
        None, description="The text begins with the prompt. Not together with logprobs. Default: false."
    )
    suffix: str | None = Field(
        None,
        description="What follows the answer, which fills the gap. Needs a decoding of a whole canvas, such as "
        "parallel. Default: nothing.",
    )
    logprobs: int | None = Field(
        None,
        json_schema_extra={"anyOf": [{"type": "integer", "minimum": 0, "maximum": 20}, {"enum": [None, False]}]},
        description=f"0 to 20: adds the log probability of each token, which is {LOGPROB}, and lists of so many most "
        "probable tokens. Prompts have no log probabilities.",
    )

    response_format: ResponseFormat | None = None

    @classmethod
    def tidy(cls, values: dict[str, Any]) -> None:
        best_of = values.get("best_of")
        if type(best_of) is int and best_of == values.get("n"):  # LangChain: the best n of n answers are all of them
            del values["best_of"]
        if values.get("logprobs") is False:
            del values["logprobs"]  # clients of the chat API switch them off like this

    @classmethod
    def complete_schema(cls, schema: Json) -> None:
        super().complete_schema(schema)
        schema["properties"]["best_of"] = BEST_OF

    def plan(self, planner: Planner) -> list[Request]:
        if len(self.prompt) * (self.n or 1) > MAX_CHOICES:
            raise ParameterError("prompt", f"prompts times n must be at most {MAX_CHOICES}")
        if self.echo and self.logprobs is not None:
            raise ParameterError("echo", "cannot be combined with logprobs: prompts have no log probabilities")
        if self.echo and planner.prompts.tokenizer is None:
            raise ParameterError("echo", "needs a tokenizer, and the model has no tokenizer files")
        if self.echo and self.suffix:
            raise ParameterError("echo", "cannot be combined with suffix: put both around the text yourself")
        prompts = [planner.encode(prompt, "prompt") for prompt in self.prompt]
        rest: list[Piece] = [Gap(), planner.encode(self.suffix, "suffix")] if self.suffix else []
        with_logprobs = self.logprobs is not None
        form = asked_form(self, response_form(self.response_format), NO_TOOLS)
        return planner.choices(
            self,
            prompts,
            "prompt",
            form=form,
            top_logprobs=self.logprobs,
            with_logprobs=with_logprobs,
            rest=rest,
            rest_field="suffix",
        )

    def writer(self, planner: Planner, model: str, choices: list[Request]) -> CompletionWriter:
        tokenizer, echoed = planner.prompts.tokenizer, list[str]()
        if self.echo and tokenizer is not None:
            echoed = [
                prompt if isinstance(prompt, str) else tokenizer.decode(prompt, skip_special_tokens=False)
                for prompt in self.prompt
            ]
        with_ids = bool(self.return_token_ids) or tokenizer is None
        texts = texts_of(self, with_logprobs=self.logprobs is not None)
        details = Details.of(self, with_ids=with_ids, logprobs=self.logprobs, echoed=echoed, texts=texts)
        return self.writer_type(COMPLETION, model, choices, details, tokenizer)


# ---- the answer ------------------------------------------------------------------------------------------------------


class CompletionLogprobs(BaseModel):
    """Lists with one item for each token."""

    tokens: list[str] = Field(
        description=r"Text of the token alone. A part of a character is written by its bytes, such as bytes:\xf0\x9f, "
        "a token without text as token_id: and its id."
    )
    token_logprobs: list[float] = Field(description="Log probability of the token.")
    top_logprobs: list[dict[str, float]] | None = Field(
        description="By position the most probable tokens, and the token itself."
    )
    text_offset: list[int] = Field(description="Where the token begins in the choice's text, in characters.")
    choices: list[ScoredText] | None = Field(None, description=SCORED)


class CompletionChoice(AnyChoice):
    text: str
    logprobs: CompletionLogprobs | None = None


class Completion(AnyCompletion):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class CompletionForm(AnswerForm):
    id_prefix = "cmpl"
    whole = chunk = "text_completion"
    end = {"text": ""}

    def message(self, text: str, calls: Sequence[Json] = (), reasoning: str = "") -> Json:
        return {"text": text}

    def delta(self, text: str) -> Json:
        return {"text": text}

    def logprobs(self, tokens: Sequence[TokenProb], with_top: bool) -> Json:
        return {
            "tokens": [_name(item) for item in tokens],
            "token_logprobs": [item.logprob for item in tokens],
            "top_logprobs": [_by_name(item) for item in tokens] if with_top else None,
            "text_offset": [item.offset for item in tokens],
        }


COMPLETION = CompletionForm()


def _name(item: TokenProb) -> str:
    return f"bytes:{item.token}" if item.is_part else item.token


def _by_name(item: TokenProb) -> dict[str, float]:
    return {_name(top): top.logprob for top in item.top} | {_name(item): item.logprob_in_top}
