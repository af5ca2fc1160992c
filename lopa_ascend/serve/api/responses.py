"""Outputs -> the JSON of a response, whole or as the chunks of a stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lopa_ascend.serve.api.logprobs import TokenProb, TokenProbs, chat_logprobs, completion_logprobs
from lopa_ascend.serve.api.protocol import StreamOptions
from lopa_ascend.serve.engine.client import Choice
from lopa_ascend.text.tokenizer import Tokenizer
from lopa_ascend.types import GenerationOutput, Progress, Update

Json = dict[str, Any]


@dataclass(frozen=True)
class Format:
    """How one endpoint spells what both have."""

    id_prefix: str
    whole: str
    chunk: str

    def message(self, text: str) -> Json:
        return {"text": text}

    def delta(self, text: str) -> Json:
        return {"text": text}

    def opening(self) -> Json | None:
        """What a stream says of a choice before its first text."""
        return None

    def end(self) -> Json:
        return {"text": ""}

    def logprobs(self, tokens: Sequence[TokenProb], with_top: bool) -> Json:
        return completion_logprobs(tokens, with_top)


class ChatFormat(Format):
    def message(self, text: str) -> Json:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def delta(self, text: str) -> Json:
        return {"delta": {"content": text}}

    def opening(self) -> Json | None:
        return {"delta": {"role": "assistant", "content": ""}}

    def end(self) -> Json:
        return {"delta": {}}

    def logprobs(self, tokens: Sequence[TokenProb], with_top: bool) -> Json:
        return chat_logprobs(tokens, with_top)


COMPLETION = Format("cmpl", "text_completion", "text_completion")
CHAT = ChatFormat("chatcmpl", "chat.completion", "chat.completion.chunk")


@dataclass(frozen=True)
class Details:
    """What a request asks its response to hold.

    ``n`` answers to each prompt; ``echoed`` are the prompts' texts, or nothing. ``logprobs``: None without, 0 with
    them, 1 with the token itself as the most probable one.
    """

    n: int = 1
    with_ids: bool = False
    logprobs: int | None = None
    echoed: Sequence[str] = ()


class Response:
    """One response: its identity, and what all its parts repeat. ``tokenizer`` is needed for logprobs alone."""

    def __init__(
        self, form: Format, model: str, choices: Sequence[Choice], details: Details, tokenizer: Tokenizer | None = None
    ):
        self.form, self.details, self.tokenizer = form, details, tokenizer
        self.id = f"{form.id_prefix}-{uuid.uuid4().hex}"
        self.head = {"id": self.id, "created": int(time.time()), "model": model}
        # A prompt counts once, however many answers it gets.
        self.prompt_tokens = sum(len(choice.prompt_token_ids) for choice in choices[:: details.n])

    def prefix(self, index: int) -> str:
        """What a choice's text begins with: its prompt, or nothing."""
        return self.details.echoed[index // self.details.n] if self.details.echoed else ""

    def logprobs(self, tokens: Sequence[TokenProb]) -> Json | None:
        asked = self.details.logprobs
        return None if asked is None else self.form.logprobs(tokens, with_top=asked > 0)

    def choice(
        self,
        index: int,
        content: Json,
        *,
        logprobs: Json | None = None,
        token_ids: Sequence[int] | None = None,
        output: GenerationOutput | None = None,
    ) -> Json:
        end = (output.finish_reason, output.stop_reason) if output else (None, None)
        choice = {"index": index, **content, "logprobs": logprobs, "finish_reason": end[0], "stop_reason": end[1]}
        with_ids = self.details.with_ids and token_ids is not None
        return {**choice, "token_ids": list(token_ids or ())} if with_ids else choice

    def usage(self, completion_tokens: int) -> Json:
        total = self.prompt_tokens + completion_tokens
        return {"prompt_tokens": self.prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": total}

    def totals(self, outputs: Sequence[GenerationOutput]) -> Json:
        """The usage, and our own numbers beside it."""
        tokens = sum(len(output.token_ids) for output in outputs)
        forwards = sum(output.num_forwards for output in outputs)
        cached = sum(output.cached_tokens for output in outputs[:: self.details.n])
        usage = {**self.usage(tokens), "prompt_tokens_details": {"cached_tokens": cached}}
        lopa = {"num_forwards": forwards, "tokens_per_forward": tokens / forwards if forwards else 0.0}
        return {"usage": usage, "lopa": lopa}

    def whole(self, outputs: Sequence[GenerationOutput]) -> Json:
        choices = [self._whole_choice(index, output) for index, output in enumerate(outputs)]
        return {**self.head, "object": self.form.whole, "choices": choices, **self.totals(outputs)}

    def _whole_choice(self, index: int, output: GenerationOutput) -> Json:
        tokens = TokenProbs(self.tokenizer).push(output.token_ids, output.max_probs)
        content = self.form.message(self.prefix(index) + (output.text or ""))
        logprobs = self.logprobs(tokens)
        return self.choice(index, content, logprobs=logprobs, token_ids=output.token_ids, output=output)


class ChunkEncoder:
    """The chunks of one streamed response. Remembers how much of each choice was sent."""

    def __init__(self, response: Response, num_choices: int, options: StreamOptions | None):
        self._include_usage = bool(options and options.include_usage)
        self._continuous = bool(options and options.continuous_usage_stats)
        self._response = response
        self._latest = [Progress((), "") for _ in range(num_choices)]
        self._probs = [TokenProbs(response.tokenizer) for _ in range(num_choices)]

    def opening(self) -> list[Json]:
        form, chunks = self._response.form, []
        for index in range(len(self._latest)):
            content, prompt = form.opening(), self._response.prefix(index)
            if content is not None:
                chunks.append(self._chunk(index, content))
            if prompt:
                chunks.append(self._chunk(index, form.delta(prompt)))
        return chunks

    def progress(self, index: int, update: Update, progress: Progress) -> list[Json]:
        """None, if nothing new is final."""
        before, self._latest[index] = self._latest[index], progress
        text, known = progress.text[len(before.text) :], len(before.token_ids)
        token_ids = progress.token_ids[known:]
        tokens = self._probs[index].push(token_ids, progress.max_probs[known:])
        details, chunks = self._response.details, []
        if text or (token_ids and (details.with_ids or details.logprobs is not None)):
            delta, logprobs = self._response.form.delta(text), self._response.logprobs(tokens)
            chunks.append(self._chunk(index, delta, logprobs=logprobs, token_ids=token_ids))
        if progress.output is not None:
            chunks.append(self._chunk(index, self._response.form.end(), output=progress.output))
        return chunks

    def closing(self) -> list[Json]:
        if not self._include_usage:
            return []
        outputs = [progress.output for progress in self._latest if progress.output is not None]
        return [{**self._head(), "choices": [], **self._response.totals(outputs)}]

    def _head(self) -> Json:
        return {**self._response.head, "object": self._response.form.chunk}

    def _chunk(self, index: int, content: Json, **parts: Any) -> Json:
        chunk = {**self._head(), "choices": [self._response.choice(index, content, **parts)]}
        if self._continuous:
            chunk["usage"] = self._response.usage(sum(len(progress.token_ids) for progress in self._latest))
        elif self._include_usage:
            chunk["usage"] = None
        return chunk
