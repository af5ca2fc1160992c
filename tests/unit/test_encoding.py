"""JSON of long answers, which no single call of the library encodes."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from lopa_ascend.serve.api.encoding import MAX_ITEMS, as_ascii, as_utf8, pieces

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(value=VALUES, length=st.integers(0, 3 * MAX_ITEMS))
@example(value=[], length=MAX_ITEMS)
@example(value={}, length=MAX_ITEMS + 1)
def test_pieces_join_to_the_json_of_the_library(value: Any, length: int) -> None:
    wholes: tuple[dict[str, Any], ...] = ({"a": value, "b": {"c": [value] * length}}, {})
    for whole in wholes:
        assert json.loads(as_ascii(whole)) == whole
        assert json.loads(b"".join(as_utf8(whole))) == whole
        assert as_ascii(whole) == json.dumps(whole, separators=(",", ":"))


@given(items=st.lists(VALUES, max_size=5))
def test_an_iterator_becomes_a_list_and_is_read_item_by_item(items: list[Any]) -> None:
    read: list[Any] = []

    def noted() -> Any:
        for item in items:
            read.append(item)
            yield item

    made = []
    for piece in pieces({"a": noted()}, json.dumps):
        made.append((piece, len(read)))
    assert json.loads("".join(piece for piece, _ in made)) == {"a": items}
    assert [count for _, count in made] == sorted(count for _, count in made)
    assert not items or made[1][1] == 1


def test_no_call_of_the_library_encodes_a_long_list() -> None:
    sizes = []

    def dumps(value: Any) -> str:
        sizes.append(len(value) if isinstance(value, list) else 1)
        assert isinstance(value, str | list)
        return json.dumps(value)

    chunk: dict[str, Any] = {"choices": [{"logprobs": {"content": [{}] * 1000}}]}
    assert json.loads("".join(pieces(chunk, dumps))) == chunk
    assert max(sizes) == MAX_ITEMS
