"""Writes the answers of completions and chat completions: whole, or as the chunks of a stream.

Classes of pydantic document the answers in /openapi.json.
"""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import BaseModel, Field

from lopa_ascend.core import Request
from lopa_ascend.serve.api.logprobs import TokenProb, TokenProbs, scored
from lopa_ascend.serve.api.request import GenerationRequest
from lopa_ascend.serve.api.tools import NO_TOOLS, Calls, Tools
from lopa_ascend.serve.http.encoding import Json, Writer
from lopa_ascend.text.reasoning import num_reasoning_tokens
from lopa_ascend.text.tokenizer import Tokenizer
from lopa_ascend.types import GenerationOutput, Progress, Thinking, TokenRun, Update

SCORED = "With structured_outputs.choice: how probable each of its texts is. A stream has it in one chunk."
EVENTS = "With stream: true. Each event holds one chunk as JSON; the last event is [DONE]."

# ---- as /openapi.json documents them ---------------------------------------------------------------------------------


class PromptTokensDetails(BaseModel):
    cached_tokens: int = Field(description="Prompt tokens that came from the prefix cache.")


class CompletionTokensDetails(BaseModel):
    reasoning_tokens: int = Field(description="Tokens of what the model thought before it answered, with their marks.")


class Usage(BaseModel):
    """Token counts of all choices together."""

    prompt_tokens: int = Field(description="Each prompt counts once, whatever n is.")
    completion_tokens: int = Field(description="Tokens of the answer, with those of a stop string that ended it.")
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | None = Field(None, description="Of a model that can think.")


class LopaStats(BaseModel):
    """How the choices were decoded."""

    num_forwards: int = Field(description="Forward passes of all choices.")
    tokens_per_forward: float = Field(description="Visible tokens of all choices divided by their forward passes.")


class AnyChoice(BaseModel):
    """What choices of both routes have."""

    index: int
    finish_reason: str | None = Field(description='"stop", "length", "tool_calls" or "abort" (see /abort_request).')
    stop_reason: int | str | None = Field(
        description="The stop string, or the id of stop_token_ids, that ended the text; null at an EOS."
    )
    seed: int | None = Field(None, description="Seed of the sampling, for repeating it; null without sampling.")
    token_ids: list[int] | None = Field(None, description="With return_token_ids, or if the model has no tokenizer.")


class ScoredText(BaseModel):
    """One of the texts that structured_outputs.choice names."""

    text: str
    logprob: float = Field(
        description="Sum of the log probabilities of its tokens in one forward pass, in which all are masked: exact "
        "for one token."
    )
    num_tokens: int
    share: float = Field(description="Its part of the sum of all texts' probabilities.")


class AnyCompletion(BaseModel):
    """What answers of both routes have."""

    id: str
    created: int
    model: str
    usage: Usage
    lopa: LopaStats


# ---- writing them ----------------------------------------------------------------------------------------------------


class AnswerForm(ABC):
    """How the answers of the two routes differ."""

    id_prefix: ClassVar[str]
    whole: ClassVar[str]
    """``object`` of a whole answer."""
    chunk: ClassVar[str]
    """``object`` of a chunk."""
    opening: ClassVar[Json | None] = None
    """A choice's first chunk, before any text; None: there is none."""
    end: ClassVar[Json]
    """A choice's last chunk, which has the finish reason."""

    @abstractmethod
    def message(self, text: str, calls: Sequence[Json] = (), reasoning: str = "") -> Json:
        """A whole choice: text, calls of functions, and what the model thought before."""

    @abstractmethod
    def delta(self, text: str) -> Json:
        """The text in a choice of a chunk."""

    def reasoning_delta(self, text: str) -> Json:
        raise NotImplementedError("these answers have no reasoning")

    def call_delta(self, call: Json) -> Json:
        raise NotImplementedError("these answers have no calls")

    @abstractmethod
    def logprobs(self, tokens: Sequence[TokenProb], with_top: bool) -> Json:
        """``with_top``: with the most probable tokens."""


@dataclass(frozen=True)
class Details:
    n: int = 1
    """Answers to each prompt."""
    with_ids: bool = False
    """Token ids beside the text."""
    logprobs: int | None = None
    """None: no log probabilities; 0: those of the tokens; more: also those of so many most probable tokens."""
    echoed: Sequence[str] = ()
    """The prompts, with which the answers begin; empty without echo."""
    tools: Tools = NO_TOOLS
    thinking: Thinking | None = None
    """How the model thinks before it answers, if that is told apart."""
    shows_reasoning: bool = True
    texts: Sequence[str] = ()
    """Each answer is one of these, if the request asks how probable they are."""
    include_usage: bool = False
    """In a last chunk of the stream."""
    continuous_usage: bool = False
    """In every chunk, up to it."""

    @classmethod
    def of(cls, request: GenerationRequest, **fields: Any) -> Details:
        options = request.stream_options
        usage = bool(options and options.include_usage)
        continuous = bool(options and options.continuous_usage_stats)
        return cls(n=request.n or 1, include_usage=usage, continuous_usage=continuous, **fields)


class CompletionWriter(Writer):
    """Writes one answer: whole, or in chunks that each have what is new since the chunk before.

    ``choices`` has ``details.n`` for each prompt, and then what scores ``details.texts``. Without a tokenizer log
    probabilities show tokens by their ids.
    """

    def __init__(
        self,
        form: AnswerForm,
        model: str,
        choices: Sequence[Request],
        details: Details,
        tokenizer: Tokenizer | None = None,
    ):
        self.form, self.details, self.tokenizer = form, details, tokenizer
        self.choices = [choice for choice in choices if not choice.continuations]
        choices = self.choices
        self.id = f"{form.id_prefix}-{uuid.uuid4().hex}"
        self.head = {"id": self.id, "created": int(time.time()), "model": model}
        # Each prompt counts once, however many answers it gets.
        self.prompt_tokens = sum(choice.prompt_tokens for choice in choices[:: details.n])
        self._latest = [Progress(TokenRun(), "") for _ in choices]
        self._calls = [Calls(details.tools, details.thinking) for _ in choices]
        self._probs = [self._token_probs() for _ in choices]
        self._num_begun = 0
        """Choices that have had their first chunk: those with the lowest indices."""

    def whole(self, outputs: Sequence[GenerationOutput]) -> Json:
        # "choices" is an iterator: choices with log probabilities are large, so each is made when it is encoded.
        outputs, scores = outputs[: len(self.choices)], outputs[len(self.choices) :]
        choices = (self._whole_choice(index, output, scores) for index, output in enumerate(outputs))
        return {**self.head, "object": self.form.whole, "choices": choices, **self.totals(outputs)}

    def opening(self) -> list[Json]:
        prefixes = [self._prefix(index) for index in range(len(self.choices))]
        return [self._chunk(index, self.form.delta(prefix)) for index, prefix in enumerate(prefixes) if prefix]

    def events(self, index: int, update: Update, progress: Progress) -> list[Json]:
        if index >= len(self.choices):
            return self._scores_of_prompt(index - len(self.choices), progress)
        before, self._latest[index] = self._latest[index], progress
        reasoning, text, calls = self._calls[index].push(progress.text, is_final=progress.output is not None)
        new, chunks = progress.tokens[len(before.tokens) :], []
        shows_tokens = self.details.with_ids or self.details.logprobs is not None
        deltas = [self.form.reasoning_delta(reasoning)] if reasoning and self.details.shows_reasoning else []
        if text or (new and shows_tokens and not deltas):
            deltas.append(self.form.delta(text))
        logprobs = self._logprobs(self._probs[index], new)
        for delta in deltas[:1]:
            chunks.append(self._chunk(index, delta, logprobs=logprobs, token_ids=new.ids))
        chunks += [self._chunk(index, delta) for delta in deltas[1:]]
        chunks += [self._chunk(index, self.form.call_delta(call)) for call in calls]
        if progress.output is not None:
            reason = self._calls[index].finish_reason(progress.output)
            chunks.append(self._chunk(index, self.form.end, output=progress.output, finish_reason=reason))
        return [*self._openings(index), *chunks] if chunks else []

    def _scores_of_prompt(self, index: int, progress: Progress) -> list[Json]:
        """How probable ``details.texts`` are after a prompt, in a chunk for each of its choices."""
        if progress.output is None:
            return []
        logprobs = self._logprobs(None, TokenRun(), [progress.output])
        chunks = []
        for choice in range(index * self.details.n, (index + 1) * self.details.n):
            chunks += [*self._openings(choice), self._chunk(choice, self.form.end, logprobs=logprobs)]
        return chunks

    def closing(self) -> list[Json]:
        if not self.details.include_usage:
            return []
        outputs = [progress.output for progress in self._latest if progress.output is not None]
        return [{**self.head, "object": self.form.chunk, "choices": [], **self.totals(outputs)}]

    def totals(self, outputs: Sequence[GenerationOutput]) -> Json:
        tokens = sum(len(output.tokens) for output in outputs)
        forwards = sum(output.num_forwards for output in outputs)
        cached = sum(output.cached_tokens for output in outputs[:: self.details.n])
        usage = {**self._usage(tokens), "prompt_tokens_details": {"cached_tokens": cached}}
        if (thinking := self.details.thinking) is not None:
            reasoning = sum(num_reasoning_tokens(thinking, output) for output in outputs)
            usage["completion_tokens_details"] = {"reasoning_tokens": reasoning}
        lopa = {"num_forwards": forwards, "tokens_per_forward": tokens / forwards if forwards else 0.0}
        return {"usage": usage, "lopa": lopa}

    def _usage(self, completion_tokens: int) -> Json:
        total = self.prompt_tokens + completion_tokens
        return {"prompt_tokens": self.prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": total}

    def _whole_choice(self, index: int, output: GenerationOutput, scores: Sequence[GenerationOutput]) -> Json:
        calls = Calls(self.details.tools, self.details.thinking)
        reasoning, text, _ = calls.push(output.text or "", is_final=True)
        reasoning = reasoning if self.details.shows_reasoning else ""
        return self._choice(
            index,
            self.form.message(self._prefix(index) + text, calls.whole(), reasoning),
            logprobs=self._logprobs(self._token_probs(), output.tokens, scores[index // self.details.n :][:1]),
            token_ids=output.token_ids,
            output=output,
            finish_reason=calls.finish_reason(output),
        )

    def _openings(self, index: int) -> list[Json]:
        """The first chunks of all choices up to ``index`` that have not begun.

        They come directly before a text, because clients take the first chunk's time for that of the first token; and
        in the order of the choices, because OpenAI's client appends each new choice to a list.
        """
        new = range(self._num_begun, index + 1)
        self._num_begun = max(self._num_begun, index + 1)
        content = self.form.opening
        if content is not None and self.details.tools.is_forced:
            content = {"delta": {**content["delta"], "content": None}}
        return [] if content is None else [self._chunk(choice, content) for choice in new]

    def _chunk(self, index: int, content: Json, **parts: Any) -> Json:
        chunk = {**self.head, "object": self.form.chunk, "choices": [self._choice(index, content, **parts)]}
        if self.details.continuous_usage:
            chunk["usage"] = self._usage(sum(len(progress.tokens) for progress in self._latest))
        elif self.details.include_usage:
            chunk["usage"] = None
        return chunk

    def _choice(
        self,
        index: int,
        content: Json,
        *,
        logprobs: Json | None = None,
        token_ids: Sequence[int] | None = None,
        output: GenerationOutput | None = None,
        finish_reason: str | None = None,
    ) -> Json:
        """One choice of an answer or a chunk; ``output`` is set in the last part, ``token_ids`` if the part may show
        them."""
        choice = {
            "index": index,
            **content,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
            "stop_reason": output.stop_reason if output else None,
            "seed": output.seed if output else None,
        }
        with_ids = self.details.with_ids and token_ids is not None
        return {**choice, "token_ids": list(token_ids or ())} if with_ids else choice

    def _prefix(self, index: int) -> str:
        """Its prompt with echo, else nothing."""
        return self.details.echoed[index // self.details.n] if self.details.echoed else ""

    def _token_probs(self) -> TokenProbs | None:
        if self.details.logprobs is None:
            return None
        params = self.choices[0].params
        is_truncated = params.top_p is not None or params.top_k is not None or params.min_p > 0
        is_truncated |= params.structured_outputs is not None
        return TokenProbs(self.tokenizer, is_truncated=is_truncated)

    def _logprobs(
        self, probs: TokenProbs | None, new: TokenRun, scores: Sequence[GenerationOutput] = ()
    ) -> Json | None:
        """Log probabilities of the next tokens; with ``scores`` of one prompt also those of ``details.texts``."""
        asked = self.details.logprobs
        if asked is None:
            return None
        logprobs = self.form.logprobs([] if probs is None else probs.push(new), with_top=asked > 0)
        for output in scores:
            logprobs["choices"] = scored(self.details.texts, output)
        return logprobs
