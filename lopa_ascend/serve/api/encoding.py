"""JSON of answers, as it is sent.

msgspec encodes it: a call for an update of megabytes holds the interpreter's lock for milliseconds, where the standard
library's would keep the event loop, and so all other streams, waiting ten times as long.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from lopa_ascend.serve.api.schema import Json

ENDS_OF_LINES = {character.encode(): rf"\u{ord(character):04x}".encode() for character in "\u0085\u2028\u2029"}
"""Characters that JSON allows in strings, but that many clients take for ends of lines, and their escapes."""

encode = msgspec.json.Encoder().encode
"""The JSON of a value, in UTF-8. Numbers that are not finite become null."""


def as_line(value: Json) -> bytes:
    """The JSON of a value, which every client takes for one line."""
    line = encode(value)
    for character, escape in ENDS_OF_LINES.items():
        line = line.replace(character, escape)
    return line


def pieces(answer: Json) -> Iterator[bytes]:
    """The JSON of an answer, piece by piece. Its values that are iterators become lists, of which each item is a piece;
    values inside them may not be iterators."""
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
