"""The event stream that shows every forward pass."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lopa_ascend import LLM, DecodingParams
from lopa_ascend.serve.diffusion import DiffusionDone, DiffusionStart, DiffusionStep
from tests.e2e.conftest import ROOT, ServerProcess
from tests.e2e.serving import events


def answer(server: ServerProcess, body: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, Any]]:
    """The start, the steps and the end of a diffusion stream, each checked against its schema."""
    start, *steps, done = events(server.http.post("/v1/diffusion/completions", json=body).text)
    DiffusionStart.model_validate(start, strict=True)
    for step in steps:
        DiffusionStep.model_validate(step, strict=True)
    DiffusionDone.model_validate(done, strict=True)
    return start, steps, done


@pytest.mark.parametrize("fields", [{}, {"temperature": 1.0, "seed": 3}, {"decoding": "d2f"}])
def test_events_are_the_trace_of_the_python_api(server: ServerProcess, model_dir: Any, fields: dict[str, Any]):
    llm = LLM(model_dir)
    params = DecodingParams(max_new_tokens=24, **fields)
    prompt = f"größer als {fields}"
    (output,) = llm.generate([prompt], params, trace=True, quiet=True)
    start, steps, done = answer(server, {"prompt": prompt, "max_tokens": 24, **fields})
    assert {step["id"] for step in steps} == {start["id"]} == {done["id"]}
    assert output.trace is not None
    assert len(steps) == len(output.trace) == output.num_forwards
    begin = start["prompt_tokens"]
    assert begin == len(output.prompt_token_ids)
    assert {name: start["decoding"][name] for name in fields.keys() & start["decoding"]} == {
        name: value for name, value in fields.items() if name != "seed"
    }
    assert [step["seconds"] for step in steps] == sorted(step["seconds"] for step in steps)
    for step, record in zip(steps, output.trace, strict=True):
        *lookaheads, anchor = record.branches
        assert step["index"] == record.index
        assert step["canvas_length"] == record.branches[record.winner].end - begin
        assert step["committed"] == max(0, record.cache_length + record.committed - begin)
        assert [branch["rank"] for branch in step["branches"]] == [*range(len(record.branches))]
        assert [(b["score"], b["masks"]) for b in step["branches"]] == [
            (b.score, b.masks) for b in (anchor, *lookaheads)
        ]
        assert step["winner"] == (record.winner + 1) % len(record.branches)
        own = step["branches"][step["winner"]]["lookahead"]
        fills = step["fills"][1:] if own else step["fills"]
        assert own is None or step["fills"][0] == own
        filled = [(fill["position"], fill["token_id"], fill["prob"], fill["confidence"]) for fill in fills]
        assert filled == [(fill.position - begin, fill.token, fill.max_prob, fill.confidence) for fill in record.fills]
        assert done["text"].startswith(step["text"])
    assert (done["object"], done["text"], tuple(done["token_ids"])) == ("diffusion.done", output.text, output.token_ids)
    assert (done["finish_reason"], done["stop_reason"]) == (output.finish_reason, output.stop_reason)
    assert done["seed"] == fields.get("seed")
    assert done["usage"]["completion_tokens"] == len(output.token_ids)
    assert done["lopa"]["num_forwards"] == output.num_forwards


def test_a_trace_file_is_the_stream_as_json_lines(server: ServerProcess, model_dir: Path, tmp_path: Path):
    prompt, fields = "größer als", {"max_tokens": 24, "num_branches": 2, "stop": ["e"]}
    asked = {"prompt": prompt, **fields}
    answered = server.http.post("/v1/diffusion/completions", json={**asked, "trace": True})
    assert answered.headers["content-type"] == "application/jsonl"
    llm = LLM(model_dir)
    params = llm.params(max_new_tokens=24, num_branches=2, stop=("e",))
    (output,) = llm.generate([prompt], params, trace=True, quiet=True)
    llm.save_trace(tmp_path / "run.jsonl", output, params)
    streamed, (start, *steps, done) = answer(server, asked), map(json.loads, answered.text.splitlines())
    saved = [*map(json.loads, (tmp_path / "run.jsonl").read_text(encoding="utf-8").splitlines())]
    assert (start["format"], start["version"], start["prompt"]) == ("lopa-trace", 1, prompt)
    assert streamed[0]["prompt"] is None
    for name in ("id", "created", "model", "seconds", "prompt", "usage"):
        for event in (start, *steps, done, *saved, streamed[0], *streamed[1], streamed[2]):
            event.pop(name, None)
    assert [start, *steps, done] == saved == [streamed[0], *streamed[1], streamed[2]]
    with pytest.raises(ValueError, match="trace=True"):
        llm.save_trace(tmp_path / "none.jsonl", llm.generate([prompt], params, quiet=True)[0], params)


def documented_client() -> Callable[..., Iterator[list[int | None]]]:
    """The example client of docs/serving.md."""
    page = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "def watch(" in block)
    names: dict[str, Any] = {"__name__": "example"}
    exec(code, names)
    return names["watch"]


CANVASES: list[dict[str, Any]] = [
    {},
    {"decoding": "d2f", "tau_conf": 0.5},
    {"num_branches": 7, "tau_conf": 0.3},
    {"num_branches": 3, "window_attention": "full", "block_size": 8},
    {"num_branches": 2, "finish_at_eos": False},
    {"num_branches": 3, "temperature": 1.0, "seed": 5},
    {"num_branches": 3, "stop": ["e"]},
    {"num_branches": 3, "max_active_blocks": 1, "block_size": 4},
    {"num_branches": 7, "block_size": 4, "tau_conf": 1.0, "tau_act": 0.5},
    {"decoding": "parallel", "block_size": 8},
    {"decoding": "vanilla", "steps": 6, "alg": "origin", "seed": 5},
    {"base": "parallel", "num_branches": 3, "block_size": 8},
    {"decoding": "fast_dllm", "block_size": 8, "block_cache": "dual", "tau_conf": 0.3},
    {
        "num_branches": 7,
        "tau_conf": 0.1,
        "block_size": 8,
        "structured_outputs": {"regex": "[a-z ]{6}(the )?[a-z]{1,9}"},
    },
    {"decoding": "parallel", "block_size": 8, "structured_outputs": {"choice": ["hello the answer", "no"]}},
]


def canvases(llm: LLM, prompt: str, params: DecodingParams) -> tuple[list[list[int | None]], tuple[int, ...]]:
    """The winner's tokens after each pass but the last, None where it is masked; and the visible tokens."""
    mask, states = llm.config.mask_token_id, []
    for progress in llm.stream(prompt, params):
        for sequence in llm.engine.scheduler.running.values():
            states.append([None if token == mask else token for token in sequence.strategy.anchor.tokens])
        output = progress.output
    assert output is not None
    return states, output.token_ids


@pytest.mark.parametrize("fields", CANVASES, ids=str)
def test_the_documented_client_rebuilds_every_state(server: ServerProcess, model_dir: Any, fields: dict[str, Any]):
    """For a new prompt and for one from the prefix cache."""
    llm, watch = LLM(model_dir), documented_client()
    for prompt in ("hello", "the answer", "ing"):
        states, token_ids = canvases(llm, prompt, DecodingParams(max_new_tokens=19, **fields))
        for _ in range(2):
            begin, *watched, last = watch(server.url, prompt, max_tokens=19, **fields)
            assert begin == []
            # The engine's own state may have the next block open already, with masks alone.
            for seen, state in zip(watched, states, strict=False):
                assert seen == state[: len(seen)]
                assert not any(token is not None for token in state[len(seen) :])
            assert len(watched) in (len(states), len(states) + 1)
            assert tuple(last) == token_ids


def test_every_visible_token_is_in_some_event(server: ServerProcess):
    """Also the last one of an answer that a lookahead branch finished without a pass."""
    without_pass = 0
    for prompt in ("hello", "the answer", "ing", "and"):
        for max_tokens in (7, 8, 12, 19):
            body = {"prompt": prompt, "max_tokens": max_tokens, "num_branches": 7, "tau_conf": 0.3}
            _, steps, done = answer(server, body)
            canvas = {fill["position"]: fill["token_id"] for event in (*steps, done) for fill in event["fills"]}
            assert [canvas[position] for position in range(len(done["token_ids"]))] == done["token_ids"]
            without_pass += bool(done["fills"])
    assert without_pass


def test_chat(server: ServerProcess):
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 12}
    plain = server.http.post("/v1/chat/completions", json=body).json()
    _, *steps, done = events(server.http.post("/v1/diffusion/chat/completions", json=body).text)
    assert done["text"] == plain["choices"][0]["message"]["content"]
    assert {step["id"] for step in steps} == {done["id"]}
