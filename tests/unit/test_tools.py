"""Tools and forms of answers: what requests ask for, and how calls are written."""

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion as ClientCompletion
from openai.types.chat import ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from lopa_ascend.admission import Limits
from lopa_ascend.config import ParameterError
from lopa_ascend.core import Request
from lopa_ascend.serve.api.chat import ChatRequest
from lopa_ascend.serve.api.completions import CompletionRequest
from lopa_ascend.serve.api.request import GenerationRequest, Planner
from lopa_ascend.serve.api.responses import ResponseRequest
from lopa_ascend.serve.api.score import ScoreRequest
from lopa_ascend.serve.api.tools import warn_once
from lopa_ascend.serve.http.api_error import ApiError
from lopa_ascend.serve.http.body import read_body
from lopa_ascend.serve.http.encoding import pieces
from lopa_ascend.text.grammars import Grammars
from lopa_ascend.text.prompt import Prompts
from lopa_ascend.text.schemas import closed
from lopa_ascend.types import GenerationOutput, Progress, TokenRun, Update
from tests.tiny import tiny_tokenizer
from tests.tool_template import TEMPLATE

LIMITS = Limits(
    vocab_size=320,
    mask_token_id=319,
    max_model_len=4096,
    num_pages=1000,
    max_num_seqs=4,
    max_num_batched_tokens=8192,
    max_num_branches=7,
)
ADD = {
    "name": "add",
    "description": "Adds.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
}
GET = {"name": "get", "parameters": {"type": "object", "properties": {"url": {"type": "string"}}}}
TOOLS = [{"type": "function", "function": ADD}, {"type": "function", "function": GET}]
FLAT = [{"type": "function", **ADD}, {"type": "function", **GET}]
CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
CALLED = '<tool_call>\n{"name": "add", "arguments": {"a":1}}\n</tool_call>'


def planner(template: str | None = TEMPLATE) -> Planner:
    tokenizer = tiny_tokenizer.__wrapped__()  # the template is its own
    if template is not None:
        tokenizer.chat_template = template
    return Planner(Prompts(tokenizer, 320, 319, "m"), LIMITS, {})


PLANNER = planner()


def asked(model: type[Any], **fields: Any) -> Any:
    return read_body(model, json.dumps(fields).encode())


def chat(**fields: Any) -> Any:
    return asked(ChatRequest, **{"messages": [{"role": "user", "content": "hello"}], "max_tokens": 64, **fields})


def shown(request: GenerationRequest) -> str:
    """The prompt that a request makes."""
    (choice,) = request.plan(PLANNER)
    assert PLANNER.prompts.tokenizer is not None
    return PLANNER.prompts.tokenizer.decode(choice.prompt, skip_special_tokens=False)


# ---- prompts ---------------------------------------------------------------------------------------------------------


def test_the_template_gets_tools_calls_and_results() -> None:
    messages = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": "2"},
    ]
    items = [
        messages[0],
        {"type": "function_call", "call_id": "call_1", "name": "add", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "call_1", "output": "2"},
    ]
    text = shown(chat(messages=messages, tools=TOOLS))
    assert json.dumps(TOOLS[0]) in text
    assert '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>' in text
    assert "<|im_start|>tool\n2<|im_end|>" in text
    assert shown(asked(ResponseRequest, input=items, tools=FLAT, max_output_tokens=64)) == text
    assert json.dumps(TOOLS[0]) not in shown(chat(tools=TOOLS, tool_choice="none"))


def called_with(arguments: Any, template: str) -> list[str]:
    """How the template shows a call with these arguments, from chat and from Responses."""
    called = {**CALL, "function": {"name": "add", "arguments": arguments}}
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "tool_calls": [called]}]
    items = [messages[0], {"type": "function_call", "call_id": "call_1", "name": "add", "arguments": arguments}]
    plan, found = planner(template), []
    for request in (chat(messages=messages), asked(ResponseRequest, input=items, max_output_tokens=64)):
        (choice,) = request.plan(plan)
        assert plan.prompts.tokenizer is not None
        text = plan.prompts.tokenizer.decode(choice.prompt, skip_special_tokens=False)
        found.append(text.partition('"arguments": ')[2].partition("}\n</tool_call>")[0])
    return found


AS_TEXT = TEMPLATE.replace(
    "call.function.arguments | tojson",
    "call.function.arguments if call.function.arguments is string else call.function.arguments | tojson",
)
"""As Qwen3's template writes calls."""


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"a": 1}', '{"a": 1}'),
        ({"a": 1}, '{"a": 1}'),
        *[(nothing, "{}") for nothing in ("", "null", " {} ", None)],
        *[
            (text, text)
            for text in ('{"a":"84. So', "[]", "[1]", "7", '{"a": NaN}', '{"a": 1e400}', r'{"a": "\ud83d"}')
        ],
    ],
)
def test_arguments_in_a_conversation_are_an_object_or_shown_as_they_are(arguments: Any, expected: str) -> None:
    assert called_with(arguments, AS_TEXT) == [expected, expected]
    quoted = expected if expected in ("{}", '{"a": 1}') else json.dumps(expected)
    assert called_with(arguments, TEMPLATE) == [quoted, quoted]


def test_the_result_of_a_call_may_be_empty() -> None:
    empties: list[Any] = ["", [], None]
    for empty in empties:
        messages = [{"role": "tool", "tool_call_id": "call_1", "content": empty}]
        items = [{"type": "function_call_output", "call_id": "call_1", "output": empty}]
        for request in (chat(messages=messages), asked(ResponseRequest, input=items, max_output_tokens=64)):
            assert "<|im_start|>tool\n<|im_end|>" in shown(request)


OTHERS: list[dict[str, Any]] = [
    {"type": "local_shell"},
    {"type": "web_search", "external_web_access": True},
    {
        "type": "custom",
        "name": "apply_patch",
        "format": {"type": "grammar", "syntax": "lark", "definition": "start: X"},
    },
    {"type": "namespace", "name": "mcp", "tools": [{"type": "function", "name": "x"}]},
]


def test_tools_of_other_kinds_are_left_out() -> None:
    for kind in OTHERS:
        assert shown(chat(tools=[kind, *TOOLS])) == shown(chat(tools=TOOLS))
        request = asked(ResponseRequest, input="hello", tools=[kind, *FLAT], max_output_tokens=64)
        assert shown(request) == shown(asked(ResponseRequest, input="hello", tools=FLAT, max_output_tokens=64))
        writer = request.writer(PLANNER, "m", request.plan(PLANNER))
        assert writer.whole([output_of("x")])["tools"][0] == kind
    found, _ = refusal(lambda: chat(tools=[OTHERS[0], *tool(parameters={"type": "array"})]))
    assert found == "tools[3].function.parameters"
    assert shown(chat(tools=OTHERS)) == shown(chat())
    alone = chat(tools=OTHERS, tool_choice="required")
    assert refusal(lambda: alone.plan(PLANNER))[0] == "tool_choice"


def allowed(mode: str, *names: str) -> tuple[Any, Any]:
    """The choice of some functions, for chat and for Responses."""
    nested = [{"type": "function", "function": {"name": name}} for name in names]
    flat = [{"type": "function", "name": name} for name in names]
    of_chat = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": nested}}
    return of_chat, {"type": "allowed_tools", "mode": mode, "tools": flat}


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools_are_as_if_there_were_no_others(mode: str) -> None:
    of_chat, of_response = allowed(mode, "get")
    alone, some = chat(tools=TOOLS[1:], tool_choice=mode), chat(tools=TOOLS, tool_choice=of_chat)
    response = asked(ResponseRequest, input="hello", tools=FLAT, tool_choice=of_response, max_output_tokens=64)
    assert shown(some) == shown(alone) == shown(response)
    assert some.callable.callable().keys() == response.callable.callable().keys() == {"get"}
    assert some.callable.is_forced is response.callable.is_forced is (mode == "required")
    if mode == "required":
        assert matches(some, GET_CALLED)
        assert not matches(some, CALLED)
    assert response.writer(PLANNER, "m", response.plan(PLANNER)).whole([output_of("x")])["tool_choice"] == of_response
    other, place = allowed(mode, "get", "go"), "tool_choice.allowed_tools.tools[1].function.name"
    assert refusal(lambda: chat(tools=TOOLS, tool_choice=other[0]).plan(PLANNER))[0] == place
    response = asked(ResponseRequest, input="hello", tools=FLAT, tool_choice=other[1])
    assert refusal(lambda: response.plan(PLANNER))[0] == "tool_choice.tools[1].name"


def test_a_template_that_knows_no_tools_is_told_of_none() -> None:
    plain = planner(None)
    with pytest.raises(ParameterError, match="knows no tools") as refused:
        chat(tools=TOOLS).plan(plain)
    assert refused.value.param == "tools"
    with pytest.raises(ParameterError, match="knows no tools") as refused:
        chat(messages=[{"role": "tool", "content": "2"}]).plan(plain)
    assert refused.value.param == "messages"
    (forced,) = chat(tools=TOOLS, tool_choice="required").plan(plain)
    (free,) = chat().plan(plain)
    assert forced.prompt == free.prompt
    assert forced.params.structured_outputs is not None


def matches(request: GenerationRequest, text: str) -> bool:
    """Whether a text is an answer that the request's grammar lets end."""
    (choice, *_) = request.plan(PLANNER)
    grammar = choice.params.structured_outputs
    assert grammar is not None
    tokenizer = PLANNER.prompts.tokenizer
    assert tokenizer is not None
    matcher, tokens = Grammars(tokenizer).matcher(grammar), tokenizer.encode(text)
    return matcher.accept(tokens) == len(tokens) and matcher.is_complete


NAMED = {"type": "function", "function": {"name": "add"}}
GET_CALLED = '<tool_call>\n{"name": "get", "arguments": {}}\n</tool_call>'
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": ADD["parameters"]}}


@pytest.mark.parametrize(
    ("fields", "text", "fits"),
    [
        ({"tool_choice": "required"}, CALLED, True),
        ({"tool_choice": "required"}, GET_CALLED, True),
        ({"tool_choice": "required"}, f"{CALLED}\n{GET_CALLED}", True),
        ({"tool_choice": "required", "parallel_tool_calls": False}, f"{CALLED}\n{GET_CALLED}", False),
        ({"tool_choice": "required"}, "hello", False),
        ({"tool_choice": "required"}, CALLED.replace("1", "true"), False),
        ({"tool_choice": "required"}, CALLED.replace("1}", '1,"b":2}'), False),
        ({"tool_choice": NAMED}, CALLED, True),
        ({"tool_choice": NAMED}, GET_CALLED, False),
        ({"tool_choice": NAMED}, f"{CALLED}\n{CALLED}", False),
        ({"response_format": FORMAT}, CALLED, True),
        ({"response_format": FORMAT}, '{"a":1}', True),
        ({"response_format": FORMAT}, '{"a":"1"}', False),
        ({"response_format": {"type": "json_object"}}, '{"b":[]}', True),
        ({"guided_json": json.dumps(ADD["parameters"])}, '{"a":1}', True),
        ({"guided_json": json.dumps(ADD["parameters"])}, CALLED, True),
        ({"response_format": FORMAT, "tool_choice": "required"}, '{"a":1}', False),
    ],
)
def test_forced_calls_and_forms_beside_tools(fields: dict[str, Any], text: str, fits: bool) -> None:
    assert matches(chat(tools=TOOLS, **fields), text) is fits


SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "additionalProperties": False}


@pytest.mark.parametrize(
    ("fields", "text", "other"),
    [
        ({"response_format": {"type": "json_object"}}, '{"b":1}', "[1]"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
            '{"x":1}',
            "{1}",
        ),
        ({"guided_json": SCHEMA}, '{"x":1}', '{"y":1}'),
        ({"guided_json": json.dumps(SCHEMA)}, '{"x":1}', '{"y":1}'),
        ({"guided_regex": "a+b"}, "aab", "b"),
        ({"guided_choice": ["yes", "no"]}, "no", "maybe"),
        ({"guided_grammar": 'start: "a" "b"'}, "ab", "a"),
        ({"structured_outputs": {"regex": "[0-9]{3}"}}, "123", "12"),
    ],
)
def test_fields_that_ask_for_a_form(fields: dict[str, Any], text: str, other: str) -> None:
    for request in (chat(**fields), asked(CompletionRequest, prompt="x", max_tokens=64, **fields)):
        assert matches(request, text)
        assert not matches(request, other)
    if "response_format" not in fields:
        assert matches(asked(ResponseRequest, input="x", max_output_tokens=64, **fields), text)


def test_the_form_of_a_response() -> None:
    for form, text in (({"type": "json_object"}, "{}"), ({"type": "json_schema", "name": "n", "schema": SCHEMA}, "{}")):
        request = asked(ResponseRequest, input="x", max_output_tokens=64, text={"format": form})
        assert matches(request, text)
        writer = request.writer(PLANNER, "m", request.plan(PLANNER))
        assert writer.whole([output_of("{}")])["text"] == {"format": form}


def refusal(ask: Callable[[], object]) -> tuple[str | None, str]:
    """The field and the message with which a request is refused, by its fields or by its plan."""
    try:
        ask()
    except (ParameterError, ApiError) as error:
        return error.param, str(error)
    raise AssertionError("it was taken")


# ---- what is refused -------------------------------------------------------------------------------------------------


def tool(**function: Any) -> list[dict[str, Any]]:
    return [*TOOLS, {"type": "function", "function": {"name": "f", **function}}]


BAD_SCHEMA = {"type": "object", "properties": {"x": {"type": "integer", "minimum": "a"}}}
PLACE = "guided_json.properties.0 1.allOf[0].properties.x"
BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": [*TOOLS, TOOLS[0]]}, "tools[2].function.name", "is 'add', as is that of tools[0]"),
    ({"tools": tool(name="a b")}, "tools[2].function.name", "letters"),
    ({"tools": tool(parameters={"type": "array"})}, "tools[2].function.parameters", "'object'"),
    (
        {"tools": tool(parameters={"properties": {"x": {"type": "strng"}}})},
        "tools[2].function.parameters.properties.x.type",
        "strng",
    ),
    ({"tools": tool(parameters={"anyOf": [True, 5]})}, "tools[2].function.parameters.anyOf[1]", "got 5"),
    (
        {"tools": tool(parameters=BAD_SCHEMA), "tool_choice": "required"},
        "tools[2].function.parameters.properties.x",
        "minimum",
    ),
    (
        {"tools": TOOLS, "tool_choice": {**NAMED, "function": {"name": "g"}}},
        "tool_choice.function.name",
        "'add', 'get'",
    ),
    ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice", "'required'"),
    ({"tools": TOOLS, "tool_choice": {"type": "custom", "name": "x"}}, "tool_choice.type", "'function'"),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools", "missing"),
    ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice.function", "missing"),
    ({"tools": TOOLS, "tool_choice": 7}, "tool_choice", "string"),
    ({"tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"tool_choice": NAMED}, "tool_choice.function.name", "no function"),
    ({"tools": TOOLS, "guided_regex": "a"}, "guided_regex", "cannot be combined with tools"),
    ({"tools": TOOLS, "guided_json": "{"}, "guided_json", "no JSON"),
    ({"tools": TOOLS, "structured_outputs": {"json": True}}, "structured_outputs.json", "beside tools"),
    ({"tools": TOOLS, "guided_json": BAD_SCHEMA}, "guided_json.properties.x", "minimum"),
    ({"guided_regex": "a", "guided_json": {}}, "guided_regex", "cannot be combined with guided_json"),
    ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs.json", "structured_outputs.regex"),
    ({"structured_outputs": {"yaml": {}}}, "structured_outputs.yaml", "choose one of json"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "is missing"),
    ({"response_format": {"type": "text", "json_schema": {"name": "n"}}}, "response_format.json_schema", "'text'"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": BAD_SCHEMA}}},
        "response_format.json_schema.schema.properties.x",
        "minimum",
    ),
    ({"guided_json": {"properties": {"0 1": {"allOf": [BAD_SCHEMA]}}}}, PLACE, "minimum"),
    ({"guided_regex": "("}, "guided_regex", "regex"),
    ({"guided_grammar": "start: ("}, "guided_grammar", ""),
    ({"guided_choice": []}, "guided_choice", "1 to"),
    ({"guided_choice": ["a", ""]}, "guided_choice[1]", "not empty"),
]


FORCED = {"tools": TOOLS, "tool_choice": "required"}
FORMS: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"response_format": FORMAT}, "response_format.json_schema.schema"),
    ({"response_format": FORMAT, "tools": TOOLS}, "response_format.json_schema.schema"),
    ({"guided_json": {}}, "guided_json"),
    ({"structured_outputs": {"regex": "a"}}, "structured_outputs.regex"),
    (FORCED, "tools"),
]


@pytest.mark.parametrize(("form", "place"), FORMS)
def test_what_does_not_go_with_a_form_is_refused_in_the_words_of_the_request(form: dict[str, Any], place: str) -> None:
    without = f"does not go with {place}; leave out {place}"
    for fields, param, words in (
        ({"ignore_eos": True}, "ignore_eos", f"true {without}, or use ignore_eos false"),
        ({"finish_at_eos": False}, "finish_at_eos", f"false {without}, or use finish_at_eos true"),
        ({"min_tokens": 99}, "min_tokens", "99 exceeds max_tokens 64"),
        ({"decoding": "vanilla"}, place, 'does not go with decoding "vanilla"; use decoding'),
    ):
        found, message = refusal(lambda fields=fields: chat(**form, **fields).plan(PLANNER))  # type: ignore[misc]
        assert found == param
        assert message.startswith(f"{param}: {words}")


@pytest.mark.parametrize(("form", "place"), FORMS)
def test_stop_strings_go_with_every_form_also_those_of_the_server(form: dict[str, Any], place: str) -> None:
    (choice,) = chat(**form, stop=["a", "<|im_end|>"]).plan(PLANNER)
    assert choice.params.stop == ("a", "<|im_end|>")
    assert choice.params.structured_outputs is not None
    assert len(choice.params.stop_token_ids) == 1
    (choice,) = chat(**form).plan(
        replace(PLANNER, decoding={"stop": ("b",), "min_new_tokens": 3, "bad_words": ((5,),)})
    )
    assert (choice.params.stop, choice.params.min_new_tokens, choice.params.bad_words) == (("b",), 3, ((5,),))


@pytest.mark.parametrize("choice", ["required", "auto"])
def test_a_call_that_a_stop_string_cut_is_told_as_it_is(choice: str) -> None:
    request = chat(tools=TOOLS, tool_choice=choice)
    text = CALLED[: CALLED.index("1")]
    for answer in (whole(request, text)["choices"][0],):
        assert answer["finish_reason"] == "stop"
        calls = answer["message"].get("tool_calls", [])
        assert [call["function"]["arguments"] for call in calls] == (['{"a":'] if choice == "required" else [])
        assert answer["message"]["content"] == (None if choice == "required" else text)
    answer = whole(request, CALLED.removesuffix("</tool_call>"))["choices"][0]
    assert (answer["finish_reason"], len(answer["message"]["tool_calls"])) == ("tool_calls", 1)
    assert json.loads(answer["message"]["tool_calls"][0]["function"]["arguments"]) == {"a": 1}


@pytest.mark.parametrize(("fields", "param", "words"), BAD)
def test_what_is_wrong_is_refused_by_its_place(fields: dict[str, Any], param: str, words: str) -> None:
    found, message = refusal(lambda: chat(**fields).plan(PLANNER))
    assert found == param, message
    assert words in message


# ---- answers ---------------------------------------------------------------------------------------------------------


def output_of(text: str, reason: str = "stop", logprobs: tuple[tuple[float, ...], ...] = ()) -> GenerationOutput:
    tokens = TokenRun((4, 5), (0.5, 0.5))
    return GenerationOutput((1,), tokens, text, reason, None, 4, 8, 9, continuation_logprobs=logprobs)


def streamed(request: GenerationRequest, text: str, cuts: list[int], reason: str = "stop") -> list[dict[str, Any]]:
    writer = request.writer(PLANNER, "m", request.plan(PLANNER))
    update, events = Update("r", TokenRun(), 1, 1, 9, 0, 0), writer.opening()
    for cut in cuts:
        events += writer.events(0, update, Progress(TokenRun(), text[:cut]))
    return (
        events
        + writer.events(0, update, Progress(TokenRun((4, 5), (0.5, 0.5)), text, output_of(text, reason)))
        + writer.closing()
    )


def whole(request: GenerationRequest, text: str, reason: str = "stop") -> dict[str, Any]:
    writer = request.writer(PLANNER, "m", request.plan(PLANNER))
    answer: dict[str, Any] = json.loads(b"".join(pieces(writer.whole([output_of(text, reason)]))))
    return answer


TEXTS = [
    ("I add.\n" + CALLED, "auto", "tool_calls", "I add.", [("add", '{"a": 1}')]),
    (f"{CALLED}\n{GET_CALLED}", "auto", "tool_calls", None, [("add", '{"a": 1}'), ("get", "{}")]),
    (f"{CALLED}\n{GET_CALLED}", "required", "tool_calls", None, [("add", '{"a":1}'), ("get", "{}")]),
    (CALLED, NAMED, "tool_calls", None, [("add", '{"a":1}')]),
    ("hello", "auto", "stop", "hello", []),
    ("<tool_call>hello", "auto", "stop", "<tool_call>hello", []),
    ("", "auto", "stop", "", []),
]


@pytest.mark.parametrize(("text", "choice", "reason", "content", "calls"), TEXTS)
@pytest.mark.parametrize("step", [1, 7, 1000])
def test_calls_are_written_as_the_client_reads_them(
    text: str, choice: Any, reason: str, content: str | None, calls: list[tuple[str, str]], step: int
) -> None:
    request = chat(tools=TOOLS, tool_choice=choice)
    answer = ClientCompletion.model_validate(whole(request, text)).choices[0]
    assert (answer.finish_reason, answer.message.content) == (reason, content)
    found = [(call.function.name, call.function.arguments) for call in answer.message.tool_calls or ()]
    assert found == calls
    state: Any = ChatCompletionStreamState(input_tools=TOOLS)
    for event in streamed(request, text, list(range(step, len(text), step))):
        state.handle_chunk(ChatCompletionChunk.model_validate(event))
    built = state.get_final_completion().choices[0]
    assert (built.finish_reason, built.message.content or None) == (reason, content or None)
    assert [(call.function.name, call.function.arguments) for call in built.message.tool_calls or ()] == calls


def test_a_call_begins_with_its_name_and_goes_on_with_its_arguments() -> None:
    events = streamed(chat(tools=TOOLS, tool_choice="required"), CALLED, list(range(len(CALLED))))
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[0] == {"role": "assistant", "content": None}
    (first,) = deltas[1]["tool_calls"]
    assert first.keys() == {"index", "id", "type", "function"}
    assert first["function"] == {"name": "add", "arguments": ""}
    others = [delta["tool_calls"][0] for delta in deltas[2:-1]]
    assert len(others) > 1
    assert all(other.keys() == {"index", "function"} and other["function"].keys() == {"arguments"} for other in others)
    assert "".join(other["function"]["arguments"] for other in others) == '{"a":1}'
    assert deltas[-1] == {}


def test_an_answer_that_was_cut_has_the_arguments_so_far_and_says_so() -> None:
    request = chat(tools=TOOLS, tool_choice="required")
    answer = whole(request, CALLED[: CALLED.index("}}")], "length")["choices"][0]
    assert answer["finish_reason"] == "length"
    assert answer["message"]["tool_calls"][0]["function"]["arguments"] == '{"a":1'
    assert whole(request, CALLED[:10], "length")["choices"][0]["message"].get("tool_calls") is None


EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


@pytest.mark.parametrize(("text", "choice", "reason", "content", "calls"), TEXTS)
def test_calls_of_a_response(
    text: str, choice: Any, reason: str, content: str | None, calls: list[tuple[str, str]]
) -> None:
    choice = {"type": "function", "name": "add"} if choice is NAMED else choice
    request = asked(ResponseRequest, input="x", tools=FLAT, tool_choice=choice, max_output_tokens=64)
    events = [EVENT.validate_python(event, strict=True) for event in streamed(request, text, list(range(len(text))))]
    final = events[-1].response
    assert final.status == "completed"
    assert [(item.name, item.arguments) for item in final.output if item.type == "function_call"] == calls
    assert final.output_text == (content or "")
    assert [item.type for item in final.output].count("message") == (content is not None)
    done = [event for event in events if event.type == "response.function_call_arguments.done"]
    for event in done:
        deltas = [
            other.delta
            for other in events
            if other.type == "response.function_call_arguments.delta" and other.item_id == event.item_id
        ]
        assert "".join(deltas) == event.arguments == final.output[event.output_index].arguments
    assert len(done) == len(calls)
    alone = Response.model_validate(whole(request, text), strict=True)
    assert [item.to_dict() | {"id": "", "call_id": ""} for item in alone.output] == [
        item.to_dict() | {"id": "", "call_id": ""} for item in final.output
    ]


PUBLISHED = json.loads((Path(__file__).parents[1] / "data" / "published_requests.json").read_text())["codex"]


@pytest.mark.parametrize("published", PUBLISHED, ids=lambda published: published["source"])
def test_requests_of_codex_are_answered_with_calls(
    published: dict[str, Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A server in this process may have changed both.
    monkeypatch.setattr(logging.getLogger("uvicorn"), "propagate", True)
    caplog.set_level(logging.WARNING, "uvicorn.error")
    warn_once.cache_clear()
    body = published["body"]
    request, tools = read_body(ResponseRequest, json.dumps(body).encode()), body.get("tools", ())
    assert [*request.callable.callable()] == [tool["name"] for tool in tools if tool["type"] == "function"]
    prompt, last = shown(request), body["input"][-1]
    for other in (*tools, *body["input"]):
        if other["type"] in ("custom", "namespace", "tool_search", "web_search", "additional_tools", "web_search_call"):
            assert other["type"] in caplog.text
    assert (last.get("output") or last["content"][0]["text"]) in prompt
    for item in body["input"]:
        if item["type"] in ("custom_tool_call", "local_shell_call"):
            assert json.dumps(item.get("action") or {"input": item["input"]}) in prompt
    text = '<tool_call>\n{"name": "exec_command", "arguments": {"cmd": "ls"}}\n</tool_call>'
    events = [EVENT.validate_python(event, strict=True) for event in streamed(request, text, [20, 50])]
    (done,) = [event.item for event in events if event.type == "response.output_item.done"]
    if tools:
        assert (done.type, done.name, json.loads(done.arguments)) == ("function_call", "exec_command", {"cmd": "ls"})
    assert (events[-1].type, events[-1].response.usage.output_tokens) == ("response.completed", 2)


# ---- scores ----------------------------------------------------------------------------------------------------------


def test_choices_with_logprobs_say_how_probable_each_text_is() -> None:
    request = chat(structured_outputs={"choice": ["yes", "no"]}, logprobs=True, n=2)
    choices = request.plan(PLANNER)
    assert [len(choice.continuations) for choice in choices] == [0, 0, 2]
    writer = request.writer(PLANNER, "m", choices)
    scores = output_of("", "length", ((-1.0, -1.0), (-2.0,)))
    answer = json.loads(b"".join(pieces(writer.whole([output_of("yes"), output_of("no"), scores]))))
    assert len(answer["choices"]) == 2
    for choice in answer["choices"]:
        assert choice["logprobs"]["choices"] == [
            {"text": "yes", "logprob": -2.0, "num_tokens": 2, "share": 0.5},
            {"text": "no", "logprob": -2.0, "num_tokens": 1, "share": 0.5},
        ]
    chunks = writer.events(2, Update("r", TokenRun(), 1, 1, 9, 0, 0), Progress(TokenRun(), "", scores))
    assert [chunk["choices"][0]["index"] for chunk in chunks if chunk["choices"][0]["logprobs"]] == [0, 1]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"text_2": "a"}, "text_1"),
        ({"text_1": "x", "messages": [{"role": "user", "content": "x"}], "text_2": "a"}, "text_1"),
        ({"text_1": ["x", "y"], "text_2": ["a"]}, "text_2"),
        ({"text_1": "x", "text_2": ["a", ""]}, "text_2[1]"),
        ({"text_1": ["", "y"], "text_2": ["a", "b"]}, "text_1[0]"),
        ({"text_1": "x", "text_2": "a" * 20_000}, "text_2[0]"),
        ({"text_1": "x"}, "text_2"),
        ({"text_1": "x", "text_2": "a", "temperature": 1}, "temperature"),
    ],
)
def test_wrong_scores_are_refused(fields: dict[str, Any], param: str) -> None:
    assert refusal(lambda: asked(ScoreRequest, **fields).plan(PLANNER))[0] == param


def test_pairs_are_scored_one_by_one_and_texts_of_a_prompt_together() -> None:
    together = asked(ScoreRequest, text_1="x", text_2=["a", "bc"]).plan(PLANNER)
    pairs = asked(ScoreRequest, text_1=["x", "y"], text_2=["a", "bc"]).plan(PLANNER)
    assert [len(choice.continuations) for choice in (*together, *pairs)] == [2, 1, 1]
    assert isinstance(together[0], Request)
    assert together[0].params.max_new_tokens == max(map(len, together[0].continuations))


OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}}
SHUT = {**OBJECT, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (OBJECT, SHUT),
        ({"items": OBJECT, "$defs": {"properties": OBJECT}}, {"items": SHUT, "$defs": {"properties": SHUT}}),
        ({"anyOf": [OBJECT, {"type": "null"}]}, {"anyOf": [SHUT, {"type": "null"}]}),
        *[
            (schema, schema)
            for schema in (
                {**OBJECT, "additionalProperties": True},
                {**OBJECT, "patternProperties": {"^x": {}}},
                {"allOf": [OBJECT, {**OBJECT, "anyOf": [{"required": ["b"]}]}]},
                {"allOf": [OBJECT, {"properties": {"b": {}}}]},
                {"if": OBJECT, "then": {"properties": {"b": {}}}},
                {"enum": [OBJECT], "default": OBJECT},
                {"type": "object"},
                {},
            )
        ],
    ],
)
def test_objects_have_no_properties_that_their_schema_does_not_name(schema: Any, expected: Any) -> None:
    assert closed(schema) == expected
