"""Calls of functions in the text of an answer."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lopa_ascend.text.tool_calls import ToolCallReader

NAMES = ("add", "get")


def call(name: str = "add", arguments: object = None, space: str = "\n") -> str:
    value = json.dumps({"name": name, "arguments": {"a": 1} if arguments is None else arguments})
    return f"<tool_call>{space}{value}{space}</tool_call>"


def read(text: str, *, is_forced: bool = False) -> tuple[str, list[tuple[str, str]]]:
    reader = ToolCallReader(NAMES, is_forced)
    content = reader.push(text, is_final=True)
    return content, [(item.name, item.arguments) for item in reader.calls]


ADD = ("add", '{"a": 1}')


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("hello ", "hello ", []),
        (call(), "", [ADD]),
        ("I add.\n" + call(), "I add.", [ADD]),
        (f"{call()}\n{call('get', {})}\n", "", [ADD, ("get", "{}")]),
        (f"{call()}\nDone. ", "\nDone.", [ADD]),
        (call(space=""), "", [ADD]),
        (call(arguments={"a": "</tool_call>"}), "", [("add", '{"a": "</tool_call>"}')]),
        ('<tool_call>{"name": "get"}</tool_call>', "", [("get", "{}")]),
        *[
            (text, text, [])
            for text in (
                call("other"),
                call(arguments=[1]),
                "<tool_call>",
                "<tool_call>\n{",
                call()[:-1],
                '<tool_call>{"name": ["add"], "arguments": {}}</tool_call>',
                "<tool_call>[1]</tool_call>",
                "<tool_call>" + "[" * 100_000 + "</tool_call>",
                "<tool_call>x</tool_call> and more",
            )
        ],
        ("<tool_call>" + call(), "<tool_call>", [ADD]),
    ],
)
def test_text_that_is_no_call_stays_text(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert read(text) == (content, calls)


PIECES = st.lists(
    st.sampled_from(
        [call(), call("get", {"q": '</tool_call>"'}), call("other"), "<tool_", "call>", "\n", " x ", "{", '"']
    )
)


@given(PIECES, st.lists(st.integers(0, 300), max_size=8), st.booleans())
def test_what_was_said_only_grows_wherever_the_text_is_cut(pieces: list[str], cuts: list[int], is_forced: bool) -> None:
    text = "".join(pieces)
    reader, content, calls = ToolCallReader(NAMES, is_forced), "", list[tuple[str, str]]()
    for end in [*sorted(min(cut, len(text)) for cut in cuts), len(text)]:
        said = reader.push(text[:end], is_final=False)
        now = [(item.name, item.arguments) for item in reader.calls]
        assert said.startswith(content)
        assert all(new[0] == old[0] and new[1].startswith(old[1]) for old, new in zip(calls, now, strict=False))
        assert len(now) >= len(calls)
        content, calls = said, now
    assert reader.push(text, is_final=True).startswith(content)
    assert (reader.push(text, is_final=True), [(item.name, item.arguments) for item in reader.calls]) == read(
        text, is_forced=is_forced
    )


def test_arguments_of_a_forced_call_are_known_as_they_come() -> None:
    reader, text = ToolCallReader(NAMES, is_forced=True), call(arguments={"a": "}x", "b": {}})
    seen = []
    for end in range(len(text) + 1):
        reader.push(text[:end], is_final=False)
        seen.append(reader.calls[-1].arguments if reader.calls else None)
    assert seen[-1] == '{"a": "}x", "b": {}}'
    assert '{"a": "}x", "' in seen
    assert reader.calls[-1].is_complete


def test_a_forced_call_that_was_cut_has_the_arguments_so_far() -> None:
    assert read('<tool_call>\n{"name": "add", "arguments": {"a": 1}', is_forced=True) == ("", [ADD])
    assert read('<tool_call>\n{"name": "ad', is_forced=True) == ("", [])
