"""Mistakes of clients, and requests that fail: every answer says what is wrong, and nobody else is disturbed."""

import gzip
import json
import socket
import time
from typing import Any

import openai
import pytest

from tests.e2e.conftest import POISON, ServerProcess, running
from tests.e2e.serving import complete, events, refused

ODD_PROMPTS: list[Any] = ["", [], [[]], [""], ["a", 1], [1.5], [True], [-1], [10**9], {}, None]
BAD_PROMPTS: list[tuple[dict[str, Any], str]] = [({"prompt": odd}, "prompt") for odd in ODD_PROMPTS]
MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"promt": "x"}, "promt"),
    ({}, "prompt"),
    ({"prompt": "x" * 20000}, "prompt"),
    ({"prompt": ["x"] * 1025}, "prompt"),
    ({"max_tokens": 4096}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_tokens": 5, "max_new_tokens": 6}, "max_tokens"),
    ({"max_tokens": 4, "min_tokens": 5}, "min_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": 5.5}, "max_tokens"),
    ({"n": 0}, "n"),
    ({"n": 10**30}, "n"),
    ({"n": 2, "best_of": 3}, "best_of"),
    ({"stop": ""}, "stop"),
    ({"stop": 5}, "stop"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": 10**400}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"temperature": 1, "top_p": -0.5}, "top_p"),
    ({"seed": -(2**63) - 1}, "seed"),
    ({"tau_conf": 2}, "tau_conf"),
    ({"decoding": "d2f", "num_branches": 3}, "num_branches"),
    ({"decoding": "magic"}, "decoding"),
    ({"eos_token_id": 10**6}, "eos_token_id"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
    ({"stream": 1}, "stream"),
    ({"echo": True, "logprobs": 0}, "echo"),
    ({"echo": 1}, "echo"),
    ({"logprobs": 21}, "logprobs"),
    ({"bad_words": [""]}, "bad_words"),
    ({"bad_words": [[100000]]}, "bad_words"),
    ({"bad_words": "x"}, "bad_words"),
    ({"logprobs": True}, "logprobs"),
    ({"top_logprobs": 1}, "top_logprobs"),
    ({"num_branches": 16}, "num_branches"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"100000": 1}}, "logit_bias"),
    ({"stop_token_ids": [100000]}, "stop_token_ids"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"guided_regex": "("}, "guided_regex"),
    ({"suffix": "x"}, "suffix"),
]
BAD_BODIES = [
    b"",
    b"{",
    b"[]",
    b"null",
    b"\xff\xfe",
    b'\x00{"prompt": "x"}',
    b'{"prompt": "x\x00"}',
    b'{"prompt": "x\\u0000"}',
    b'{"prompt": "\\ud800"}',
    b'{"prompt": "x", "stop": ["\\udfff"]}',
    b'{"\\ud800": 1}',
    b'{"prompt": "x", "temperature": NaN}',
    b'{"prompt": "x", "temperature": -Infinity}',
    b'{"prompt": "x", "temperature": 1e999}',
    b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}",
    b'{"prompt": "x", "prompt": "y"}',
    b'{"prompt": ' + b"[" * 50 + b"]" * 50 + b"}",
    b'{"prompt": ' + b"[" * 100000 + b"]" * 100000 + b"}",
    b'{"a":' * 100000,
]
CHAT_MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"logprobs": 1}, "logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"top_logprobs": 1}, "top_logprobs"),
    ({"tools": [{}]}, "tools[0].type"),
    ({"echo": True}, "echo"),
    ({"prompt": "x"}, "prompt"),
]
DIFFUSION_MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"stream": False}, "stream"),
    ({"n": 2}, "n"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"logprobs": 1}, "logprobs"),
    ({"echo": True}, "echo"),
    ({"prompt": ["a", "b"]}, "prompt"),
]
BAD_MESSAGES: list[tuple[Any, str]] = [
    ([], "messages"),
    ("hi", "messages"),
    ([{"content": "x"}], "messages[0].role"),
    ([{"role": "function", "content": "x"}], "messages[0].role"),
    ([{"role": "tool", "content": "x"}], "messages"),
    ([{"role": "user"}], "messages[0].content"),
    ([{"role": "user", "content": None}], "messages[0].content"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages[0].content[0].type"),
    ([{"role": "user", "content": "x"}, {"role": "user", "content": "x", "tool_calls": [1]}], "messages[1].tool_calls"),
    ([{"role": "user", "content": "x" * 20000}], "messages"),
]
JSON_TYPE = {"Content-Type": "application/json"}
ROUTE = "/v1/completions"
CODES: list[tuple[str, str, dict[str, Any], int, str]] = [
    # method, route, what is sent, and the status and code that docs/serving.md promises
    ("POST", ROUTE, {"json": {"prompt": "x", "tau_conf": 2}}, 400, "invalid_value"),
    ("POST", ROUTE, {"json": {}}, 400, "missing_parameter"),
    ("POST", ROUTE, {"json": {"prompt": "x", "tau": 2}}, 400, "unknown_parameter"),
    ("POST", ROUTE, {"json": {"prompt": "x", "best_of": 2}}, 400, "unsupported_parameter"),
    ("POST", ROUTE, {"content": b"{", "headers": JSON_TYPE}, 400, "invalid_json"),
    ("POST", ROUTE, {"content": b"{}", "headers": {"Content-Type": "text/plain"}}, 400, "invalid_content_type"),
    ("POST", ROUTE, {"json": {"prompt": [5] * 4096}}, 400, "context_length_exceeded"),
    ("POST", ROUTE, {"json": {"prompt": "x", "max_tokens": 4096}}, 400, "context_length_exceeded"),
    ("POST", "/v1/responses", {"json": {"input": "x", "max_output_tokens": 4096}}, 400, "context_length_exceeded"),
    ("GET", "/v1/models", {"headers": {"Host": "evil.example"}}, 403, "invalid_host"),
    ("GET", "/v1/models/other", {}, 404, "model_not_found"),
    ("POST", "/abort_request", {"json": {"request_id": "x"}}, 404, "request_not_found"),
    ("GET", "/v1/nothing", {}, 404, "not_found"),
    ("GET", ROUTE, {}, 405, "method_not_allowed"),
]


def test_mistakes_name_the_field(server: ServerProcess):
    before = complete(server.openai, "a", max_tokens=16).choices[0].text
    for fields, param in MISTAKES + BAD_PROMPTS:
        body = fields if param in ("prompt", "promt") else {"prompt": "x", **fields}
        error = refused(server.http.post("/v1/completions", json=body))
        assert error["param"].partition("[")[0] == param, error
        assert param.rpartition(".")[2] in error["message"]
        assert len(error["message"]) < 1100
    for fields, param in DIFFUSION_MISTAKES:
        assert refused(server.http.post("/v1/diffusion/completions", json={"prompt": "x", **fields}))["param"] == param
    for messages, param in BAD_MESSAGES:
        assert refused(server.http.post("/v1/chat/completions", json={"messages": messages}))["param"] == param
    for fields, param in CHAT_MISTAKES:
        body = {"messages": [{"role": "user", "content": "x"}], **fields}
        assert refused(server.http.post("/v1/chat/completions", json=body))["param"] == param
    assert complete(server.openai, "a", max_tokens=16).choices[0].text == before


@pytest.mark.parametrize(("method", "route", "sent", "status", "code"), CODES)
def test_an_error_has_the_code_of_the_page(
    server: ServerProcess, method: str, route: str, sent: dict[str, Any], status: int, code: str
):
    assert refused(server.http.request(method, route, **sent), status)["code"] == code


@pytest.mark.parametrize(
    "route", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/abort_request"]
)
def test_bodies_that_are_no_json(server: ServerProcess, route: str):
    for raw in BAD_BODIES:
        refused(server.http.post(route, content=raw, headers=JSON_TYPE))
    refused(server.http.post(route, content=b'{"prompt": "x"}'))
    refused(server.http.post(route, content=b'{"prompt": "x"}', headers={"Content-Type": "text/plain"}))


@pytest.mark.parametrize("encoding", ["gzip", "br", "zstd", "deflate", "GZIP", "identity, gzip"])
def test_compressed_bodies(server: ServerProcess, encoding: str):
    headers = {**JSON_TYPE, "Content-Encoding": encoding}
    answer = server.http.post("/v1/completions", content=gzip.compress(b'{"prompt": "x"}'), headers=headers)
    assert "send it as it is" in refused(answer, 415)["message"]
    headers["Content-Encoding"] = "identity"
    answer = server.http.post("/v1/completions", content=b'{"prompt": "x", "max_tokens": 1}', headers=headers)
    assert answer.status_code == 200


def test_other_routes_methods_and_models(server: ServerProcess):
    http = server.http
    refused(http.get("/v1/nothing"), 404)
    answer = http.get("/v1/completions")
    refused(answer, 405)
    assert answer.headers["allow"] == "POST"
    for route in ("/health", "/version", "/v1/models", "/metrics", "/openapi.json"):
        head, whole = http.head(route), http.get(route)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-type"] == whole.headers["content-type"]
    refused_head = http.head("/v1/completions")
    assert (refused_head.status_code, refused_head.content) == (405, b"")
    refused(http.get("/v1/models/other"), 404)
    refused(http.post("/v1/completions", json={"prompt": "x", "model": "other"}), 404)
    with pytest.raises(openai.BadRequestError) as bad:
        complete(server.openai, "x", max_tokens=0)
    assert (bad.value.param, bad.value.code) == ("max_tokens", "invalid_value")
    with pytest.raises(openai.NotFoundError) as missing:
        server.openai.completions.create(model="gpt", prompt="x")
    assert (missing.value.param, missing.value.code) == ("model", "model_not_found")


def test_large_bodies(model_dir: Any):
    with running("--model", str(model_dir), "--max-body-size", "1000") as server:
        valid = b'{"prompt": "x", "max_tokens": 1}'
        for size, status in ((1000, 200), (1001, 413), (8000, 413)):
            answer = server.http.post("/v1/completions", content=valid.ljust(size), headers=JSON_TYPE)
            assert answer.status_code == status
            assert status == 200 or refused(answer, status)["code"] == "request_too_large"
        # More than is worth reading: the answer comes at once, and the connection ends.
        host, port = server.url.removeprefix("http://").split(":")
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        for more in (b"Content-Length: 50000000\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n4e20\r\n" + b" " * 20000):
            with socket.create_connection((host, int(port)), timeout=30) as connection:
                connection.sendall(head + more)
                answer_bytes = b"".join(iter(lambda: connection.recv(65536), b""))
            assert answer_bytes.startswith(b"HTTP/1.1 413 ")
            assert b"connection: close" in answer_bytes.lower()
        assert server.http.get("/health").status_code == 200


def test_a_request_with_two_lengths_ends_its_connection(server: ServerProcess):
    host, port = server.url.removeprefix("http://").split(":")
    hidden = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
    for head in (b"GET /version", b"POST /v1/completions"):
        lengths = b" HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
        with socket.create_connection((host, int(port)), timeout=30) as connection:
            connection.sendall(head + lengths + hidden)
            answer = b"".join(iter(lambda: connection.recv(65536), b""))
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_headers"
        assert answer.count(b"HTTP/1.1") == 1
        assert b"connection: close" in answer.lower()


def test_stop_strings_and_texts_without_end_are_refused(server: ServerProcess):
    bodies: list[tuple[dict[str, Any], str]] = [
        ({"stop": [f"stop{number}" for number in range(50_000)], "n": 32}, "stop"),
        ({"stop": "x" * 5000}, "stop"),
        ({"stop_token_ids": list(range(100_000))}, "stop_token_ids"),
        ({"bad_words": [[7] * 32] * 512, "n": 128}, "bad_words"),
        ({"prompt": "x" * 10**6}, "prompt"),
        ({"prompt": [5] * 300_000}, "prompt"),
    ]
    for body, param in bodies:
        start = time.monotonic()
        assert refused(server.http.post("/v1/completions", json={"prompt": "x", **body}))["param"] == param
        assert time.monotonic() - start < 10
    assert refused(server.http.post("/tokenize", json={"prompt": "x" * 10**6}))["param"] == "prompt"
    ids = server.http.post("/tokenize", json={"prompt": "<|im_start|>"}).json()["tokens"]
    assert refused(server.http.post("/detokenize", json={"tokens": ids * 100_000}))["param"] == "tokens"
    many = {"prompt": "x", "max_tokens": 8, "min_tokens": 4, "stop_token_ids": [7] * 2**16}
    assert server.http.post("/v1/completions", json=many).status_code == 200
    assert (
        refused(server.http.post("/v1/completions", json={"prompt": "x" * 2**20}), 413)["code"] == "request_too_large"
    )


def test_engine_failure_ends_one_request_only(poisoned_server: ServerProcess):
    http, url = poisoned_server.http, "/v1/completions"
    good = http.post(url, json={"prompt": [1, 2], "model": "ids-only"}).json()["choices"][0]
    assert (good["text"], len(good["token_ids"])) == ("", 8)
    assert refused(http.post(url, json={"prompt": [1, POISON]}), 500)["type"] == "server_error"
    (error,) = events(http.post(url, json={"prompt": [1, POISON], "stream": True}).text)
    assert error["error"]["code"] == "engine_error"
    assert "finite" in error["error"]["message"]
    chunks = events(http.post(url, json={"prompt": [1, 2], "stream": True}).text)
    token_ids = [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", [])]
    assert token_ids == good["token_ids"]
    assert http.get("/health").status_code == 200


def test_without_a_tokenizer(poisoned_server: ServerProcess):
    http, url = poisoned_server.http, "/v1/completions"
    bodies: list[tuple[dict[str, Any], str]] = [
        ({"prompt": "text"}, "prompt"),
        ({"prompt": [1], "stop": "x"}, "stop"),
        ({"prompt": [1], "echo": True}, "echo"),
    ]
    for body, param in bodies:
        assert "tokenizer" in refused(http.post(url, json=body))["message"]
        assert refused(http.post(url, json=body))["param"] == param
    messages = [{"role": "user", "content": "x"}]
    for route, body in (("/v1/chat/completions", {"messages": messages}), ("/tokenize", {"messages": messages})):
        assert refused(http.post(route, json=body))["param"] == "messages"
    assert refused(http.post("/detokenize", json={"tokens": [1]}))["param"] == "tokens"
    assert refused(http.get("/tokenizer_info"), 404)["code"] == "no_tokenizer"
    probs = http.post(url, json={"prompt": [1, 2], "logprobs": 0}).json()["choices"][0]["logprobs"]
    assert all(token.startswith("token_id:") for token in probs["tokens"])


def test_api_description(server: ServerProcess):
    description = server.http.get("/openapi.json").json()
    text = json.dumps(description)
    assert '"422"' not in text
    schemas = description["components"]["schemas"]
    for reference in set(text.split('"#/components/schemas/')[1:]):
        assert reference.partition('"')[0] in schemas
    statuses = {"200", "400", "404", "408", "413", "415", "500", "503", "504"}
    for route in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/diffusion/completions"):
        assert statuses == description["paths"][route]["post"]["responses"].keys()
    assert server.http.get("/docs").status_code == 200
