"""The server as its clients see it: the official openai client, curl-like requests, signals."""

import dataclasses
import json
import shlex
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from lopa_ascend import LLM, DecodingParams
from lopa_ascend.serve.cli import DECODING_FLAGS, ServeConfig, parse_args
from lopa_ascend.serve.protocol import ChatCompletion, CompletionRequest, GenerationRequest
from lopa_ascend.serve.protocol import Completion as CompletionBody
from lopa_ascend.serve.server import serve
from tests.e2e.conftest import POISON, ServerProcess, running

PROMPTS = [
    "a",
    "Tom has 3 boxes",
    "größer als 5 €?",
    "日本語のテキスト",
    "🙂🙃 emoji",
    "line\nbreak",
    " spaces ",
    "0" * 50,
]
# One token a forward pass, for tens of seconds: what cannot end by itself while a test looks on.
ENDLESS = {"prompt": "x", "max_tokens": 4000, "ignore_eos": True, "tau_conf": 1.0, "tau_add": 1.0, "tau_act": 1.0}
PATIENCE = 8.0
"""Seconds in which a short request is answered on a busy machine, and far less than ENDLESS takes."""


def complete(client: Any, prompt, **fields):
    extra = {name: fields.pop(name) for name in list(fields) if name in ("ignore_eos", "top_k", "return_token_ids")}
    return client.completions.create(model="tiny", prompt=prompt, extra_body=extra, **fields)


def streamed(chunks) -> dict[int, tuple[str, str | None, int | str | None]]:
    """Text, finish reason and stop reason of every choice."""
    texts: dict[int, str] = {}
    ends: dict[int, tuple[str, int | str | None]] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            part = choice.delta.content or "" if hasattr(choice, "delta") else choice.text
            assert choice.index not in ends, "something came after the finish chunk"
            texts[choice.index] = texts.get(choice.index, "") + part
            if choice.finish_reason is not None:
                ends[choice.index] = choice.finish_reason, choice.stop_reason
    assert texts.keys() == ends.keys()
    return {index: (texts[index], *ends[index]) for index in texts}


def whole(response) -> dict[int, tuple[str, str | None, int | str | None]]:
    return {
        choice.index: (
            choice.message.content if hasattr(choice, "message") else choice.text,
            choice.finish_reason,
            choice.stop_reason,
        )
        for choice in response.choices
    }


def events(text: str) -> list[dict[str, Any]]:
    """The events of a stream, which must end with [DONE]."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


# ---- answers ---------------------------------------------------------------------------------------------------------


def test_greeting_health_and_models(server: ServerProcess):
    assert "model     tiny, max_model_len 4096" in server.greeting
    assert "decoding=lopa num_branches=3" in server.greeting
    assert server.http.get("/health").json() == {"status": "ok"}
    model: Any
    (model,) = server.openai.models.list().data
    assert (model.id, model.max_model_len) == ("tiny", 4096)
    assert server.openai.models.retrieve("tiny") == model
    command = shlex.split(server.greeting.splitlines()[-1])
    answer = subprocess.run([*command, "-sS"], capture_output=True, text=True, check=True, timeout=60)
    ChatCompletion.model_validate_json(answer.stdout)


def test_same_output_as_the_python_api(server: ServerProcess, model_dir: Path):
    llm = LLM(model_dir)
    for params in (DecodingParams(max_new_tokens=24), DecodingParams(max_new_tokens=24, temperature=1.0, seed=3)):
        outputs = llm.generate(PROMPTS, params, quiet=True)
        fields = {"max_tokens": 24, "temperature": params.temperature, "seed": params.seed}
        response = complete(server.openai, PROMPTS, return_token_ids=True, **fields)
        assert [choice.text for choice in response.choices] == [output.text for output in outputs]
        assert [tuple(choice.token_ids) for choice in response.choices] == [output.token_ids for output in outputs]
        assert response.usage.completion_tokens == sum(len(output.token_ids) for output in outputs)
        assert response.usage.prompt_tokens == sum(len(output.prompt_token_ids) for output in outputs)
        assert response.lopa["num_forwards"] == sum(output.num_forwards for output in outputs)
    (output,) = llm.chat([[{"role": "user", "content": "hi there"}]], DecodingParams(max_new_tokens=24), quiet=True)
    parts = [{"type": "text", "text": "hi there"}]
    create: Any = server.openai.chat.completions.create
    answer = create(model="tiny", messages=[{"role": "user", "content": parts}], max_completion_tokens=24)
    assert answer.choices[0].message.content == output.text


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_stream_equals_whole(client: Any, temperature: float):
    for prompt in PROMPTS:
        fields = {"max_tokens": 32, "temperature": temperature, "seed": 1}
        assert streamed(complete(client, prompt, stream=True, **fields)) == whole(complete(client, prompt, **fields))
        chat = {"model": "tiny", "messages": [{"role": "user", "content": prompt}], **fields}
        chunks = list(client.chat.completions.create(**chat, stream=True))
        assert (chunks[0].choices[0].delta.role, chunks[0].choices[0].delta.content) == ("assistant", "")
        assert streamed(chunks) == whole(client.chat.completions.create(**chat))


def test_stop_strings_across_chunks(client: Any):
    fields = {"max_tokens": 40, "temperature": 1.0, "seed": 2}
    text = complete(client, "go", ignore_eos=True, **fields).choices[0].text
    for start in range(5, len(text) - 4, 9):
        stop = [text[start : start + 4], "never there", "", *map(str, range(90000, 90006))]
        stop.remove("")
        asked = {"stop": stop, "ignore_eos": True, **fields}
        expected = (text[: text.index(stop[0])], "stop", stop[0])
        assert whole(complete(client, "go", **asked)) == {0: expected}
        assert streamed(complete(client, "go", stream=True, **asked)) == {0: expected}


def test_several_choices(client: Any):
    same = complete(client, ["a", "b"], n=2, max_tokens=12)
    texts = [choice.text for choice in same.choices]
    assert [choice.index for choice in same.choices] == [0, 1, 2, 3]
    assert texts == [text for p in ("a", "b") for text in 2 * [complete(client, p, max_tokens=12).choices[0].text]]
    sampled = {"max_tokens": 12, "temperature": 1.0}
    several = complete(client, "a", n=3, seed=5, **sampled)
    singles = [complete(client, "a", seed=seed, **sampled).choices[0].text for seed in (5, 6, 7)]
    assert [choice.text for choice in several.choices] == singles
    assert len(set(singles)) == 3
    assert streamed(complete(client, "a", n=3, seed=5, stream=True, **sampled)) == whole(several)


def test_token_id_prompts_and_switched_off_sampling(client: Any):
    ids = [[1, 2, 3], [4, 5]]
    both = whole(complete(client, ids, max_tokens=9, top_p=1, top_k=-1))
    assert both[0] == whole(complete(client, ids[0], max_tokens=9, top_k=0))[0]
    assert both[1] == whole(complete(client, ids[1:], max_tokens=9, temperature=0))[0]


def test_usage_in_streams(client: Any):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(complete(client, ["a", "b"], max_tokens=12, ignore_eos=True, stream=True, stream_options=options))
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert (chunks[-1].choices, counts[-1]) == ([], 24)
    assert chunks[-1].lopa["num_forwards"] > 0
    chunks = list(complete(client, "a", max_tokens=4, stream=True, stream_options={"include_usage": True}))
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)


def test_clients_at_once(client: Any):
    def ask(prompt: str, stream: bool):
        answer = complete(client, prompt, max_tokens=24, stream=stream)
        return streamed(answer) if stream else whole(answer)

    expected = [ask(prompt, False) for prompt in PROMPTS]
    with ThreadPoolExecutor(2 * len(PROMPTS)) as pool:
        answers = [pool.submit(ask, prompt, stream) for stream in (False, True) for prompt in PROMPTS]
    assert [answer.result() for answer in answers] == expected + expected


def test_response_shapes(server: ServerProcess):
    strict = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, _strict_response_validation=True)
    create: Any = strict.chat.completions.create
    messages = [{"role": "user", "content": "a"}]
    chat = create(model="tiny", messages=messages, max_tokens=4)
    assert chat.choices[0].message.refusal is None
    ChatCompletion.model_validate(chat.model_dump(exclude_unset=True))
    completion = strict.completions.create(model="tiny", prompt="a", max_tokens=4)
    CompletionBody.model_validate(completion.model_dump(exclude_unset=True))
    back = [*messages, chat.choices[0].message.model_dump(), {"role": "developer", "content": "b"}]
    create(model="tiny", messages=back, max_tokens=4, user="me", logprobs=False)


# ---- mistakes --------------------------------------------------------------------------------------------------------

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
    ({"max_tokens": 5.0}, "max_tokens"),
    ({"n": 0}, "n"),
    ({"n": 10**30}, "n"),
    ({"n": 2, "best_of": 3}, "best_of"),
    ({"stop": ""}, "stop"),
    ({"stop": 5}, "stop"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": 10**400}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0.5}, "top_p"),
    ({"top_k": 5}, "top_k"),
    ({"temperature": 1, "top_p": 0}, "top_p"),
    ({"seed": -1}, "seed"),
    ({"tau_conf": 2}, "tau_conf"),
    ({"decoding": "d2f", "num_branches": 3}, "num_branches"),
    ({"decoding": "magic"}, "decoding"),
    ({"eos_token_id": 10**6}, "eos_token_id"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
    ({"stream": 1}, "stream"),
    ({"echo": True}, "echo"),
    ({"logprobs": 1}, "logprobs"),
    ({"presence_penalty": 0.5}, "presence_penalty"),
    ({"logit_bias": {"5": 1}}, "logit_bias"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
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
BAD_MESSAGES: list[tuple[Any, str]] = [
    ([], "messages"),
    ("hi", "messages"),
    ([{"content": "x"}], "messages[0].role"),
    ([{"role": "tool", "content": "x"}], "messages[0].role"),
    ([{"role": "user"}], "messages[0].content"),
    ([{"role": "user", "content": None}], "messages[0].content"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages[0].content"),
    ([{"role": "user", "content": "x"}, {"role": "user", "content": "x", "tool_calls": [1]}], "messages[1].tool_calls"),
    ([{"role": "user", "content": "x" * 20000}], "messages"),
]


def refused(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert response.json().keys() == {"error"}
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["code"]
    return error


def test_mistakes_name_the_field(server: ServerProcess):
    before = complete(server.openai, "a", max_tokens=16).choices[0].text
    for fields, param in MISTAKES + BAD_PROMPTS:
        body = fields if param in ("prompt", "promt") else {"prompt": "x", **fields}
        error = refused(server.http.post("/v1/completions", json=body))
        assert error["param"].partition("[")[0] == param, error
        assert param.rpartition(".")[2] in error["message"]
        assert len(error["message"]) < 1100
    for messages, param in BAD_MESSAGES:
        assert refused(server.http.post("/v1/chat/completions", json={"messages": messages}))["param"] == param
    json_type = {"Content-Type": "application/json"}
    for raw in BAD_BODIES:
        refused(server.http.post("/v1/completions", content=raw, headers=json_type))
        refused(server.http.post("/v1/chat/completions", content=raw, headers=json_type))
    assert complete(server.openai, "a", max_tokens=16).choices[0].text == before


def test_errors_outside_the_fields(server: ServerProcess):
    http, valid = server.http, b'{"prompt": "x"}'
    refused(http.post("/v1/completions", content=valid))
    refused(http.post("/v1/completions", content=valid, headers={"Content-Type": "text/plain"}))
    large = valid + b" " * (9 * 2**20)
    refused(http.post("/v1/completions", content=large, headers={"Content-Type": "application/json"}), 413)
    refused(http.get("/v1/nothing"), 404)
    refused(http.get("/v1/completions"), 405)
    refused(http.get("/v1/models/other"), 404)
    with pytest.raises(openai.BadRequestError) as bad:
        complete(server.openai, "x", max_tokens=0)
    assert (bad.value.param, bad.value.code) == ("max_tokens", "invalid_value")
    with pytest.raises(openai.NotFoundError) as missing:
        server.openai.completions.create(model="gpt", prompt="x")
    assert (missing.value.param, missing.value.code) == ("model", "model_not_found")


def test_api_description(server: ServerProcess):
    description = server.http.get("/openapi.json").json()
    text = json.dumps(description)
    assert '"422"' not in text
    schemas = description["components"]["schemas"]
    for reference in set(text.split('"#/components/schemas/')[1:]):
        assert reference.partition('"')[0] in schemas
    for route in ("/v1/completions", "/v1/chat/completions"):
        assert {"200", "400", "404", "413", "500", "503"} == description["paths"][route]["post"]["responses"].keys()


def test_every_decoding_parameter_is_a_field_and_a_flag():
    names = set(DecodingParams.names())
    assert names <= GenerationRequest.model_fields.keys()
    assert names - {"seed"} == DECODING_FLAGS.keys()
    assert CompletionRequest.model_config["extra"] == "forbid"


# ---- the command line ------------------------------------------------------------------------------------------------


def test_flags_become_defaults(capsys: pytest.CaptureFixture[str]):
    config = parse_args(["--tau-conf", "0.8", "--stop", "a", "b", "--ignore-eos", "--seed", "7", "--no-finish-at-eos"])
    assert (config.seed, config.port, config.model) == (7, 8000, None)
    assert config.decoding == {"tau_conf": 0.8, "stop": ("a", "b"), "ignore_eos": True, "finish_at_eos": False}
    dataclasses.replace(config, port=1)
    for wrong in (
        ["--tau-conf", "2"],
        ["--port", "70000"],
        ["--decoding", "x"],
        ["--tau", "1"],
        ["--num-branches", "x"],
    ):
        with pytest.raises(SystemExit) as stop:
            parse_args(wrong)
        assert stop.value.code == 2
        assert wrong[0] in capsys.readouterr().err


def test_start_fails_with_one_line(server: ServerProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    taken = ServeConfig(port=int(server.url.rpartition(":")[2]))
    for config, expected in ((taken, "in use"), (ServeConfig(port=0, model=str(tmp_path)), str(tmp_path))):
        assert serve(config) == 1
        error = capsys.readouterr().err
        assert error.startswith("error: ")
        assert expected in error
        assert error.count("\n") == 1


# ---- trouble ---------------------------------------------------------------------------------------------------------


def test_engine_failure_ends_one_request_only(poisoned_server: ServerProcess):
    http, url = poisoned_server.http, "/v1/completions"
    good = http.post(url, json={"prompt": [1, 2], "model": "ids-only"}).json()["choices"][0]
    assert (good["text"], len(good["token_ids"]) <= 8) == ("", True)
    assert refused(http.post(url, json={"prompt": [1, POISON]}), 500)["type"] == "server_error"
    (error,) = events(http.post(url, json={"prompt": [1, POISON], "stream": True}).text)
    assert "NonFinite" in error["error"]["message"]
    chunks = events(http.post(url, json={"prompt": [1, 2], "stream": True}).text)
    token_ids = [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", [])]
    assert token_ids == good["token_ids"]
    assert http.get("/health").status_code == 200
    for body, param in (({"prompt": "text"}, "prompt"), ({"prompt": [1], "stop": "x"}, "stop")):
        assert "tokenizer" in refused(http.post(url, json=body))["message"]
        assert refused(http.post(url, json=body))["param"] == param
    assert refused(http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]}))["param"]


def test_disconnected_clients_are_dropped(server: ServerProcess):
    long = {**ENDLESS, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=long, timeout=60) as running_stream:
        next(running_stream.iter_lines())
        for queued in (ENDLESS, long):
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(f"{server.url}/v1/completions", json=queued, timeout=httpx.Timeout(60, read=0.3)).read()
        started = time.monotonic()
        assert server.http.get("/health").status_code == 200
        assert time.monotonic() - started < PATIENCE / 4
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/completions", json=ENDLESS, timeout=httpx.Timeout(60, read=0.5))
    started = time.monotonic()
    complete(server.openai, "a", max_tokens=4)
    assert time.monotonic() - started < PATIENCE


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_stop_it_with_work_under_way(model_dir: Path, number: int):
    with running("--model", str(model_dir)) as server:

        def ask(stream: bool) -> httpx.Response:
            return httpx.post(f"{server.url}/v1/completions", json={**ENDLESS, "stream": stream}, timeout=60)

        with (
            ThreadPoolExecutor(4) as pool,
            httpx.stream(
                "POST", f"{server.url}/v1/completions", json={**ENDLESS, "stream": True}, timeout=60
            ) as unread,
        ):
            answers = [pool.submit(ask, stream) for stream in (False, True, False, True)]
            next(unread.iter_lines())
            time.sleep(0.5)
            status, stderr = server.stop(number)
        assert (status, "Traceback" in stderr) == (0, False), stderr
        for answer in (future.result() for future in answers):
            # Streams that had begun say it inside, everyone else by the status.
            assert answer.status_code in (200, 503)
            error = answer.json() if answer.status_code == 503 else events(answer.text)[-1]
            assert "shutting down" in error["error"]["message"]


def test_signal_while_it_loads(model_dir: Path):
    with running("--model", str(model_dir), wait=False) as server:
        time.sleep(1.5)
        status, stderr = server.stop(signal.SIGTERM)
    assert (status, stderr) == (0, "")


def test_shutdown_timeout_lets_requests_end(model_dir: Path):
    body = {**ENDLESS, "max_tokens": 60, "stream": True, "stream_options": {"include_usage": True}}
    with (
        running("--model", str(model_dir), "--shutdown-timeout", "60") as server,
        httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer,
    ):
        lines = answer.iter_lines()
        first = next(lines)
        server.process.send_signal(signal.SIGTERM)
        rest = "\n".join([first, *lines])
        assert events(rest)[-1]["usage"]["completion_tokens"] == 60
        assert server.process.wait(timeout=10) == 0
