"""Answers as they are sent: JSON, and the server-sent events of a stream.

msgspec encodes it: a call for an update of megabytes holds the interpreter's lock for milliseconds, where the standard
library's would keep the event loop, and so all other streams, waiting ten times as long.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from lopa_ascend.serve.http.api_error import ApiError
from lopa_ascend.types import GenerationOutput, Progress, Update

Json = dict[str, Any]

ENDS_OF_LINES = {character.encode(): rf"\u{ord(character):04x}".encode() for character in "\u0085\u2028\u2029"}
"""Characters that JSON strings may have, but many clients take for ends of lines; and their escapes."""

STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""No cache may hold a stream back, nor nginx, which keeps the beginning of an answer by default."""

encode = msgspec.json.Encoder().encode
"""The JSON of a value, in UTF-8. Numbers that are not finite become null."""


def as_line(value: Json) -> bytes:
    """JSON that every client takes for one line."""
    line = encode(value)
    for character, escape in ENDS_OF_LINES.items():
        line = line.replace(character, escape)
    return line


def pieces(answer: Json) -> Iterator[bytes]:
    """The JSON of an answer, piece by piece. A value that is an iterator becomes a list, and each item a piece; no
    iterators lie inside the items."""
    yield b"{"
    before = b""
    for name, value in answer.items():
        yield before + encode(name) + b":"
        if isinstance(value, Iterator):
            yield from _list(value)
        else:
            yield encode(value)
        before = b","
    yield b"}"


def _list(items: Iterator[Any]) -> Iterator[bytes]:
    before = b"["
    for item in items:
        yield before + encode(item)
        before = b","
    yield b"]" if before == b"," else b"[]"


class Writer(ABC):
    """Writes the answer to one request, whole or as events, in the form of completions unless a subclass has
    another."""

    id: str
    media_type: str = "text/event-stream"
    comment: bytes = b": keep-alive\n\n"
    """What readers of the stream skip."""
    end: bytes = b"data: [DONE]\n\n"
    """The end of the stream, after the events of an answer and after those of a failure."""

    @abstractmethod
    def whole(self, outputs: Sequence[GenerationOutput]) -> Json:
        """The answer that is not streamed, from the output of each choice. A value that is an iterator is sent as a
        list."""

    @abstractmethod
    def opening(self) -> list[Json]:
        """Events before the first update."""

    @abstractmethod
    def events(self, index: int, update: Update, progress: Progress) -> list[Json]:
        """Events for one update of the choice ``index``; none if nothing new is final."""

    def closing(self) -> list[Json]:
        return []

    def failure(self, error: ApiError) -> list[Json]:
        """Events in place of the remaining ones, if the request fails after the stream has begun."""
        return [error.body()]

    def frame(self, event: Json) -> bytes:
        return b"data: " + as_line(event) + b"\n\n"


class WholeWriter(Writer):
    def opening(self) -> list[Json]:
        raise NotImplementedError("such answers are not streamed")

    def events(self, index: int, update: Update, progress: Progress) -> list[Json]:
        raise NotImplementedError("such answers are not streamed")
