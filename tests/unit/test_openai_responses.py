"""Bodies and events of /v1/responses; the judge of what is written are the types of the openai client."""

import json
from http import HTTPStatus
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from lopa_ascend.config import DecodingParams
from lopa_ascend.core import Request
from lopa_ascend.serve.api.responses import ResponseObject, ResponseRequest, ResponseWriter
from lopa_ascend.serve.http.api_error import ApiError
from lopa_ascend.serve.http.body import read_body
from lopa_ascend.types import GenerationOutput, Progress, TokenRun, Update

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
TEXTS = ["größer als 5 €?", "line\nbreak \u2028 \x85", "🙂", ""]
SENT_BACK: dict[str, Any] = {
    "id": "msg_1",
    "type": "message",
    "role": "assistant",
    "status": "completed",
    "content": [{"type": "output_text", "text": "b", "annotations": [], "logprobs": None}],
    "phase": None,
}


def parsed(**fields: Any) -> Any:
    return read_body(ResponseRequest, json.dumps({"input": "x", **fields}).encode())


# ---- bodies ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "messages"),
    [
        ({"input": "a"}, [("user", "a")]),
        ({"input": "a", "instructions": "be brief"}, [("system", "be brief"), ("user", "a")]),
        ({"input": [{"role": "developer", "content": "a"}]}, [("system", "a")]),
        (
            {"input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}] * 2}]},
            [("user", "a\na")],
        ),
        (
            {"input": [{"role": "user", "content": "a"}, SENT_BACK, {"role": "user", "content": "c"}]},
            [("user", "a"), ("assistant", "b"), ("user", "c")],
        ),
    ],
)
def test_a_conversation_as_the_template_takes_it(fields: dict[str, Any], messages: list[tuple[str, str]]):
    found = parsed(**fields).as_template_input()
    assert [(message["role"], message["content"]) for message in found] == messages


def item(**fields: Any) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": "a"}, {"role": "user", "content": "x", **fields}]}


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"input": None}, "input", "missing"),
        ({"input": 7}, "input", "string or a list of items"),
        ({"input": []}, "input", "string or a list of items"),
        ({"input": [7]}, "input[0]", "7"),
        ({"input": [{"role": "user"}]}, "input[0].content", "missing"),
        (item(role="function"), "input[1].role", "'assistant'"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": 1}]}, "input[0].output", "text parts"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input[0].arguments", "missing"),
        (
            {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": [1]}]},
            "input[0].arguments",
            "string",
        ),
        (item(type="file_search_call"), "input[1].type", "send calls of functions"),
        (item(type="item_reference", id="msg_1"), "input[1].type", "item_reference"),
        (item(content=[{"type": "input_image", "image_url": "u"}]), "input[1].content[0].type", "input_text"),
        (item(content=[{"type": "refusal", "refusal": "no"}]), "input[1].content[0].type", "output_text"),
        (item(content=[{"type": "input_text", "text": 5}]), "input[1].content[0].text", "string"),
        (item(content=[]), "input[1].content", "text parts"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "keeps no responses"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type", "'json_schema'"),
        ({"include": ["message.output_text.logprobs"]}, "include[0]", "reasoning.encrypted_content"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice.type", "describe it as a function"),
        ({"tool_choice": "always"}, "tool_choice", "'required'"),
        ({"metadata": {"run": 7}}, "metadata.run", "string"),
        ({"metadata": {str(number): "" for number in range(17)}}, "metadata", "16 pairs"),
        ({"metadata": {"n" * 65: ""}}, "metadata", "64"),
        ({"metadata": {"run": "v" * 513}}, "metadata", "512 characters"),
        ({"user": "u" * 513}, "user", "512 characters"),
        ({"logprobs": True}, "logprobs", "unknown"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(fields: dict[str, Any], param: str, message: str):
    with pytest.raises(ApiError) as refused:
        parsed(**fields)
    assert (refused.value.status, refused.value.param) == (HTTPStatus.BAD_REQUEST, param)
    assert message in refused.value.message


def test_neutral_values_are_taken():
    for name, values in ResponseRequest.harmless.items():
        for value in (None, *values):
            parsed(**{name: value})
        with pytest.raises(ApiError) as refused:
            parsed(**{name: "something"})
        assert refused.value.param == name
    tools: list[Any] = [{"type": "function", "name": "f", "parameters": {}, "strict": None}]
    neutral: list[dict[str, Any]] = [
        {"tools": tools, "tool_choice": "none"},
        {"tools": [], "tool_choice": "auto"},
        {"text": {"format": {"type": "text"}, "verbosity": "low"}},
        {"reasoning": {"effort": "high", "summary": None}},
        {"reasoning": {"summary": "auto"}, "parallel_tool_calls": False},
        {"store": True, "previous_response_id": None, "user": "u", "prompt_cache_key": "k", "safety_identifier": "s"},
    ]
    for fields in neutral:
        parsed(**fields)


# ---- answers ---------------------------------------------------------------------------------------------------------

PARAMS = DecodingParams(max_new_tokens=9, temperature=1.0, top_p=0.5)


def writer(**fields: Any) -> ResponseWriter:
    return ResponseWriter("m", parsed(**fields), Request("", (1, 2, 3), PARAMS))


def output_of(text: str, reason: str) -> GenerationOutput:
    return GenerationOutput(
        prompt_token_ids=(1, 2, 3),
        tokens=TokenRun((4, 5)),
        text=text,
        finish_reason=reason,
        stop_reason="END" if reason == "stop" else None,
        num_forwards=4,
        num_positions=8,
        model_tokens=9,
        cached_tokens=2,
        seed=7,
    )


def timeless(response: dict[str, Any]) -> dict[str, Any]:
    """A response without what differs between two of the same request."""
    message = [{**item, "id": ""} for item in response["output"]]
    return {**response, "output": message, "id": "", "created_at": 0, "completed_at": response["completed_at"] and 0}


@pytest.mark.parametrize(
    ("reason", "status", "details"),
    [
        ("stop", "completed", None),
        ("length", "incomplete", {"reason": "max_output_tokens"}),
        ("abort", "cancelled", None),
    ],
)
def test_a_response_is_one_of_the_clients(reason: str, status: str, details: dict[str, str] | None):
    asked = writer(instructions="i", metadata={"a": "b"}, user="u", tool_choice="none")
    whole = asked.whole([output_of("text", reason)])
    assert whole.keys() == ResponseObject.model_fields.keys()
    ResponseObject.model_validate(whole, strict=True)
    response: Any = Response.model_validate(whole, strict=True)
    assert (response.id[:5], response.status, whole["incomplete_details"]) == ("resp_", status, details)
    assert (response.completed_at is not None) == (status == "completed")
    assert response.output_text == "text"
    (message,) = response.output
    assert message.status == ("completed" if status == "completed" else "incomplete")
    assert (response.instructions, response.metadata, response.user) == ("i", {"a": "b"}, "u")
    assert (response.temperature, response.top_p, response.max_output_tokens) == (1.0, 0.5, 9)
    assert (response.tool_choice, response.store, response.seed) == ("none", False, 7)
    assert response.stop_reason == ("END" if reason == "stop" else None)
    usage = response.usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (3, 2, 5)
    assert (usage.input_tokens_details.cached_tokens, usage.output_tokens_details.reasoning_tokens) == (2, 0)
    assert response.lopa == {"num_forwards": 4, "tokens_per_forward": 0.5}


def test_a_response_repeats_what_has_no_effect():
    options = {"text": {"verbosity": "low"}, "reasoning": {"effort": "low"}, "parallel_tool_calls": False}
    whole = writer(**options).whole([output_of("text", "stop")])
    response = Response.model_validate(whole, strict=True)
    assert response.text is not None
    assert response.reasoning is not None
    assert (response.text.verbosity, response.reasoning.effort, response.parallel_tool_calls) == ("low", "low", False)
    ResponseObject.model_validate(whole, strict=True)


def checked(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The events, each of which the client must read as it is, and as one line of a stream."""
    for number, event in enumerate(events):
        assert event["sequence_number"] == number
        assert EVENT.validate_python(event, strict=True).type == event["type"]
        name, data, *end = writer().frame(event).decode().split("\n")
        assert (name, json.loads(data.removeprefix("data: ")), end) == (f"event: {event['type']}", event, ["", ""])
    return events


@given(
    text=st.sampled_from(TEXTS) | st.text(max_size=12),
    cuts=st.lists(st.integers(0, 12), max_size=5),
    reason=st.sampled_from(["stop", "length", "abort"]),
)
def test_events_build_the_whole_response(text: str, cuts: list[int], reason: str):
    asked = writer()
    update = Update("r", TokenRun(), 1, 1, 9, 0, 0)
    events = asked.opening()
    for cut in sorted(cuts):
        events += asked.events(0, update, Progress(TokenRun(), text[:cut]))
    output = output_of(text, reason)
    events += asked.events(0, update, Progress(TokenRun((4, 5)), text, output)) + asked.closing()
    deltas = [event["delta"] for event in checked(events) if event["type"] == "response.output_text.delta"]
    assert "".join(deltas) == text
    assert "" not in deltas
    assert [event["type"].removeprefix("response.") for event in events if "delta" not in event] == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *("output_text.done", "content_part.done", "output_item.done"),
        "completed" if reason == "stop" else "incomplete",
    ]
    whole = asked.whole([output])
    assert timeless(events[-1]["response"]) == timeless(whole)
    assert (events[-4]["text"], events[-3]["part"]) == (text, whole["output"][0]["content"][0])
    assert events[-2]["item"] == whole["output"][0]
    assert {event["item_id"] for event in events if "item_id" in event} == {whole["output"][0]["id"]}
    assert (events[0]["response"]["status"], events[0]["response"]["output"]) == ("in_progress", [])


def test_a_failure_is_an_error_and_a_failed_response():
    asked = writer()
    new = TokenRun((4,), (1.0,))
    events = asked.opening() + asked.events(0, Update("r", new, 1, 1, 9, 0, 0), Progress(new, "be"))
    late = ApiError(HTTPStatus.GATEWAY_TIMEOUT, "too late", code="timeout")
    error, failed = checked(events + asked.failure(late))[-2:]
    assert (error["type"], error["code"], error["message"]) == ("error", "timeout", "too late")
    assert failed["type"] == "response.failed"
    assert failed["response"]["status"] == "failed"
    assert failed["response"]["error"] == {"code": "server_error", "message": "too late"}
    (message,) = failed["response"]["output"]
    assert (message["status"], message["content"][0]["text"]) == ("incomplete", "be")
    assert failed["response"].keys() == ResponseObject.model_fields.keys()
    assert asked.end == b""
