"""Fields that clients send and this server has no use for: the same rule in every route and at every depth."""

import json
import time
from functools import partial
from typing import Any

import pytest
from openai.types.chat import ChatCompletionMessage, ParsedChatCompletionMessage
from openai.types.responses import ParsedResponseOutputMessage, ParsedResponseOutputText, ResponseReasoningItem

from lopa_ascend.serve.api.chat import ChatRequest
from lopa_ascend.serve.api.completions import CompletionRequest
from lopa_ascend.serve.api.fields import IN_MESSAGES_REQUEST, IN_REQUEST, INSIDE
from lopa_ascend.serve.api.messages import MessagesRequest
from lopa_ascend.serve.api.responses import ResponseRequest
from lopa_ascend.serve.diffusion import DiffusionChatRequest, DiffusionCompletionRequest
from lopa_ascend.serve.http.api_error import ApiError
from lopa_ascend.serve.http.body import Body, _note_ignored, read_body
from lopa_ascend.serve.observe.info import AbortRequest
from lopa_ascend.serve.tokens import DetokenizeRequest, TokenizeRequest

Path = tuple[str | int, ...]

PROMPT = {"prompt": "x", "stream": True, "stream_options": {}}
HISTORY = [{"role": "user", "content": [{"type": "text", "text": "a"}]}, {"role": "assistant", "content": "b"}]
CHAT = {"messages": HISTORY, "stream": True, "stream_options": {}}
RESPONSE = {"input": [*HISTORY, {"type": "reasoning", "summary": []}]}
MESSAGES = {
    "messages": [*HISTORY, HISTORY[0]],
    "system": [{"type": "text", "text": "s"}],
    "thinking": {"type": "adaptive"},
    "output_config": {"effort": "low"},
}
BODIES: list[tuple[type[Body], dict[str, Any]]] = [
    (CompletionRequest, PROMPT),
    (ChatRequest, CHAT),
    (ResponseRequest, RESPONSE),
    (DiffusionCompletionRequest, {"prompt": "x"}),
    (DiffusionChatRequest, {"messages": HISTORY}),
    (MessagesRequest, MESSAGES),
    (TokenizeRequest, {"messages": HISTORY}),
    (DetokenizeRequest, {"tokens": [1]}),
    (AbortRequest, {"request_id": "r"}),
]


def objects(value: Any, path: Path = ()) -> list[Path]:
    """The paths of all objects in a body."""
    items: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path] * isinstance(value, dict) + [found for key, item in items for found in objects(item, (*path, key))]


def with_field(body: dict[str, Any], path: Path, **fields: Any) -> bytes:
    """The body, with fields in the object at the path."""
    changed: Any = json.loads(json.dumps(body))
    target = changed
    for part in path:
        target = target[part]
    target |= fields
    return json.dumps(changed).encode()


def written(path: Path, field: str) -> str:
    """A path as errors write it."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in (*path, field)).removeprefix(".")


PLACES = [(model, body, path) for model, body in BODIES for path in objects(body)]


@pytest.mark.parametrize(("model", "body", "path"), PLACES)
def test_unknown_fields_are_refused_by_their_path_unless_they_are_empty(model: type[Body], body: Any, path: Path):
    plain = read_body(model, json.dumps(body).encode())
    empties: list[Any] = [None, "", [], {}]
    for empty in empties:
        assert read_body(model, with_field(body, path, sure=empty)) == plain
    for value in ("x", 0, False, [None], {"a": None}):
        with pytest.raises(ApiError) as refused:
            read_body(model, with_field(body, path, sure=value))
        assert (refused.value.status, refused.value.code) == (400, "unknown_parameter")
        assert refused.value.param == written(path, "sure")


OPTIONAL: dict[str, list[str]] = {
    "messages": ["name", "type", "tool_calls", "refusal"],
    "input": ["name", "type", "status", "phase"],
    "stream_options": ["include_usage"],
    "content": ["id", "annotations"],
    "system": ["cache_control", "citations"],
    "thinking": ["budget_tokens", "display"],
    "output_config": ["format", "task_budget"],
}


@pytest.mark.parametrize(("model", "body", "path"), PLACES)
def test_a_known_optional_field_that_is_null_counts_as_absent(model: type[Body], body: Any, path: Path):
    names = [part for part in path if isinstance(part, str)]
    nulls: dict[str, Any] = dict.fromkeys(OPTIONAL[names[-1]] if names else ["model"])
    if read_type(body, path) != "reasoning":
        assert read_body(model, with_field(body, path, **nulls)) == read_body(model, json.dumps(body).encode())


def read_type(body: Any, path: Path) -> object:
    for part in path:
        body = body[part]
    return body.get("type")


# ---- the table -------------------------------------------------------------------------------------------------------

CALLED_ADD = {"name": "add", "arguments": '{"a": 1}'}
CALLING = {
    "messages": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": CALLED_ADD}]},
        {"role": "tool", "content": "2", "tool_call_id": "c"},
    ]
}
RESPONSE_CALLING = {
    "input": [
        {"role": "user", "content": "a"},
        {"type": "function_call", "call_id": "c", **CALLED_ADD},
        {"type": "function_call_output", "call_id": "c", "output": "2"},
    ]
}
ADD = {"name": "add", "parameters": {"type": "object"}}
MESSAGES_CALLING: dict[str, Any] = {
    "messages": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "add", "input": {"a": 1}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "2"}]},
    ],
    "tools": [{"name": "add", "input_schema": {"type": "object"}}],
}
WITH_TOOLS = {**CALLING, "tools": [{"type": "function", "function": ADD}]}
RESPONSE_WITH_TOOLS = {**RESPONSE_CALLING, "tools": [{"type": "function", **ADD}]}
WHERE: list[tuple[type[Body], dict[str, Any], Path]] = [
    (CompletionRequest, PROMPT, ("stream_options",)),
    (ChatRequest, CHAT, ("stream_options",)),
    (ChatRequest, CHAT, ("messages", 1)),
    (ResponseRequest, RESPONSE, ("input", 1)),
    (ChatRequest, CHAT, ("messages", 0, "content", 0)),
    (ResponseRequest, RESPONSE, ("input", 0, "content", 0)),
    (MessagesRequest, MESSAGES, ("messages", 0, "content", 0)),
    (ResponseRequest, RESPONSE, ("input", 2)),
    (ChatRequest, WITH_TOOLS, ("tools", 0)),
    (ChatRequest, WITH_TOOLS, ("tools", 0, "function")),
    (ResponseRequest, RESPONSE_WITH_TOOLS, ("tools", 0)),
    (MessagesRequest, MESSAGES_CALLING, ("tools", 0)),
    (ChatRequest, CALLING, ("messages", 1, "tool_calls", 0)),
    (MessagesRequest, MESSAGES_CALLING, ("messages", 1, "content", 0)),
    (MessagesRequest, MESSAGES_CALLING, ("messages", 2, "content", 0)),
    (ChatRequest, CALLING, ("messages", 1, "tool_calls", 0, "function")),
    (ResponseRequest, RESPONSE_CALLING, ("input", 1)),
    (ResponseRequest, RESPONSE_CALLING, ("input", 2)),
]
"""Objects inside bodies that may have the ignored fields."""


def said(body: Any) -> Any:
    """What of a body reaches the chat template."""
    tools = body.callable.as_template_input() if hasattr(body, "callable") else []
    if isinstance(body, ResponseRequest | MessagesRequest):
        return [*body.as_template_input(), *tools]
    return [*(message.as_template_input() for message in getattr(body, "messages", ())), *tools]


@pytest.mark.parametrize(("model", "body"), BODIES[:6])
@pytest.mark.parametrize("value", ["x", 1.5, [None], {"a": 1}])
def test_a_request_takes_what_changes_nothing_whatever_it_holds(model: type[Body], body: Any, value: Any):
    table = IN_MESSAGES_REQUEST if model is MessagesRequest else IN_REQUEST
    plain = read_body(model, json.dumps(body).encode())
    for name in table.keys() - model.model_fields.keys():
        assert read_body(model, with_field(body, (), **{name: value})) == plain


@pytest.mark.parametrize(("model", "body", "path"), WHERE)
def test_objects_inside_take_what_changes_nothing(model: type[Body], body: Any, path: Path):
    target: Any = body
    for part in path:
        target = target[part]
    for name in INSIDE.keys() - target.keys() - {"name", "caller"}:  # fields of some of these objects
        for value in ("x", [{"a": 1}], {"a": [7]}):
            found = read_body(model, with_field(body, path, **{name: value}))
            assert said(found) == said(read_body(model, json.dumps(body).encode()))


def test_a_field_that_changes_nothing_is_logged_once(caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO")
    _note_ignored.cache_clear()
    for who in ("a", "b"):
        read_body(CompletionRequest, with_field(PROMPT, (), user=who))
    assert caplog.messages == ["requests have the field 'user', which changes nothing here: " + IN_REQUEST["user"]]


# ---- what clients send back ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": []}])
def test_an_answer_may_be_sent_back_empty_and_a_question_may_not(content: dict[str, Any]) -> None:
    asked = read_body(ChatRequest, json.dumps({"messages": [HISTORY[0], {"role": "assistant", **content}]}).encode())
    assert said(asked)[1] == {"role": "assistant", "content": ""}
    with pytest.raises(ApiError, match=r"messages\[0\].content"):
        read_body(ChatRequest, json.dumps({"messages": [{"role": "user", **content}]}).encode())


ANSWER: dict[str, Any] = {"role": "assistant", "content": "b", "refusal": None}
OUTPUT = {
    "id": "msg_1",
    "type": "message",
    "role": "assistant",
    "status": "completed",
    "content": [{"type": "output_text", "text": "b", "annotations": [], "logprobs": []}],
}
SENT_BACK: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "openai, create": ("messages", [ChatCompletionMessage.model_validate(ANSWER).model_dump()]),
    "openai, parse and stream": ("messages", [ParsedChatCompletionMessage[Any].model_validate(ANSWER).model_dump()]),
    "openai, parsed": (
        "messages",
        [ParsedChatCompletionMessage[Any].model_validate({**ANSWER, "parsed": {"b": 1}}).model_dump()],
    ),
    "openai, responses.parse": (
        "input",
        [
            ResponseReasoningItem(id="rs_1", type="reasoning", summary=[]).model_dump(),
            ParsedResponseOutputMessage[Any](
                **{**OUTPUT, "content": [ParsedResponseOutputText[Any].model_validate(OUTPUT["content"][0])]}
            ).model_dump(),
        ],
    ),
    "agents": ("input", [OUTPUT]),
    "litellm": (
        "messages",
        [
            {
                **ANSWER,
                "tool_calls": None,
                "function_call": None,
                "provider_specific_fields": {"refusal": None},
                "reasoning_content": "hm",
                "thinking_blocks": [{"type": "thinking", "thinking": "hm", "signature": "s"}],
                "annotations": [],
            }
        ],
    ),
    "langchain": (
        "messages",
        [
            {
                "role": "assistant",
                "content": [{"type": "text", "text": "b", "id": "lc_1", "annotations": [], "index": 0}],
            }
        ],
    ),
    "hints for caches": (
        "messages",
        [{"role": "assistant", "content": [{"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}]}],
    ),
}


@pytest.mark.parametrize(("field", "answer"), SENT_BACK.values(), ids=SENT_BACK)
def test_an_answer_can_be_sent_back_as_clients_keep_it(field: str, answer: list[dict[str, Any]]):
    user = {"role": "user", "content": "a"}
    body = json.dumps({field: [user, *answer, user]}).encode()
    asked = read_body(ChatRequest if field == "messages" else ResponseRequest, body)
    conversation = [{name: row[name] for name in row if name != "reasoning_content"} for row in said(asked)]
    assert conversation == [user, {"role": "assistant", "content": "b"}, user]


# ---- what could change the answer ------------------------------------------------------------------------------------

IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}
chat: Any = partial(dict, messages=HISTORY)
REFUSED: dict[str, tuple[type[Body], dict[str, Any], str, str]] = {
    "functions": (ChatRequest, chat(functions=[{"name": "f"}]), "functions", "send tools"),
    "format": (ChatRequest, chat(response_format={"type": "xml"}), "response_format.type", "'json_schema'"),
    "pattern": (ChatRequest, chat(guided_whitespace_pattern=" "), "guided_whitespace_pattern", "send a regex"),
    "image": (
        ChatRequest,
        {"messages": [{"role": "user", "content": [IMAGE]}]},
        "messages[0].content[0].type",
        "'text' or 'input_text' or 'output_text', got 'image_url'. Instead, send text alone",
    ),
    "calls": (
        ChatRequest,
        {"messages": [{**ANSWER, "tool_calls": [{"type": "custom"}]}]},
        "messages[0].tool_calls[0].type",
        "send a call as",
    ),
    "calls of a user": (
        ChatRequest,
        {"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]},
        "messages[0].tool_calls",
        "belongs to the role 'assistant', and this message has 'user'",
    ),
    "result": (
        ChatRequest,
        {"messages": [{"role": "function", "content": "7", "name": "add"}]},
        "messages[0].role",
        "got 'function'. Instead, send the role tool",
    ),
    "reference": (
        ResponseRequest,
        {"input": [*HISTORY, {"type": "item_reference", "id": "msg_1"}]},
        "input[2].type",
        "send the message itself",
    ),
    "earlier response": (
        ResponseRequest,
        {"input": "x", "previous_response_id": "resp_1"},
        "previous_response_id",
        "send the whole conversation in input",
    ),
    "logprobs of a response": (ResponseRequest, {"input": "x", "logprobs": 1}, "logprobs", "take /v1/chat/completions"),
    "misspelt": (ChatRequest, chat(temprature=1), "temprature", "did you mean 'temperature'"),
    "misspelt inside": (ChatRequest, {"messages": [{**ANSWER, "nmae": "n"}]}, "messages[0].nmae", "unknown field"),
}


@pytest.mark.parametrize(("model", "body", "param", "words"), REFUSED.values(), ids=REFUSED)
def test_what_could_change_the_answer_is_refused_with_what_to_do(model: type[Body], body: Any, param: str, words: str):
    with pytest.raises(ApiError) as refused:
        read_body(model, json.dumps(body).encode())
    assert (refused.value.status, refused.value.param) == (400, param)
    assert words in refused.value.message


HUGE: dict[str, tuple[type[Body], dict[str, Any], str]] = {
    "parts": (ChatRequest, {"messages": [{**ANSWER, "content": [{"type": "text", "text": ""}] * 30_000}]}, "16384"),
    "blocks": (MessagesRequest, {**MESSAGES, "system": [{"type": "text", "text": ""}] * 30_000}, "at most 1024 items"),
    "include": (ResponseRequest, {"input": "x", "include": [1] * 400_000}, "include"),
    "reasoning": (ResponseRequest, {"input": [{"type": "reasoning"}] * 30_000}, "at most 16384 items"),
    "type": (ResponseRequest, {"input": [{"type": ["a"] * 200_000}]}, "must be 'message'"),
}


@pytest.mark.parametrize(("model", "body", "words"), HUGE.values(), ids=HUGE)
def test_lists_that_are_huge_and_wrong_are_refused_at_once(model: type[Body], body: Any, words: str):
    raw = json.dumps(body, separators=(",", ":")).encode()
    start = time.thread_time()
    with pytest.raises(ApiError, match=words) as refused:
        read_body(model, raw)
    assert time.thread_time() - start < 1
    assert len(refused.value.message) < 700


def test_every_field_that_is_refused_says_what_to_do():
    for model, body in BODIES:
        for name in model.harmless.keys() - {"priority", "stream", "stream_options"}:
            if model.harmless[name] == (True, False):
                continue  # there is nothing else to do
            with pytest.raises(ApiError) as refused:
                read_body(model, with_field(body, (), **{name: "something"}))
            assert ". Instead, " in refused.value.message, name
