"""Outputs -> the JSON of a response, whole or as the chunks of a stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lopa_ascend.serve.protocol import GenerationRequest
from lopa_ascend.serve.worker import Choice
from lopa_ascend.types import GenerationOutput, Progress

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


class ChatFormat(Format):
    def message(self, text: str) -> Json:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def delta(self, text: str) -> Json:
        return {"delta": {"content": text}}

    def opening(self) -> Json | None:
        return {"delta": {"role": "assistant", "content": ""}}

    def end(self) -> Json:
        return {"delta": {}}


COMPLETION = Format("cmpl", "text_completion", "text_completion")
CHAT = ChatFormat("chatcmpl", "chat.completion", "chat.completion.chunk")


class Response:
    """One response: its identity, and what all its parts repeat."""

    def __init__(self, form: Format, model: str, choices: Sequence[Choice], n: int, with_ids: bool):
        self.form, self.with_ids = form, with_ids
        self.head = {"id": f"{form.id_prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        # A prompt counts once, however many answers it gets.
        self.prompt_tokens = sum(len(choice.prompt_token_ids) for choice in choices[::n])

    def choice(
        self, index: int, content: Json, token_ids: Sequence[int] | None, output: GenerationOutput | None
    ) -> Json:
        end = (output.finish_reason, output.stop_reason) if output else (None, None)
        choice = {"index": index, **content, "logprobs": None, "finish_reason": end[0], "stop_reason": end[1]}
        return {**choice, "token_ids": list(token_ids)} if self.with_ids and token_ids is not None else choice

    def usage(self, completion_tokens: int) -> Json:
        total = self.prompt_tokens + completion_tokens
        return {"prompt_tokens": self.prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": total}

    def totals(self, outputs: Sequence[GenerationOutput]) -> Json:
        """The usage, and our own numbers beside it."""
        tokens = sum(len(output.token_ids) for output in outputs)
        forwards = sum(output.num_forwards for output in outputs)
        lopa = {"num_forwards": forwards, "tokens_per_forward": tokens / forwards if forwards else 0.0}
        return {"usage": self.usage(tokens), "lopa": lopa}

    def whole(self, outputs: Sequence[GenerationOutput]) -> Json:
        choices = [
            self.choice(index, self.form.message(output.text or ""), output.token_ids, output)
            for index, output in enumerate(outputs)
        ]
        return {**self.head, "object": self.form.whole, "choices": choices, **self.totals(outputs)}


class ChunkEncoder:
    """The chunks of one streamed response. Remembers how much of each choice was sent."""

    def __init__(self, response: Response, num_choices: int, request: GenerationRequest):
        options = request.stream_options
        self._include_usage = bool(options and options.include_usage)
        self._continuous = bool(options and options.continuous_usage_stats)
        self._response = response
        self._latest = [Progress((), "") for _ in range(num_choices)]

    def opening(self) -> list[Json]:
        content = self._response.form.opening()
        return [] if content is None else [self._chunk(index, content) for index in range(len(self._latest))]

    def progress(self, index: int, progress: Progress) -> list[Json]:
        """None, if nothing new is final."""
        before, self._latest[index] = self._latest[index], progress
        text, token_ids = progress.text[len(before.text) :], progress.token_ids[len(before.token_ids) :]
        chunks = []
        if text or (self._response.with_ids and token_ids):
            chunks.append(self._chunk(index, self._response.form.delta(text), token_ids))
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

    def _chunk(
        self,
        index: int,
        content: Json,
        token_ids: Sequence[int] | None = None,
        output: GenerationOutput | None = None,
    ) -> Json:
        chunk = {**self._head(), "choices": [self._response.choice(index, content, token_ids, output)]}
        if self._continuous:
            chunk["usage"] = self._response.usage(sum(len(progress.token_ids) for progress in self._latest))
        elif self._include_usage:
            chunk["usage"] = None
        return chunk
