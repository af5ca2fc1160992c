"""What operators and tools ask of the server: state, metrics, keys, ids, logs, tokens, aborts."""

import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

import lopa_ascend
from lopa_ascend.config import DecodingParams
from lopa_ascend.serve.api.chat import ChatCompletion
from tests.e2e.conftest import ServerProcess, running
from tests.e2e.serving import complete, refused

ENDLESS = {"prompt": "x", "max_tokens": 4000, "ignore_eos": True, "tau_conf": 1.0, "tau_add": 1.0, "tau_act": 1.0}
"""One token a forward pass, for tens of seconds."""
KEY = "correct horse battery staple"


def samples(server: ServerProcess) -> dict[str, float]:
    """All metrics by name and label values but the first two, e.g. "lopa:branch_wins_total anchor"."""
    answer = server.http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    values = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            assert (sample.labels.pop("model_name"), sample.labels.pop("engine")) == ("tiny", "0")
            values[" ".join([sample.name, *sample.labels.values()])] = sample.value
    return values


def test_greeting_state_and_models(server: ServerProcess):
    assert "model     tiny, max_model_len 4096" in server.greeting
    assert "decoding=lopa num_branches=3" in server.greeting
    assert "top_logprobs" not in server.greeting  # a default that few ask for
    # 2 layers x 2 KV heads of 8 in float32, 32 requests of 4 branches and 32 pages.
    assert re.search(r"memory    weights \d+\.\d KiB, KV pages 4096 x 32.0 KiB = 128.0 MiB, free ", server.greeting)
    for route in ("/health", "/ready"):
        assert server.http.get(route).json() == {"status": "ok"}
    assert server.http.get("/version").json() == {"version": lopa_ascend.__version__}
    model: Any
    (model,) = server.openai.models.list().data
    assert (model.id, model.max_model_len) == ("tiny", 4096)
    assert server.openai.models.retrieve("tiny") == model
    command = shlex.split(server.greeting.splitlines()[-1])
    answer = subprocess.run([*command, "-sS"], capture_output=True, text=True, check=True, timeout=60)
    ChatCompletion.model_validate_json(answer.stdout)


def test_server_info(server: ServerProcess):
    info = server.http.get("/server_info").json()
    assert info["backend"]["device"] == "cpu"
    assert info["backend"]["dtype"] == "float32"
    (rank,) = info["backend"]["ranks"]
    assert (rank["device"], rank["versions"]) == ("cpu", {})
    assert rank["num_pages"] * rank["page_bytes"] == info["backend"]["kv_cache_memory"]
    assert info["decoding"].keys() == set(DecodingParams.names())
    assert info["limits"]["max_model_len"] == 4096
    assert (info["server"]["port"], info["server"]["api_key"]) == (0, False)
    assert info["versions"]["lopa_ascend"] == lopa_ascend.__version__


def test_tokenizing_there_and_back(server: ServerProcess):
    http = server.http
    for text in ("größer als 5 €?", "日本語🙂", "<|im_start|>user"):
        answer = http.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()
        assert (answer["count"], answer["max_model_len"], answer["token_strs"]) == (len(answer["tokens"]), 4096, None)
        assert http.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": text}
    messages = [{"role": "user", "content": "hi"}]
    chat = http.post("/tokenize", json={"messages": messages, "return_token_strs": True}).json()
    usage = http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1}).json()["usage"]
    assert chat["count"] == usage["prompt_tokens"]
    assert "".join(chat["token_strs"]) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    info = http.get("/tokenizer_info").json()
    assert info["eos_token"] == info["pad_token"] == "<|endoftext|>"
    assert "add_generation_prompt" in info["chat_template"]
    mistakes: list[tuple[str, dict[str, Any], str]] = [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": messages}, "prompt"),
        ("/tokenize", {"messages": messages, "add_generation_prompt": False}, "add_generation_prompt"),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
    ]
    for route, body, param in mistakes:
        assert refused(http.post(route, json=body))["param"] == param


def test_metrics_count_what_was_done(server: ServerProcess):
    before = samples(server)
    answer = complete(server.openai, ["first of two", "second"], max_tokens=40, ignore_eos=True)
    after = samples(server)
    grown = {name: value - before.get(name, 0) for name, value in after.items()}
    forwards = answer.lopa["num_forwards"]
    assert grown["vllm:prompt_tokens_total"] == answer.usage.prompt_tokens
    assert grown["vllm:prefix_cache_queries_total"] == answer.usage.prompt_tokens
    assert grown["vllm:generation_tokens_total"] == answer.usage.completion_tokens == 80
    assert grown["vllm:request_success_total length"] == 2
    assert grown["vllm:diffusion_num_denoising_steps_total"] == forwards
    assert grown["vllm:diffusion_num_committed_tokens_total"] == grown["vllm:iteration_tokens_total_sum"] == 80
    assert grown["vllm:diffusion_num_canvas_positions_total"] >= 80
    assert sum(value for name, value in grown.items() if name.startswith("lopa:branch_wins_total ")) == forwards
    assert grown["lopa:forward_seconds_count"] <= forwards
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time", "request_prefill_time"):
        assert grown[f"vllm:{name}_seconds_count"] == 2
    whole, parts = (f"vllm:request_{name}_time_seconds_sum" for name in ("inference", "decode"))
    assert grown[whole] == pytest.approx(grown[parts] + grown["vllm:request_prefill_time_seconds_sum"])
    assert grown["vllm:request_generation_tokens_sum"] == 80
    assert grown["lopa:tokens_per_forward_count"] == 2
    for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "lopa:pages_in_use"):
        assert after[name] == 0
    assert after["vllm:num_preemptions_total"] == 0


def test_abort_of_a_stream_by_its_id(server: ServerProcess):
    body = {**ENDLESS, "stream": True, "n": 2}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        first = json.loads(next(lines).removeprefix("data: "))
        assert server.http.post("/abort_request", json={"request_id": first["id"]}).json()["aborted"]
        rest = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    reasons = [choice["finish_reason"] for chunk in rest for choice in chunk["choices"]]
    assert [reason for reason in reasons if reason] == ["abort", "abort"]
    refused(server.http.post("/abort_request", json={"request_id": first["id"]}), 404)


def test_an_id_that_a_client_chose_ends_no_request(server: ServerProcess):
    url, headers, body = f"{server.url}/v1/completions", {"X-Request-Id": "shared"}, {**ENDLESS, "stream": True}
    with httpx.stream("POST", url, json=body, headers=headers, timeout=60) as answer:
        assert answer.headers["x-request-id"] == "shared"
        lines = answer.iter_lines()
        first = json.loads(next(lines).removeprefix("data: "))
        error = refused(server.http.post("/abort_request", json={"request_id": "shared"}), 404)
        assert (error["param"], error["code"]) == ("request_id", "request_not_found")
        state = samples(server)
        assert state["vllm:num_requests_running"] + state["vllm:num_requests_waiting"] == 1
        assert server.http.post("/abort_request", json={"request_id": first["id"]}).json()["aborted"]


def test_request_ids(server: ServerProcess):
    for sent, same in (("client-7:a.b_c", True), ("x" * 200, False), ("no spaces please", False), ("", False)):
        for route in ("/health", "/v1/nothing"):
            returned = server.http.get(route, headers={"X-Request-Id": sent}).headers["x-request-id"]
            assert (returned == sent) == same
            assert returned
    assert len({server.http.get("/health").headers["x-request-id"] for _ in range(3)}) == 3


def test_key_and_log(model_dir: Path):
    with running("--model", str(model_dir), env={"LOPA_API_KEY": KEY}) as server:
        http = server.http
        children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
        assert children
        assert not any(KEY.encode() in Path(f"/proc/{child}/environ").read_bytes() for child in children)
        for wrong in (None, "", "Bearer", f"Bearer {KEY}x", KEY, f"Basic {KEY}", "Bearer ü"):
            headers = [] if wrong is None else [(b"authorization", wrong.encode())]
            for route in ("/v1/models", "/metrics", "/openapi.json", "/docs", "/server_info", "/v1/nothing"):
                denied = http.get(route, headers=headers)
                assert refused(denied, 401)["code"] == "invalid_api_key"
                assert denied.headers["www-authenticate"] == "Bearer"
        assert all(http.get(route).status_code == 200 for route in ("/health", "/ready", "/version"))
        with pytest.raises(openai.AuthenticationError):
            server.openai.models.list()
        assert http.post("/v1/messages", json={}).json()["error"]["type"] == "authentication_error"
        assert http.get("/v1/models", headers={"x-api-key": KEY}).status_code == 200
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)
        answer = client.completions.create(
            model="tiny", prompt="a secret text", max_tokens=8, extra_headers={"X-Request-Id": "mine"}
        )
        key = {"Authorization": f"Bearer {KEY}"}
        assert KEY not in http.get("/server_info", headers=key).text
        description = http.get("/openapi.json", headers=key).json()
        assert "401" in description["paths"]["/v1/models"]["get"]["responses"]
        assert "401" not in description["paths"]["/health"]["get"]["responses"]
        status, log = server.stop(15)
        assert status == 0
    (line,) = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    assert (line["id"], line["request_id"]) == (answer.id, "mine")
    assert line["completion_tokens"] == answer.usage.completion_tokens
    assert line["forwards"] == answer.lopa["num_forwards"]
    assert 0 < line["latency_s"] < 60
    assert line["finish_reason"] == answer.choices[0].finish_reason
    assert "secret" not in log + server.stdout.all()


def test_texts_are_logged_when_asked_for(model_dir: Path):
    with running("--model", str(model_dir), "--enable-log-requests") as server:
        complete(server.openai, "a secret text", max_tokens=2)
        log = server.stop(15)[1]
    received, finished = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    assert received["body"]["prompt"] == ["a secret text"]
    assert received["id"] == finished["id"]


def test_every_route_takes_slashes_too_many(server: ServerProcess):
    for path, operations in server.http.get("/openapi.json").json()["paths"].items():
        for method in operations.keys() & {"get", "post"}:
            body: dict[str, Any] | None = {} if method == "post" else None
            answers = [
                server.http.request(
                    method,
                    f"{server.url}{written}".replace("{model}", "tiny"),
                    json=body,
                    headers={"X-Request-Id": "r"},
                )
                for written in (path, f"{path.rstrip('/')}/", f"/{path}", path.replace("/", "//"))
            ]
            assert len({answer.status_code for answer in answers}) == 1, path
            assert answers[0].status_code in (200, 400, 404)
            if method == "post":
                assert len({answer.text for answer in answers}) == 1, path
