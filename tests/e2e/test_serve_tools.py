"""Tools, forms of answers and scores over HTTP, on a random model whose template knows tools."""

import json
import math
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from shutil import copytree
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest

from tests.e2e.conftest import ServerProcess, running
from tests.tiny import write_tokenizer
from tests.tool_template import FILE

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"unit": {"enum": ["apples", "boxes"]}, "whole": {"type": "boolean"}},
    "required": ["unit", "whole"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "measure", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "stop"}},
]
HELLO: list[Any] = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def server(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Its tokenizer has tokens for what is around calls, as Qwen3's has."""
    model_dir = copytree(model_dir, tmp_path_factory.mktemp("tools") / "tiny")
    write_tokenizer(model_dir, added=("<tool_call>", "</tool_call>", "<think>"))
    with running("--model", str(model_dir), "--chat-template", str(FILE), "--max-body-size", "2MiB") as process:
        yield process


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "measure"}}])
def test_forced_calls_keep_to_the_schema_and_are_sent_back(server: ServerProcess, choice: Any) -> None:
    chat = server.openai.chat.completions
    asked: dict[str, Any] = {"model": "tiny", "tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
    answer = chat.create(messages=HELLO, max_tokens=200, **asked).choices[0]
    assert answer.finish_reason == "tool_calls"
    assert answer.message.content is None
    (call,) = answer.message.tool_calls or []
    assert call.type == "function"
    arguments = json.loads(call.function.arguments)
    jsonschema.validate(arguments, SCHEMA if call.function.name == "measure" else {"maxProperties": 0})
    result = {"role": "tool", "tool_call_id": call.id, "content": "7"}
    again = chat.create(messages=[*HELLO, answer.message, result], model="tiny", max_tokens=4)
    assert again.usage is not None
    assert again.choices[0].finish_reason == "length"
    name, arguments_text = "", ""
    for chunk in chat.create(messages=HELLO, max_tokens=200, stream=True, **asked):
        for piece in chunk.choices[0].delta.tool_calls or ():
            assert piece.function is not None
            name, arguments_text = name + (piece.function.name or ""), arguments_text + (piece.function.arguments or "")
    assert (name, arguments_text) == (call.function.name, call.function.arguments)


def test_texts_of_added_and_special_tokens_are_written(server: ServerProcess) -> None:
    for text in ("<think>", "a <tool_call>\n{", "<|im_end|>", "<|endoftext|></tool_call>"):
        asked: dict[str, Any] = {"messages": HELLO, "max_tokens": 200}
        by_choice = {"guided_choice": [text]}
        as_json = {"guided_json": {"const": text}}
        for body, content in ((by_choice, text), (as_json, json.dumps(text))):
            (choice,) = server.http.post("/v1/chat/completions", json={**asked, **body}).json()["choices"]
            assert choice["message"]["content"] == content
            assert choice["finish_reason"] == "stop"


def test_the_same_in_responses(server: ServerProcess) -> None:
    flat: list[Any] = [{"type": "function", "name": "measure", "parameters": SCHEMA, "strict": True}]
    create = server.openai.responses.create
    response = create(model="tiny", input="hello", tools=flat, tool_choice="required", max_output_tokens=200)
    (call, *_) = response.output
    assert call.type == "function_call"
    jsonschema.validate(json.loads(call.arguments), SCHEMA)
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "7"}
    history: list[Any] = [*HELLO, *[item.to_dict() for item in response.output], result]
    assert create(model="tiny", input=history, tools=flat, max_output_tokens=4).status == "incomplete"


def test_the_same_in_messages(server: ServerProcess) -> None:
    tools = [{"name": "measure", "input_schema": SCHEMA}, {"type": "bash_20250124", "name": "bash"}]
    asked: dict[str, Any] = {"messages": HELLO, "tools": tools, "max_tokens": 200}
    for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "measure"}):
        message = server.http.post("/v1/messages", json={**asked, "tool_choice": choice}).json()
        (call,) = message["content"]
        assert (message["stop_reason"], call["type"], call["id"][:6]) == ("tool_use", "tool_use", "toolu_")
        jsonschema.validate(call["input"], SCHEMA)
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": "7"}
        history = [*HELLO, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
        again = server.http.post("/v1/messages", json={**asked, "messages": history, "max_tokens": 4}).json()
        assert again["stop_reason"] == "max_tokens"
        sizes = [each["usage"]["input_tokens"] + each["usage"]["cache_read_input_tokens"] for each in (message, again)]
        assert sizes[0] < sizes[1]


def test_requests_of_claude_code_are_answered(server: ServerProcess) -> None:
    requests = json.loads((Path(__file__).parents[1] / "data" / "claude_code.json").read_text("utf-8"))
    for sent in requests:
        headers = {"anthropic-beta": sent["betas"], "x-api-key": "none"}
        body = {**sent["body"], "model": "tiny", "num_branches": 0}
        body |= {"max_tokens": 4} if "title" not in sent["name"] and "max_tokens" in body else {}
        answer = server.http.post(sent["path"], json=body, headers=headers)
        assert answer.status_code == 200, (sent["name"], answer.text)
        if "count_tokens" in sent["path"]:
            assert answer.json()["input_tokens"] > 100
        elif body.get("stream"):
            assert answer.text.endswith('event: message_stop\ndata: {"type":"message_stop"}\n\n')
        else:
            assert answer.json()["stop_reason"] == "max_tokens"


def test_answers_that_stop_have_their_form(server: ServerProcess) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}
    for body in ({"response_format": schema}, {"guided_json": SCHEMA}, {"response_format": schema, "tools": TOOLS}):
        found = server.http.post("/v1/chat/completions", json={"messages": HELLO, "max_tokens": 200, **body}).json()
        (choice,) = found["choices"]
        if choice["finish_reason"] == "stop":
            jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
        assert choice["finish_reason"] in ("stop", "tool_calls")
    text = {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}
    found = server.http.post("/v1/responses", json={"input": "hello", "text": text, "max_output_tokens": 200}).json()
    jsonschema.validate(json.loads(found["output"][0]["content"][0]["text"]), SCHEMA)


def test_stop_strings_end_calls_and_forms(server: ServerProcess) -> None:
    body = {"messages": HELLO, "max_tokens": 200, "stop": ["apples", "boxes", "Observation:"]}
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
    for form in ({"response_format": schema}, {"tools": TOOLS[:1], "tool_choice": "required"}):
        (choice,) = server.http.post("/v1/chat/completions", json={**body, **form}).json()["choices"]
        assert (choice["finish_reason"], choice["stop_reason"] in ("apples", "boxes")) == ("stop", True)
        calls = choice["message"].get("tool_calls") or [{"function": {"arguments": choice["message"]["content"]}}]
        assert calls[0]["function"]["arguments"] == '{"unit":"'
    text = {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}
    asked = {"input": "hello", "text": text, "max_output_tokens": 200, "stop": ["Observation:"]}
    found = server.http.post("/v1/responses", json=asked).json()
    jsonschema.validate(json.loads(found["output"][0]["content"][0]["text"]), SCHEMA)


def test_scores_add_up_and_choices_have_them_too(server: ServerProcess) -> None:
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    found = server.http.post("/score", json={"text_1": "hello", "text_2": letters}).json()
    assert found["object"] == "list"
    assert [item["index"] for item in found["data"]] == list(range(26))
    assert all(math.isclose(item["score"], math.exp(item["logprob"])) for item in found["data"])
    assert 0 < sum(item["score"] for item in found["data"]) < 1
    assert math.isclose(sum(item["share"] for item in found["data"]), 1, rel_tol=1e-6)
    body = {"messages": HELLO, "structured_outputs": {"choice": letters}, "logprobs": True, "max_tokens": 9}
    choice = server.http.post("/v1/chat/completions", json=body).json()["choices"][0]
    scores = {item["text"]: item["logprob"] for item in choice["logprobs"]["choices"]}
    alone = server.http.post("/score", json={"messages": HELLO, "text_2": letters}).json()["data"]
    assert [item["logprob"] for item in alone] == list(scores.values())


ENDLESS = {
    "$ref": "#/$defs/a",
    "$defs": {"a": {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "required": ["a"]}},
}
FORMAT = "response_format.json_schema.schema"


def formatted(schema: dict[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}}


def functions(**function: Any) -> dict[str, Any]:
    return {"tools": [*TOOLS, {"type": "function", "function": function}], "tool_choice": "required"}


HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "a megabyte": (formatted({"properties": {f"field{i}": {"type": "string"} for i in range(25_000)}}), FORMAT),
    "a megabyte of text": (formatted({"description": "x" * 10**6}), FORMAT),
    "recursion without end": (formatted(ENDLESS), FORMAT),
    "an enum": (formatted({"properties": {"x": {"enum": [f"v{i}" for i in range(10_000)]}}}), f"{FORMAT}.properties.x"),
    "choices": ({"guided_choice": [f"v{i}" for i in range(10_000)]}, "guided_choice"),
    "deep": (formatted(json.loads('{"items":' * 100 + "{}" + "}" * 100)), "response_format"),
    "contradiction": (formatted({"type": "string", "enum": [5]}), FORMAT),
    "grammar": ({"guided_grammar": 'start: "a" b'}, "guided_grammar"),
    "two fields": ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
    "schema of a function": (
        functions(name="f", parameters={"properties": {"x": {"type": 7}}}),
        "tools[2].function.parameters.properties.x.type",
    ),
    "function twice": (functions(name="stop"), "tools[2].function.name"),
    "unknown function": (
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "go"}}},
        "tool_choice.function.name",
    ),
}

COSTLY: dict[str, dict[str, Any]] = {
    "nested": {"guided_regex": "(((a+)+)+)+b(.{0,999}){99}"},
    "counted": {"structured_outputs": {"regex": "(a{0,1000}){0,1000}b"}},
    "in a schema": formatted({"properties": {"x": {"type": "string", "pattern": "((a{0,999}){0,999}){0,999}"}}}),
}
"""Expressions that cost other engines minutes; here they may be answered."""


def test_hostile_forms_are_refused_by_their_place_while_a_stream_goes_on(server: ServerProcess) -> None:
    times: list[float] = []
    ended = threading.Event()

    def stream() -> None:
        body = {"prompt": "hello", "max_tokens": 2000, "ignore_eos": True, "stream": True, "block_size": 2}
        while not ended.is_set():
            with server.http.stream("POST", "/v1/completions", json=body) as response:
                for line in response.iter_lines():
                    if line.startswith("data:"):
                        times.append(time.monotonic())
                    if ended.is_set():
                        return

    reader = threading.Thread(target=stream)
    reader.start()
    try:
        while not times:
            time.sleep(0.01)
        found, slow = {}, {}
        for name, (body, _) in HOSTILE.items():
            start = time.monotonic()
            response = server.http.post("/v1/chat/completions", json={"messages": HELLO, "max_tokens": 9, **body})
            slow[name] = time.monotonic() - start
            found[name] = (response.status_code, response.json()["error"]["param"])
        for name, body in COSTLY.items():
            start = time.monotonic()
            response = server.http.post("/v1/chat/completions", json={"messages": HELLO, "max_tokens": 9, **body})
            slow[name] = time.monotonic() - start
            assert response.status_code in (200, 400)
    finally:
        ended.set()
        reader.join()
    expected = {name: (400, param) for name, (_, param) in HOSTILE.items()}
    assert found == expected
    assert max(slow.values()) < 2, slow
    gaps = [after - before for before, after in zip(times, times[1:], strict=False)]
    assert max(gaps) < 1, max(gaps)
