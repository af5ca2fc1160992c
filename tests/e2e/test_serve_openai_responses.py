"""/v1/responses, where it differs from /v1/chat/completions."""

import json
import re
import time
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response

from tests.e2e.conftest import ServerProcess, running
from tests.e2e.serving import PROMPTS, refused

ENDLESS = {"input": "x", "max_output_tokens": 3000, "ignore_eos": True, "tau_conf": 1.0, "tau_add": 1.0, "tau_act": 1.0}
"""One token a forward pass, for tens of seconds."""
SHORT: dict[str, Any] = {"model": "tiny", "max_output_tokens": 24}


def num_running(server: ServerProcess) -> float:
    (number,) = re.findall(r"^vllm:num_requests_running{.*} (.*)$", server.http.get("/metrics").text, re.MULTILINE)
    return float(number)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline


def same(response: Any) -> dict[str, Any]:
    """What two answers to one request have in common."""
    values = response.model_dump(exclude={"id", "created_at", "completed_at", "output"})
    cached = values["usage"].pop("input_tokens_details")
    return {**values, "text": response.output_text, "cached": cached.keys()}


def test_same_text_and_usage_as_chat(client: Any):
    for prompt in PROMPTS:
        messages = [{"role": "system", "content": "s"}, {"role": "user", "content": prompt}]
        chat = client.chat.completions.create(model="tiny", messages=messages, max_tokens=24)
        response = client.responses.create(input=prompt, instructions="s", **SHORT)
        assert response.output_text == chat.choices[0].message.content
        assert response.status == ("incomplete" if chat.choices[0].finish_reason == "length" else "completed")
        assert (response.usage.input_tokens, response.usage.output_tokens, response.usage.total_tokens) == (
            chat.usage.prompt_tokens,
            chat.usage.completion_tokens,
            chat.usage.total_tokens,
        )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_stream_equals_whole(client: Any, temperature: float):
    for prompt in PROMPTS:
        asked = {**SHORT, "input": prompt, "temperature": temperature, "extra_body": {"seed": 1}}
        events = list(client.responses.create(stream=True, **asked))
        assert [event.sequence_number for event in events] == list(range(len(events)))
        whole = client.responses.create(**asked)
        assert same(events[-1].response) == same(whole)
        deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert "".join(deltas) == whole.output_text


def test_length_and_stop(client: Any):
    endless = client.responses.create(input="a", extra_body={"ignore_eos": True}, **SHORT)
    assert (endless.status, endless.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert endless.usage.output_tokens == 24
    text = endless.output_text
    stopped = client.responses.create(input="a", extra_body={"ignore_eos": True, "stop": text[5:9]}, **SHORT)
    assert (stopped.status, stopped.incomplete_details, stopped.stop_reason) == ("completed", None, text[5:9])
    assert stopped.output_text == text[: text.index(text[5:9])]


def test_shape_and_output_sent_back(server: ServerProcess):
    strict = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, _strict_response_validation=True)
    first: Any = strict.responses.create(
        model="tiny", input="hi", max_output_tokens=8, metadata={"run": "7"}, store=True, extra_body={"num_branches": 1}
    )
    Response.model_validate(first.model_dump(), strict=True)
    assert first.metadata == {"run": "7"}
    assert first.store is False
    events = list(strict.responses.create(model="tiny", input="hi", max_output_tokens=8, stream=True))
    assert events[0].type == "response.created"
    turns: list[Any] = [{"role": "user", "content": "hi"}, *first.output, {"role": "user", "content": "and?"}]
    second = strict.responses.create(model="tiny", input=turns, max_output_tokens=8)
    messages: list[Any] = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "and?"},
    ]
    chat = strict.chat.completions.create(model="tiny", messages=messages, max_tokens=8)
    assert second.output_text == chat.choices[0].message.content


def test_the_clients_own_reader_of_streams(client: Any):
    text = client.responses.create(input="a", extra_body={"ignore_eos": True}, **SHORT).output_text
    asked = {**SHORT, "input": "a", "extra_body": {"ignore_eos": True, "stop": text[5:9]}}  # so that it completes
    with client.responses.stream(**asked) as stream:
        snapshots = [event.snapshot for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert final.status == "completed"
    assert final.output_text == text[: text.index(text[5:9])] != ""
    assert final.output_text == client.responses.create(**asked).output_text == snapshots[-1]


def test_mistakes_name_the_field(server: ServerProcess):
    mistakes: list[tuple[dict[str, Any], str]] = [
        ({"input": None}, "input"),
        ({"input": "x" * 20000}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 5000}, "max_output_tokens"),
        ({"max_output_tokens": 5, "max_tokens": 6}, "max_output_tokens"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"tau_conf": 2}, "tau_conf"),
        ({"stream": 1}, "stream"),
    ]
    for fields, param in mistakes:
        assert refused(server.http.post("/v1/responses", json={"input": "x", **fields}))["param"] == param, fields
    refused(server.http.post("/v1/responses", json={"input": "x", "model": "other"}), 404)
    refused(server.http.get("/v1/responses/resp_1"), 404)


def test_without_a_tokenizer(poisoned_server: ServerProcess):
    error = refused(poisoned_server.http.post("/v1/responses", json={"input": "x"}))
    assert error["param"] == "input"
    assert "tokenizer" in error["message"]


def test_abort_and_disconnect(server: ServerProcess):
    url, body = f"{server.url}/v1/responses", {**ENDLESS, "stream": True}
    with httpx.stream("POST", url, json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        created = next(json.loads(line[6:]) for line in lines if line.startswith("data: "))
        assert server.http.post("/abort_request", json={"request_id": created["response"]["id"]}).json()["aborted"]
        last = [json.loads(line[6:]) for line in lines if line.startswith("data: ")][-1]
    assert (last["type"], last["response"]["status"]) == ("response.incomplete", "cancelled")
    with httpx.stream("POST", url, json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        assert next(lines) == "event: response.created"
        until(lambda: num_running(server) == 1)
    until(lambda: num_running(server) == 0)


def test_failures_in_a_stream_and_the_log(model_dir: Any):
    with running("--model", str(model_dir), "--request-timeout", "1.5") as server:
        refused(server.http.post("/v1/responses", json=ENDLESS), 504)
        asked: Any = {"model": "tiny", "input": "x", "extra_body": {k: v for k, v in ENDLESS.items() if k != "input"}}
        events: list[Any] = list(server.openai.responses.create(stream=True, **asked))
        error, failed = events[-2:]
        assert (error.type, error.code) == ("error", "timeout")
        assert (failed.type, failed.response.status, failed.response.error.code) == (
            "response.failed",
            "failed",
            "server_error",
        )
        (message,) = failed.response.output
        deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert message.content[0].text == "".join(deltas)
        _check_messages_that_fail(server)
        log = server.stop(15)[1]
    lines = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    assert failed.response.id in [line["id"] for line in lines]
    assert lines[-1]["event"] == "finished"


def _check_messages_that_fail(server: ServerProcess) -> None:
    """In Anthropic's form."""
    messages = [{"role": "user", "content": "x"}]
    body = {**ENDLESS, "input": None, "messages": messages, "stop_sequences": ["absent"]}
    answer = server.http.post("/v1/messages", json=body)
    assert (answer.status_code, answer.json()["error"]["type"]) == (504, "timeout_error")
    frames = server.http.post("/v1/messages", json={**body, "stream": True}).text.split("\n\n")
    assert frames[0].startswith("event: message_start\n")
    assert frames[-2].startswith('event: error\ndata: {"type":"error","error":{"type":"timeout_error",')
    assert frames[-1] == ""
