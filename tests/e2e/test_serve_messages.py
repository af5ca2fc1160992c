"""/v1/messages, where it differs from /v1/chat/completions."""

import gzip
import json
from typing import Any

import pytest

from tests.e2e.conftest import ServerProcess
from tests.e2e.serving import PROMPTS, refused

ROUTE = "/v1/messages"
COUNT = f"{ROUTE}/count_tokens"


def ask(server: ServerProcess, prompt: str = "a", **fields: Any) -> dict[str, Any]:
    body = {"model": "tiny", "max_tokens": 24, "messages": [{"role": "user", "content": prompt}], **fields}
    answer = server.http.post(f"{ROUTE}?beta=true", json=body, headers={"anthropic-version": "2023-06-01"})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def events_of(text: str) -> list[dict[str, Any]]:
    """The events of a stream, each of which has its type as its name."""
    frames = [frame.split("\n") for frame in text.split("\n\n") if frame]
    events = [json.loads(data.removeprefix("data: ")) for _, data in frames]
    assert [name for name, _ in frames] == [f"event: {event['type']}" for event in events]
    return events


def test_text_and_tokens_as_from_chat(server: ServerProcess) -> None:
    for prompt in PROMPTS:
        system: Any = {"role": "system", "content": "s"}
        chat = server.openai.chat.completions.create(
            model="tiny", messages=[system, {"role": "user", "content": prompt}], max_tokens=24
        )
        asked = {"system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}]}
        message = ask(server, prompt, **asked)
        assert chat.usage is not None
        assert message["content"] == [{"type": "text", "text": chat.choices[0].message.content}]
        assert message["stop_reason"] == ("max_tokens" if chat.choices[0].finish_reason == "length" else "end_turn")
        usage = message["usage"]
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == chat.usage.prompt_tokens
        assert usage["output_tokens"] == chat.usage.completion_tokens
        body = {"messages": [{"role": "user", "content": prompt}], **asked}
        assert server.http.post(COUNT, json=body).json() == {"input_tokens": chat.usage.prompt_tokens}


def test_a_stream_says_the_same(server: ServerProcess) -> None:
    messages = [{"role": "user", "content": "a"}]
    body = {"messages": messages, "max_tokens": 24, "temperature": 1.0, "seed": 1, "stream": True}
    first, *rest = events_of(server.http.post(ROUTE, json=body).text)
    assert (first["type"], rest[0]["type"], rest[-1]["type"]) == ("message_start", "ping", "message_stop")
    whole = ask(server, temperature=1.0, seed=1)
    text = "".join(event["delta"]["text"] for event in rest if event["type"] == "content_block_delta")
    assert [{"type": "text", "text": text}] == whole["content"]
    assert rest[-2]["delta"] == {name: whole[name] for name in ("stop_reason", "stop_sequence")}
    assert (rest[-2]["seed"], rest[-2]["usage"]["output_tokens"]) == (1, whole["usage"]["output_tokens"])


def test_how_answers_end(server: ServerProcess) -> None:
    text = ask(server, ignore_eos=True)["content"][0]["text"]
    stopped = ask(server, ignore_eos=True, stop_sequences=["absent", text[5:9]])
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", text[5:9])
    assert stopped["content"][0]["text"] == text[: text.index(text[5:9])]
    long = server.http.post(ROUTE, json={"messages": [{"role": "user", "content": "x" * 5000}]}).json()["error"]
    assert long["message"].startswith("prompt is too long: messages: has ")
    assert long["details"] == {"error_code": "context_length_exceeded"}
    # Fewer tokens fit than are asked for: agents ask for 32,000 always.
    full = ask(server, "x" * 4060, ignore_eos=True, max_tokens=32_000)
    assert full["stop_reason"] == "model_context_window_exceeded"
    assert full["usage"]["input_tokens"] + full["usage"]["output_tokens"] <= 4096


def test_models_as_anthropics_client_lists_them(server: ServerProcess) -> None:
    found = server.http.get("/v1/models?limit=1000").json()
    (model,) = found["data"]
    assert (model["type"], model["display_name"], model["created_at"][-1]) == ("model", "tiny", "Z")
    assert (found["has_more"], found["first_id"], found["last_id"]) == (False, "tiny", "tiny")


JSON_TYPE = {"Content-Type": "application/json"}
ERRORS: dict[str, tuple[str, str, dict[str, Any], int, str]] = {
    "field": ("POST", ROUTE, {"json": {"messages": 7}}, 400, "invalid_request_error"),
    "parameter": (
        "POST",
        ROUTE,
        {"json": {"messages": [{"role": "user", "content": "x"}], "temperature": -1}},
        400,
        "invalid_request_error",
    ),
    "no JSON": ("POST", COUNT, {"content": b"{", "headers": JSON_TYPE}, 400, "invalid_request_error"),
    "type": ("POST", ROUTE, {"content": b"{}"}, 400, "invalid_request_error"),
    "compressed": (
        "POST",
        "//v1/messages/?beta=true",
        {"content": gzip.compress(b"{}"), "headers": {**JSON_TYPE, "Content-Encoding": "gzip"}},
        415,
        "invalid_request_error",
    ),
    "large": ("POST", ROUTE, {"json": {"messages": "x" * 2**20}}, 413, "request_too_large"),
    "model": (
        "POST",
        COUNT,
        {"json": {"messages": [{"role": "user", "content": "x"}], "model": "claude"}},
        404,
        "not_found_error",
    ),
    "route": ("POST", f"{ROUTE}/batches", {"json": {}}, 404, "not_found_error"),
    "method": ("GET", ROUTE, {}, 405, "invalid_request_error"),
}


@pytest.mark.parametrize(("method", "route", "sent", "status", "kind"), ERRORS.values(), ids=ERRORS)
def test_errors_have_anthropics_form(
    server: ServerProcess, method: str, route: str, sent: dict[str, Any], status: int, kind: str
) -> None:
    answer = server.http.request(method, f"{server.url}{route}", **sent)
    assert answer.status_code == status, answer.text
    found = answer.json()
    assert found.pop("error").keys() == {"type", "message", "details"}
    assert found == {"type": "error", "request_id": answer.headers["request-id"]}
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    assert answer.json()["error"]["type"] == kind


def test_other_routes_keep_their_form_of_errors(server: ServerProcess) -> None:
    refused(server.http.post("/v1/messages_of", json={}), 404)
    refused(server.http.get("/v1/models/claude"), 404)
