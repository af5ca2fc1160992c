"""JSON of answers: one line for every client, and long lists item by item."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from lopa_ascend.serve.http.encoding import as_line, encode, pieces

TEXT = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from("\u0085\u2028\u2029\r\n\v\f\x1c\x1d\x1e\\u"))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)


@given(value=st.dictionaries(TEXT, VALUES, max_size=3))
@example(value={"a": "\u0085\u2028\u2029\\\u2028"})
def test_a_line_stays_one_line_and_keeps_its_value(value: dict[str, Any]) -> None:
    line = as_line(value)
    assert json.loads(line) == value
    assert len(line.decode().splitlines()) == 1


@given(value=st.dictionaries(TEXT, VALUES, max_size=3), items=st.none() | st.lists(VALUES, max_size=3))
@example(value={"a": 1}, items=[])
def test_pieces_join_to_the_json(value: dict[str, Any], items: list[Any] | None) -> None:
    whole = {**value, "items": items}
    in_pieces = {**value, "items": items if items is None else iter(items)}
    assert b"".join(pieces(in_pieces)) == encode(whole)
    assert b"".join(pieces(value)) == encode(value)


def test_each_item_of_an_iterator_is_read_when_the_items_before_it_are_encoded() -> None:
    read: list[int] = []

    def items() -> Iterator[int]:
        for item in range(3):
            read.append(item)
            yield item

    encoded = [(piece, len(read)) for piece in pieces({"a": items()})]
    assert encoded == [(b"{", 0), (b'"a":', 0), (b"[0", 1), (b",1", 2), (b",2", 3), (b"]", 3), (b"}", 3)]
