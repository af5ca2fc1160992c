"""JSON of answers, encoded in pieces.

Each call of the JSON library holds the interpreter's lock to its end, so one call for an answer of megabytes would keep
the event loop waiting, even from another thread.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from lopa_ascend.serve.api.schema import Json

MAX_ITEMS = 64
"""Items of a list that one call of the library encodes. With lists of probable tokens an item has 2 KB."""

Dumps = Callable[[Any], str]


def as_ascii(value: Json) -> str:
    """One line of JSON. ASCII only, because many clients take U+2028 and U+0085 for ends of lines."""
    return "".join(pieces(value, _ascii)) if _has_long_list(value) else _ascii(value)


def pieces(value: Any, dumps: Dumps) -> Iterator[str]:
    """The JSON of a value, piece by piece.

    Args:
        value: what json encodes, and iterators, which become lists and are read one item at a time.
        dumps: encodes the values that are not divided.
    """
    if isinstance(value, dict) and value:
        before = "{"
        for name, item in value.items():
            yield f"{before}{dumps(name)}:"
            yield from pieces(item, dumps)
            before = ","
        yield "}"
    elif isinstance(value, Iterator):
        before = "["
        for item in value:
            yield before
            yield from pieces(item, dumps)
            before = ","
        yield "]" if before == "," else "[]"
    elif isinstance(value, list) and len(value) == 1:  # such as the choices of a chunk
        yield "["
        yield from pieces(value[0], dumps)
        yield "]"
    elif isinstance(value, list) and len(value) > MAX_ITEMS:
        before = "["
        for start in range(0, len(value), MAX_ITEMS):
            yield before + dumps(value[start : start + MAX_ITEMS])[1:-1]
            before = ","
        yield "]"
    else:
        yield dumps(value)


def _has_long_list(value: Any) -> bool:
    """Whether ``pieces`` would divide a list."""
    if isinstance(value, dict):
        return any(map(_has_long_list, value.values()))
    if not isinstance(value, list):
        return False
    return len(value) > MAX_ITEMS or (len(value) == 1 and _has_long_list(value[0]))


def _ascii(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def as_utf8(value: Json) -> Iterator[bytes]:
    """The JSON of a value in UTF-8, piece by piece."""
    return (piece.encode() for piece in pieces(value, _text))


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
