"""Calls of functions in the text of an answer."""

import json
import time

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
    for item in reader.calls if not is_forced else ():
        json.loads(item.arguments, parse_constant=pytest.fail).values()
        item.arguments.encode()
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
        ('<tool_call>{"name": "get", "arguments": null}</tool_call>', "", [("get", "{}")]),
        ('<tool_call>{"name": "get", "arguments": ""}</tool_call>', "", [("get", "{}")]),
        ('<tool_call>{"name": "add", "parameters": {"a": 1}}</tool_call>', "", [ADD]),
        ('<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [ADD]),
        ('<tool_call>{"name": "add", "arguments": {"a": "\\ud83d\\ude00"}}</tool_call>', "", [("add", '{"a": "😀"}')]),
        (call().removesuffix("</tool_call>"), "", [ADD]),  # a stop string, or the end of the answer, took the tag
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
                *(
                    f'<tool_call>{{"name": "add", "arguments": {{"a": {value}}}}}</tool_call>'
                    for value in (r'"\ud83d"', r'{"\udc00": 1}', "NaN", "-Infinity", "1e400", "1" * 5000, '"\\x"')
                ),
                '<tool_call>{"name": "add", "arguments": "{\\"a\\": NaN}"}</tool_call>',
                '<tool_call>{"name": "add", "arguments": "a"}</tool_call>',
                '<tool_call>{"name": "add", "x": NaN}</tool_call>',
            )
        ],
        ("<tool_call>" + call(), "<tool_call>", [ADD]),
        ("<tool_call>\\" + call(), "<tool_call>\\", [ADD]),
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
        content += reader.push(text[:end], is_final=False)
        now = [(item.name, item.arguments) for item in reader.calls]
        assert all(new[0] == old[0] and new[1].startswith(old[1]) for old, new in zip(calls, now, strict=False))
        assert len(now) >= len(calls)
        calls = now
    content += reader.push(text, is_final=True)
    assert (content, [(item.name, item.arguments) for item in reader.calls]) == read(text, is_forced=is_forced)


COSTLY = {
    "beginnings": "<tool_call>",
    "beginnings of objects": "<tool_call>{",
    "strings": '<tool_call>{"a": "',
    "escapes": r"<tool_call>\"",
    "strings that change places": '<tool_call>["","',
    "ends in a string": '</tool_call>"',
    "space": " ",
    "calls": call(),
    "calls of others": call("other"),
}
FIRST = {"ends in a string": '<tool_call>{"a": "', "arguments": call().split("1")[0] + '"', "space": "x"}


def cpu_seconds(unit: str, first: str, count: int, step: int, *, is_forced: bool) -> float:
    """Of reading ``count`` times ``unit``, whose pushes end after every ``step`` of them."""
    text = first + unit * count
    ends = [len(first) + len(unit) * number for number in range(step, count, step)]
    beginnings = [text[:end] for end in ends]
    reader, start = ToolCallReader(NAMES, is_forced), time.process_time()
    for beginning in beginnings:
        reader.push(beginning, is_final=False)
    reader.push(text, is_final=True)
    return time.process_time() - start


@pytest.mark.parametrize("name", [*COSTLY, "arguments"])
@pytest.mark.parametrize("num_pushes", [1, 1000])
def test_work_is_proportional_to_the_text(name: str, num_pushes: int) -> None:
    unit, first, is_forced = COSTLY.get(name, "x<}"), FIRST.get(name, ""), name in ("calls", "arguments")
    few, many = (
        min(cpu_seconds(unit, first, count, count // pushes, is_forced=is_forced) for _ in range(3))
        for count, pushes in ((500, max(1, num_pushes // 8)), (4000, num_pushes))
    )
    assert many < 24 * max(few, 1e-3)  # 8 times the text in as many more pushes; 64 times the work would show


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
