"""Bodies and events of /v1/messages. The judge ``clients`` holds conversations through Anthropic's own clients."""

import json
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lopa_ascend.admission import Limits
from lopa_ascend.config import DecodingParams, ParameterError
from lopa_ascend.core import Request
from lopa_ascend.serve.api.messages import SIGNATURE, MessageObject, MessagesRequest, MessageWriter
from lopa_ascend.serve.api.request import Planner
from lopa_ascend.serve.http.api_error import ApiError, error_body
from lopa_ascend.serve.http.body import read_body
from lopa_ascend.text.prompt import Prompts
from lopa_ascend.types import GenerationOutput, Progress, Thinking, TokenRun, Update
from tests.tiny import tiny_tokenizer
from tests.tool_template import TEMPLATE

CLAUDE_CODE = json.loads((Path(__file__).parents[1] / "data" / "claude_code.json").read_text("utf-8"))
"""Requests in the form of Claude Code 2.0 and 2.1, after published captures, with short texts."""
LIMITS = Limits(
    vocab_size=320,
    mask_token_id=319,
    max_model_len=4096,
    num_pages=1000,
    max_num_seqs=4,
    max_num_batched_tokens=8192,
    max_num_branches=7,
)
THINKS = TEMPLATE + "{% if enable_thinking is not false %}<think>{% endif %}{# </think> #}"
HELLO: list[Any] = [{"role": "user", "content": "hello"}]
ADD = {"name": "add", "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}}
USE = {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 1}}
THOUGHT = {"type": "thinking", "thinking": "hm", "signature": "s"}


def planner(template: str = TEMPLATE) -> Planner:
    tokenizer = tiny_tokenizer.__wrapped__()  # the template is its own
    tokenizer.chat_template = template
    return Planner(Prompts(tokenizer, 320, 319, "m"), LIMITS, {})


PLANNER = planner()


def parsed(**fields: Any) -> Any:
    return read_body(MessagesRequest, json.dumps({"messages": HELLO, "max_tokens": 64, **fields}).encode())


def choice(by: Planner = PLANNER, **fields: Any) -> Request:
    (planned,) = parsed(**fields).plan(by)
    return planned


def text(value: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **fields}


def call(name: str, arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}, "id": "toolu_1"}


# ---- conversations ---------------------------------------------------------------------------------------------------

CONVERSATIONS: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "system": ({"system": "be brief"}, [{"role": "system", "content": "be brief"}, *HELLO]),
    "system blocks, without Claude Code's accounts": (
        {
            "system": [
                text("x-anthropic-billing-header: cch=1;"),
                text("a", cache_control={"type": "ephemeral"}),
                text("b"),
            ]
        },
        [{"role": "system", "content": "a\nb"}, *HELLO],
    ),
    "accounts before the text itself": (
        {"system": "x-anthropic-billing-header: cch=1;\na"},
        [{"role": "system", "content": "a"}, *HELLO],
    ),
    "messages of one role in a row": (
        {"messages": [*HELLO, {"role": "user", "content": [text("b"), text("c")]}]},
        [{"role": "user", "content": "hello\nb\nc"}],
    ),
    "a call, and its result with a question": (
        {
            "messages": [
                *HELLO,
                {
                    "role": "assistant",
                    "content": [THOUGHT, text("wait"), USE, {"type": "redacted_thinking", "data": "x"}],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "toolu_1", "content": "7", "is_error": True},
                        {"type": "tool_result", "tool_use_id": "toolu_2", "content": [text("8"), text("9")]},
                        {"type": "tool_result", "tool_use_id": "toolu_3"},
                        text("and?"),
                    ],
                },
            ]
        },
        [
            *HELLO,
            {"role": "assistant", "content": "wait", "reasoning_content": "hm", "tool_calls": [call("add", {"a": 1})]},
            {"role": "tool", "content": "Error: 7", "tool_call_id": "toolu_1"},
            {"role": "tool", "content": "8\n9", "tool_call_id": "toolu_2"},
            {"role": "tool", "content": "", "tool_call_id": "toolu_3"},
            {"role": "user", "content": "and?"},
        ],
    ),
    "answers without text": (
        {
            "messages": [
                *HELLO,
                {"role": "assistant", "content": []},
                *HELLO,
                {"role": "assistant", "content": ""},
                *HELLO,
            ]
        },
        [{"role": "user", "content": "hello\nhello"}, {"role": "assistant", "content": ""}, *HELLO],
    ),
    "the system between messages": (
        {
            "messages": [
                *HELLO,
                {"role": "system", "content": "gone", "clear_at": "next_user_message"},
                {"role": "assistant", "content": "b"},
                *HELLO,
                {"role": "system", "content": [text("new")], "clear_at": "next_user_message"},
            ]
        },
        [*HELLO, {"role": "assistant", "content": "b"}, *HELLO, {"role": "system", "content": "new"}],
    ),
}


@pytest.mark.parametrize(("fields", "messages"), CONVERSATIONS.values(), ids=CONVERSATIONS)
def test_a_conversation_as_the_template_takes_it(fields: dict[str, Any], messages: list[dict[str, Any]]):
    assert parsed(**fields).as_template_input() == messages


@pytest.mark.parametrize("sent", CLAUDE_CODE, ids=lambda sent: sent["name"])
def test_requests_of_claude_code(sent: dict[str, Any]):
    asked = read_body(MessagesRequest, json.dumps(sent["body"]).encode())
    (planned,) = asked.plan(PLANNER)
    prompt = PLANNER.prompts.tokenizer.decode(planned.prompt, skip_special_tokens=False)
    assert "billing" not in prompt
    assert [tool["name"] in prompt for tool in sent["body"].get("tools", ())] == [True] * len(asked.tools or ())
    assert planned.params.max_new_tokens == min(sent["body"].get("max_tokens", 256), 4096 - len(planned.prompt))


def test_fields_stand_for_those_of_the_other_routes():
    params = choice(stop_sequences=["END"], temperature=0.5, top_k=3, num_branches=2).params
    assert (params.stop, params.temperature, params.top_k, params.num_branches) == (("END",), 0.5, 3, 2)
    assert choice(max_tokens=10**9).params.max_new_tokens > 4000
    thinks = planner(THINKS)
    on, off = choice(thinks), choice(thinks, thinking={"type": "disabled"})
    assert len(on.prompt) > len(off.prompt)
    budget = {"type": "enabled", "budget_tokens": 5}
    limited = choice(thinks, thinking=budget).params.structured_outputs
    assert limited is not None
    assert limited.thinking is not None
    assert limited.thinking.max_tokens == 5
    for harmless in ({}, {"thinking": {**budget, "budget_tokens": 64}}, {"thinking": {"type": "adaptive"}}):
        assert choice(thinks, **harmless).params.structured_outputs is None
    assert choice(thinking=budget).params.structured_outputs is None  # a model that cannot think
    schema = {"type": "json_schema", "schema": {"type": "object"}}
    for form in ({"output_config": {"format": schema}}, {"output_format": schema}):
        assert choice(**form).params.structured_outputs is not None


def test_tools_that_anthropic_defines_are_left_out():
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
    tools = parsed(tools=[search, {"type": "custom", **ADD}]).callable
    assert [*tools.callable()] == ["add"]
    assert not tools.is_forced
    assert parsed(tools=[ADD], tool_choice={"type": "any", "disable_parallel_tool_use": True}).callable.is_forced
    assert parsed(tools=[ADD], tool_choice={"type": "tool", "name": "add"}).callable.named
    assert not parsed(tools=[search], tool_choice={"type": "none"}).callable.functions


def content(*blocks: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": [*blocks]}, *HELLO]}


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "no messages": ({"messages": []}, "messages", "at least 1"),
    "image": (content(text("a"), {"type": "image"}), "messages[0].content[1].type", "got 'image'. Instead, send text"),
    "call of a user": (content(USE), "messages[0].content[0].type", "'text' or 'tool_result' in a message of"),
    "document in a result": (
        content({"type": "tool_result", "tool_use_id": "t", "content": [{"type": "document"}]}),
        "messages[0].content[0].content[0].type",
        "send text alone",
    ),
    "other role": ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "'user'"),
    "roles": ({"messages": [{"role": ["user"], "content": []}]}, "messages[0].role", "'user'"),
    "no block": (content(7), "messages[0].content[0].type", "must be 'text'"),
    "types": (content({"type": ["text"]}), "messages[0].content[0].type", "must be 'text'"),
    "block without type": (content({"text": "x"}), "messages[0].content[0].type", "must be 'text'"),
    "unknown field of a block": (content(text("x", sure=1)), "messages[0].content[0].sure", "unknown field"),
    "no id": (content({"type": "tool_result"}), "messages[0].content[0].tool_use_id", "missing"),
    "no id of a call": (content({**USE, "id": None}, role="assistant"), "messages[0].content[0].id", "missing"),
    "prefill": ({"messages": [*HELLO, {"role": "assistant", "content": "{"}]}, "messages[1].role", "does not continue"),
    "search alone": ({"tools": [{"type": "web_search_20250305"}]}, "tools[0].type", "must be 'custom'"),
    "name": ({"tools": [{**ADD, "name": "a b"}]}, "tools[0].name", "pattern"),
    "no schema": ({"tools": [{"name": "a"}]}, "tools[0].input_schema", "missing"),
    "twice": ({"tools": [ADD, ADD]}, "tools[1].name", "as is that of tools[0]"),
    "schema": (
        {"tools": [{"name": "f", "input_schema": {"properties": {"x": {"not": 7}}}}], "tool_choice": {"type": "any"}},
        "tools[0].input_schema.properties.x.not",
        "JSON Schema",
    ),
    "any of none": ({"tool_choice": {"type": "any"}}, "tool_choice", "needs tools"),
    "no name": ({"tools": [ADD], "tool_choice": {"type": "tool"}}, "tool_choice.name", "missing"),
    "other name": ({"tools": [ADD], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name", "'add'"),
    "stop": ({"stop_sequences": [""]}, "stop_sequences", "non-empty"),
    "stop twice": ({"stop_sequences": ["a"], "stop": "b"}, "stop", "stop_sequences"),
    "no tokens": ({"max_tokens": 0}, "max_tokens", "greater"),
    "form": ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type", "json_schema"),
    "schema of a form": (
        {"output_config": {"format": {"type": "json_schema", "schema": {"type": "x"}}}},
        "output_config.format.schema",
        "x",
    ),
    "servers": ({"mcp_servers": [{"type": "url"}]}, "mcp_servers", "list their functions in tools"),
    "state": ({"thread": {"type": "create"}}, "thread", "the whole conversation"),
    "several": ({"n": 2}, "n", "send the request several times"),
    "long": ({"messages": [{"role": "user", "content": "x " * 4096}]}, "messages", "context length"),
}


@pytest.mark.parametrize(("fields", "param", "words"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused_is_named(fields: dict[str, Any], param: str, words: str):
    kinds: Any = (ApiError, ParameterError)
    with pytest.raises(kinds) as refused:
        choice(**fields)
    found: Any = refused.value
    assert found.param == param
    assert words in found.message


def test_a_budget_that_a_decoding_cannot_hold_is_named():
    with pytest.raises(ParameterError) as refused:
        choice(planner(THINKS), decoding="vanilla", thinking={"type": "enabled", "budget_tokens": 5})
    assert refused.value.param == "thinking.budget_tokens"


# ---- answers ---------------------------------------------------------------------------------------------------------

THINKING = Thinking(False, (6,), (7,))
CALLED = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def writer(longest: int = 64, **fields: Any) -> MessageWriter:
    params = DecodingParams(max_new_tokens=longest)
    return MessageWriter("m", parsed(tools=[ADD], **fields), Request("", (1, 2, 3), params), THINKING)


def output_of(said: str, reason: str = "stop", stop: int | str | None = None) -> GenerationOutput:
    return GenerationOutput(
        prompt_token_ids=(1, 2, 3),
        tokens=TokenRun((4, 5)),
        text=said,
        finish_reason=reason,
        stop_reason=stop,
        num_forwards=4,
        num_positions=8,
        model_tokens=9,
        cached_tokens=2,
        seed=7,
    )


def built(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that the events of a stream build, in the order that Anthropic's clients demand."""
    first, *rest, delta, last = [event for event in events if event["type"] != "ping"]
    assert (first["type"], delta["type"], last) == ("message_start", "message_delta", {"type": "message_stop"})
    message: dict[str, Any] = first["message"]
    assert (message["content"], message["stop_reason"]) == ([], None)
    is_open = False
    fields = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}
    for event in rest:
        assert is_open == (event["type"] != "content_block_start")
        assert event["index"] == len(message["content"]) - is_open
        if event["type"] == "content_block_start":
            message["content"].append({**event["content_block"], "json": ""})
        elif event["type"] == "content_block_delta":
            block, piece = message["content"][-1], dict(event["delta"])
            if (kind := piece.pop("type")) == "input_json_delta":
                block["json"] += piece["partial_json"]
            else:
                block[fields[kind]] += piece[fields[kind]]
        is_open = event["type"] != "content_block_stop"
    assert not is_open
    for block in message["content"]:
        arguments = block.pop("json")
        if arguments:
            block["input"] = json.loads(arguments)
    return {**message, **delta["delta"], **{name: delta[name] for name in ("usage", "lopa", "seed")}}


def streamed(by: MessageWriter, said: str, cuts: list[int], output: GenerationOutput) -> list[dict[str, Any]]:
    update = Update("r", TokenRun(), 1, 1, 9, 0, 0)
    events = by.opening()
    for cut in sorted(cuts):
        events += by.events(0, update, Progress(TokenRun(), said[:cut]))
    return [*events, *by.events(0, update, Progress(TokenRun((4, 5)), said, output)), *by.closing()]


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "id": "", "content": [{**block, "id": ""} for block in message["content"]]}


@given(
    said=st.sampled_from(
        ["", "größer \u2028", f"<think>hm\n</think>\nyes {CALLED}", CALLED, f"<think>a</think>{CALLED}\n{CALLED}"]
    ),
    cuts=st.lists(st.integers(0, 80), max_size=5),
)
def test_events_build_the_whole_message(said: str, cuts: list[int]):
    by, output = writer(), output_of(said)
    events = streamed(by, said, cuts, output)
    whole = writer().whole([output])
    MessageObject.model_validate(whole, strict=True)
    assert without_ids(built(events)) == without_ids(whole)
    for event in events:
        name, data, *end = by.frame(event).decode().split("\n")
        assert (name, end, "\u2028" in data) == (f"event: {event['type']}", ["", ""], False)


def test_what_a_message_holds():
    whole = writer().whole([output_of(f"<think>hm</think>yes{CALLED}")])
    thought, said, used = whole["content"]
    assert thought == {"type": "thinking", "thinking": "hm", "signature": SIGNATURE}
    assert said == {"type": "text", "text": "yes"}
    assert (used["name"], used["input"], used["id"][:6]) == ("add", {"a": 1}, "toolu_")
    assert (whole["stop_reason"], whole["id"][:4], whole["role"]) == ("tool_use", "msg_", "assistant")
    assert whole["usage"] == {
        "input_tokens": 1,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 2,
        "output_tokens": 2,
        "output_tokens_details": {"thinking_tokens": 2},
        "service_tier": "standard",
    }
    assert (whole["lopa"], whole["seed"]) == ({"num_forwards": 4, "tokens_per_forward": 0.5}, 7)
    again = parsed(messages=[*HELLO, {"role": "assistant", "content": whole["content"]}, *HELLO])
    assert again.as_template_input()[1]["tool_calls"][0]["id"] == used["id"]


def test_thinking_that_is_not_wanted_is_left_out():
    output = output_of("<think>hm</think>yes")
    for asked, blocks in (("disabled", ["text"]), ("adaptive", ["thinking", "text"])):
        thinking = {"type": asked, "display": "omitted"}
        whole = writer(thinking=thinking).whole([output])
        assert [block["type"] for block in whole["content"]] == blocks
        assert whole["content"][0].get("thinking", "") == ""
        assert without_ids(
            built(streamed(writer(thinking=thinking), output.text or "", [9, 12], output))
        ) == without_ids(whole)


@pytest.mark.parametrize(
    ("said", "reason", "stop", "longest", "expected"),
    [
        ("a", "stop", None, 64, ("end_turn", None)),
        ("a", "stop", "END", 64, ("stop_sequence", "END")),
        ("a", "stop", 7, 64, ("end_turn", None)),
        ("a", "length", None, 64, ("max_tokens", None)),
        ("a", "length", None, 63, ("model_context_window_exceeded", None)),
        ("a", "abort", None, 63, ("max_tokens", None)),
        (CALLED, "stop", "END", 64, ("tool_use", None)),
        (CALLED, "length", None, 64, ("max_tokens", None)),
    ],
)
def test_stop_reasons(said: str, reason: str, stop: int | str | None, longest: int, expected: tuple[str, str | None]):
    whole = writer(longest).whole([output_of(said, reason, stop)])
    assert (whole["stop_reason"], whole["stop_sequence"]) == expected


def test_a_call_that_was_cut():
    forced = writer(tool_choice={"type": "any"})
    cut = output_of('<tool_call>\n{"name": "add", "arguments": {"a": 1', "length")
    whole = forced.whole([cut])
    assert (whole["stop_reason"], whole["content"][0]["input"]) == ("max_tokens", {"INVALID_JSON": '{"a": 1'})
    assert parsed(messages=[*HELLO, {"role": "assistant", "content": whole["content"]}, *HELLO])


# ---- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (405, "invalid_request_error"),
        (413, "request_too_large"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (503, "overloaded_error"),
        (504, "timeout_error"),
    ],
)
def test_errors_have_anthropics_types(status: int, kind: str):
    body = ApiError(status, "no", code="odd").messages_body("r")
    detail = {"type": kind, "message": "no", "details": {"error_code": "odd"}}
    assert body == {"type": "error", "error": detail, "request_id": "r"}
    error_body("/v1/messages/count_tokens").model_validate(body, strict=True)
    assert error_body("/v1/messages") is not error_body("/v1/messages_of") is error_body("/v1/models")


def test_a_failure_ends_a_stream():
    by = writer()
    late = ApiError(HTTPStatus.GATEWAY_TIMEOUT, "too late", code="timeout")
    (event,) = by.failure(late)
    assert (event["type"], event["error"]["type"], by.end) == ("error", "timeout_error", b"")
    assert by.comment == b'event: ping\ndata: {"type":"ping"}\n\n'
