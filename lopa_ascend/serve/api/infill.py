"""/v1/infill: texts with gaps, which come back whole."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from lopa_ascend.config import ParameterError
from lopa_ascend.core import Request
from lopa_ascend.serve.api.answer import AnyChoice, AnyCompletion, CompletionWriter, Details
from lopa_ascend.serve.api.completions import CompletionForm, CompletionLogprobs
from lopa_ascend.serve.api.logprobs import TokenProbs
from lopa_ascend.serve.api.request import LOGPROB, GenerationRequest, Planner
from lopa_ascend.serve.api.structured import asked_form
from lopa_ascend.serve.api.tools import NO_TOOLS
from lopa_ascend.serve.http.body import Body
from lopa_ascend.serve.http.encoding import Json
from lopa_ascend.text.gaps import Gap, pieces_of, whole_text
from lopa_ascend.types import GenerationOutput, Progress, TokenRun, Update

MAX_PARTS = 1024


class AskedGap(Body):
    """A gap, of which at most one size is given."""

    tokens: int | None = Field(None, ge=1, description="Its length. An EOS, or a stop string, ends its text earlier.")
    max_tokens: int | None = Field(
        None, ge=1, description="The most that its length, which is found, can be. Default: the request's max_tokens."
    )


class InfillRequest(GenerationRequest):
    """A text with gaps."""

    parts: Annotated[list[str | AskedGap], Field(fail_fast=True)] = Field(
        min_length=2,
        max_length=MAX_PARTS,
        description='The text: what is given, and gaps, such as {} or {"tokens": 8}. It begins with text.',
    )
    logprobs: int | None = Field(
        None,
        ge=0,
        le=20,
        description=f"Adds the log probability of each token, which is {LOGPROB}, and lists of so many most probable "
        "tokens.",
    )

    def plan(self, planner: Planner) -> list[Request]:
        if planner.prompts.tokenizer is None:
            raise ParameterError("parts", "needs a tokenizer, and the model has no tokenizer files")
        prompt, rest = pieces_of(_parts(self), planner.encode)
        return planner.choices(
            self,
            [prompt],
            ("parts", 0),
            form=asked_form(self, None, NO_TOOLS),
            top_logprobs=self.logprobs,
            with_logprobs=self.logprobs is not None,
            rest=rest,
            rest_field="parts",
        )

    def writer(self, planner: Planner, model: str, choices: list[Request]) -> InfillWriter:
        details = Details.of(self, with_ids=bool(self.return_token_ids), logprobs=self.logprobs)
        return InfillWriter(_parts(self), model, choices, details, planner.prompts.tokenizer)


def _parts(request: InfillRequest) -> list[str | Gap]:
    parts = list[str | Gap]()
    for index, part in enumerate(request.parts):
        try:
            parts.append(part if isinstance(part, str) else Gap(part.tokens, part.max_tokens))
        except ParameterError as error:
            raise error.under("parts", index) from None
    return parts


# ---- the answer ------------------------------------------------------------------------------------------------------


class FilledGap(BaseModel):
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str = Field(
        description='"stop": an EOS, a stop string or the length that was found; "length": it is full; or "abort".'
    )
    stop_reason: int | str | None
    token_ids: list[int] | None = Field(None, description="With return_token_ids.")


class InfillChoice(AnyChoice):
    text: str = Field(description="The whole text. What was given is in it as it was sent.")
    gaps: list[FilledGap] = Field(description="In the order of the text.")


class Infill(AnyCompletion):
    object: Literal["infill"]
    choices: list[InfillChoice]


class InfillForm(CompletionForm):
    id_prefix = "infill"
    whole, chunk = "infill", "infill.chunk"


INFILL = InfillForm()


class InfillWriter(CompletionWriter):
    """Writes whole texts, or chunks with a ``gap`` each and what is new in it."""

    def __init__(self, parts: Sequence[str | Gap], *arguments: Any):
        super().__init__(INFILL, *arguments)
        self._parts = parts
        self._probs_by_gap = defaultdict[tuple[int, int], TokenProbs | None](self._token_probs)

    def events(self, index: int, update: Update, progress: Progress) -> list[Json]:
        before, self._latest[index] = self._latest[index].gaps, progress
        first = max(0, len(before) - 1)
        chunks = []
        for gap, now in enumerate(progress.gaps[first:], first):
            chunks += self._news(index, gap, before[gap] if gap < len(before) else Progress(TokenRun(), ""), now)
        return chunks

    def _news(self, index: int, gap: int, before: Progress, now: Progress) -> list[Json]:
        """The chunk with what is new in a gap, if anything is."""
        new, text = now.tokens[len(before.tokens) :], now.text[len(before.text) :]
        ended = now.output if before.output is None else None
        if not (text or new or ended):
            return []
        return [
            self._chunk(
                index,
                {"gap": gap, "text": text},
                logprobs=self._logprobs(self._probs_by_gap[index, gap], new),
                token_ids=new.ids,
                output=ended,
                finish_reason=None if ended is None else ended.finish_reason,
            )
        ]

    def _whole_choice(self, index: int, output: GenerationOutput, scores: Sequence[GenerationOutput]) -> Json:
        texts = [gap.text for gap in output.gaps]
        content = {"text": whole_text(self._parts, texts), "gaps": [self._filled(gap) for gap in output.gaps]}
        choice = self._choice(index, content, output=output, finish_reason=output.finish_reason)
        del choice["logprobs"]  # those of gaps are with them
        return choice

    def _filled(self, gap: GenerationOutput) -> Json:
        filled = {
            "text": gap.text,
            "logprobs": self._logprobs(self._token_probs(), gap.tokens),
            "finish_reason": gap.finish_reason,
            "stop_reason": gap.stop_reason,
        }
        return {**filled, "token_ids": list(gap.token_ids)} if self.details.with_ids else filled
