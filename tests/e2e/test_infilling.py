"""Texts with gaps, on random models of two families: what is filled, what comes back, and what is refused."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lopa_ascend import LLM, DecodingParams, Gap, ParameterError
from tests.e2e.conftest import ROOT, ServerProcess, running
from tests.e2e.serving import events, refused
from tests.tiny import VOCAB_SIZE, write_dream, write_llada, write_tokenizer

DECODINGS: list[dict[str, Any]] = [
    {"decoding": "parallel"},
    {"decoding": "vanilla"},
    {"decoding": "fast_dllm"},
    {"decoding": "lopa", "base": "parallel", "num_branches": 3},
    {"decoding": "lopa", "base": "fast_dllm", "num_branches": 2},
]
PARTS: list[str | Gap] = ["caf\u00e9 the", Gap(tokens=9), " and \U0001f642 the\r\n", Gap(tokens=3), "hello"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    path = tmp_path_factory.mktemp("models")
    shape: dict[str, Any] = {"seed": 3, "bias": False, "eos_token_id": VOCAB_SIZE - 4, "max_position_embeddings": 512}
    dream = write_dream(path / "dream", **shape)
    llada = write_llada(path / "llada", dream)
    for model in (dream, llada):
        write_tokenizer(model)
    return {"dream": dream, "llada": llada}


@pytest.fixture(scope="module", params=["dream", "llada"])
def llm(request: pytest.FixtureRequest, models: dict[str, Path]) -> LLM:
    return LLM(models[request.param])


@pytest.mark.parametrize("fields", DECODINGS)
def test_given_text_comes_back_unchanged_and_gaps_in_order(llm: LLM, fields: dict[str, Any]) -> None:
    params = DecodingParams(block_size=4, ignore_eos=True, seed=1, **fields)
    output = llm.infill(PARTS, params)
    first, second = output.gaps
    assert (len(first.token_ids), len(second.token_ids)) == (9, 3)
    assert output.text == f"caf\u00e9 the{first.text} and \U0001f642 the\r\n{second.text}hello"
    assert output.token_ids == first.token_ids + second.token_ids
    assert (output.finish_reason, len(output.max_probs), output.num_positions) == ("length", 12, 12)


def test_what_follows_a_gap_is_seen(llm: LLM) -> None:
    params = DecodingParams(decoding="parallel", ignore_eos=True)
    found = {str(llm.infill(["the", Gap(tokens=6), behind], params).text)[3:-5] for behind in ("hello", "stops")}
    assert len(found) == 2


def test_a_gap_alone_is_an_ordinary_canvas(llm: LLM) -> None:
    for fields in DECODINGS:
        params = DecodingParams(block_size=4, max_new_tokens=10, seed=1, **fields)
        (plain,) = llm.generate("the answer", params, quiet=True)
        filled = llm.infill(["the answer", Gap(tokens=10)], params)
        assert (filled.gaps[0].text, filled.token_ids) == (plain.text, plain.token_ids)
        assert (filled.max_probs, filled.finish_reason) == (plain.max_probs, plain.finish_reason)


def test_a_found_length_changes_nothing_else(llm: LLM) -> None:
    for fields in DECODINGS:
        params = DecodingParams(block_size=4, ignore_eos=True, seed=1, **fields)
        found = llm.infill(["the", Gap(max_tokens=9), "hello", Gap(max_tokens=5), "and"], params)
        lengths = [len(gap.token_ids) for gap in found.gaps]
        assert all(1 <= length <= most for length, most in zip(lengths, (9, 5), strict=True))
        fixed = llm.infill(["the", Gap(lengths[0]), "hello", Gap(lengths[1]), "and"], params)
        assert (found.text, found.token_ids, found.max_probs) == (fixed.text, fixed.token_ids, fixed.max_probs)
        assert {gap.finish_reason for gap in (found, *found.gaps)} == {"stop"}
        assert {gap.finish_reason for gap in (fixed, *fixed.gaps)} == {"length"}
        assert found.num_forwards > fixed.num_forwards


def test_neighbours_change_nothing(llm: LLM) -> None:
    params = DecodingParams(decoding="parallel", block_size=4, max_new_tokens=24, ignore_eos=True)
    (alone,), filled = llm.generate("the answer", params, quiet=True), llm.infill(PARTS, params)
    stream = llm.stream("the answer", params)
    next(stream)
    assert llm.infill(PARTS, params).token_ids == filled.token_ids
    *_, last = stream
    assert (last.token_ids, last.max_probs) == (alone.token_ids, alone.max_probs)


def test_an_end_ends_its_gap_alone(llm: LLM) -> None:
    (eos, *_) = llm.config.eos_token_ids
    for fields in DECODINGS:
        params = DecodingParams(block_size=4, seed=1, logit_bias=((eos, 100.0),), **fields)
        output = llm.infill(PARTS, params)
        assert [(gap.text, gap.finish_reason) for gap in output.gaps] == [("", "stop")] * 2
        assert output.text == "".join(part for part in PARTS if isinstance(part, str))
        given = llm.infill(["the", Gap(tokens=4), [eos], Gap(tokens=4)], DecodingParams(ignore_eos=True, **fields))
        assert [len(gap.token_ids) for gap in given.gaps] == [4, 4]  # an end that is given ends nothing


def test_a_stop_string_ends_its_gap_alone(llm: LLM) -> None:
    params = DecodingParams(decoding="parallel", ignore_eos=True)
    plain = llm.infill(PARTS, params)
    text = str(plain.gaps[0].text)
    stop = text[2:4]
    stopped = llm.infill(PARTS, params.with_valid(stop=(stop,)))
    assert (stopped.gaps[0].text, stopped.gaps[0].stop_reason) == (text[:2], stop)
    assert (stopped.gaps[1].finish_reason, stopped.finish_reason) == ("length", "length")


def test_what_no_model_could_fill_is_refused(llm: LLM) -> None:
    params = DecodingParams(decoding="parallel")
    mistakes: list[tuple[list[Any], DecodingParams, str]] = [
        ([Gap(), "a"], params, "parts[0]"),
        (["a"], params, "no gap"),
        (["a", Gap(), Gap()], params, "parts[2]"),
        (["a", Gap(), ""], params, "parts[2]"),
        (["a", Gap(tokens=600)], params, "512"),
        (["a", Gap(tokens=3), "b"], DecodingParams(), 'use decoding "parallel"'),
        (
            ["a", Gap(tokens=3), "b"],
            DecodingParams.of(decoding="parallel", structured_outputs={"json": {}}),
            "structured",
        ),
        (["a", Gap(), "b", Gap()], DecodingParams(decoding="parallel", max_new_tokens=9, min_new_tokens=1), "min_new"),
    ]
    for parts, asked, message in mistakes:
        with pytest.raises(ParameterError) as error:
            llm.infill(parts, asked)
        assert error.value.param.startswith("parts")
        assert message in str(error.value)
    for sizes in ({"tokens": 0}, {"max_tokens": True}, {"tokens": 1, "max_tokens": 1}):
        with pytest.raises(ParameterError):
            Gap(**sizes)


def test_the_example_runs(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["infill.py", str(models["dream"])])
    runpy.run_path(str(ROOT / "examples" / "infill.py"), run_name="__main__")
    shown = capsys.readouterr().out
    assert shown.startswith("def median(")
    assert "assert median([3, 1, 2]) == 2\n" in shown
    assert "Dear Ms. Okafor" in shown
    assert shown.endswith("\nCustomer service\n\n")


# ---- the server ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(models: dict[str, Path]) -> Iterator[ServerProcess]:
    with running("--model", str(models["llada"]), "--decoding", "parallel", "--block-size", "4") as process:
        yield process


def asked_parts() -> list[Any]:
    return [part if isinstance(part, str) else {"tokens": part.tokens} for part in PARTS]


def test_a_suffix_follows_the_answer(server: ServerProcess, models: dict[str, Path]) -> None:
    llm, body = LLM(models["llada"]), {"prompt": "the ", "suffix": " and", "max_tokens": 9, "ignore_eos": True}
    answer = server.http.post(
        "/v1/completions", json={**body, "logprobs": 1, "n": 2, "temperature": 1, "seed": 4}
    ).json()
    for seed, choice in enumerate(answer["choices"], 4):
        params = llm.params(block_size=4, decoding="parallel", ignore_eos=True, temperature=1.0, seed=seed)
        expected = llm.infill(["the ", Gap(max_tokens=9), " and"], params)
        assert (choice["text"], choice["finish_reason"]) == (expected.gaps[0].text, "stop")
        assert (len(choice["logprobs"]["tokens"]), choice["seed"]) == (len(expected.token_ids), seed)
    assert answer["usage"]["prompt_tokens"] == sum(len(llm.tokenize(text)) for text in ("the ", " and"))
    assert answer["usage"]["completion_tokens"] == sum(
        len(choice["logprobs"]["tokens"]) for choice in answer["choices"]
    )
    whole = server.http.post("/v1/completions", json=body).json()["choices"][0]["text"]
    chunks = events(server.http.post("/v1/completions", json={**body, "stream": True}).text)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole
    plain = {**body, "suffix": ""}
    assert server.http.post("/v1/completions", json=plain).json()["choices"][0]["text"] != whole


def test_the_events_of_a_suffix_fill_the_gap(server: ServerProcess) -> None:
    body = {"prompt": "the ", "suffix": " and", "max_tokens": 9, "ignore_eos": True}
    _, *steps, done = events(server.http.post("/v1/diffusion/completions", json=body).text)
    length = len(done["token_ids"])
    canvas = {fill["position"]: fill["token_id"] for step in steps for fill in step["fills"]}
    assert sorted(canvas) == list(range(steps[-1]["canvas_length"]))
    assert [canvas[position] for position in range(length)] == done["token_ids"]
    assert max(step["canvas_length"] for step in steps) == steps[-1]["canvas_length"] > length
    assert done["text"] == server.http.post("/v1/completions", json=body).json()["choices"][0]["text"]


def test_a_text_with_gaps_comes_back_whole(server: ServerProcess, models: dict[str, Path]) -> None:
    llm, body = LLM(models["llada"]), {"parts": asked_parts(), "ignore_eos": True, "logprobs": 2}
    expected = llm.infill(PARTS, llm.params(block_size=4, decoding="parallel", ignore_eos=True))
    answer = server.http.post("/v1/infill", json={**body, "return_token_ids": True}).json()
    (choice,) = answer["choices"]
    assert choice["text"] == expected.text
    assert [tuple(gap["token_ids"]) for gap in choice["gaps"]] == [gap.token_ids for gap in expected.gaps]
    assert [gap["text"] for gap in choice["gaps"]] == [gap.text for gap in expected.gaps]
    assert [len(gap["logprobs"]["tokens"]) for gap in choice["gaps"]] == [9, 3]
    assert answer["usage"]["completion_tokens"] == 12

    texts, probs = ["", ""], [list[float](), list[float]()]
    ends: list[str | None] = [None, None]
    for chunk in events(server.http.post("/v1/infill", json={**body, "stream": True}).text):
        (part,) = chunk["choices"]
        assert ends[part["gap"]] is None
        assert part["gap"] == 0 or ends[0] is not None, "gaps keep their order"
        texts[part["gap"]] += part["text"]
        probs[part["gap"]] += part["logprobs"]["token_logprobs"]
        ends[part["gap"]] = part["finish_reason"]
    assert texts == [gap.text for gap in expected.gaps]
    assert ends == ["length", "length"]
    assert probs == [gap["logprobs"]["token_logprobs"] for gap in choice["gaps"]]


def test_refusals_name_the_field(server: ServerProcess) -> None:
    gap, d2f = {"tokens": 2}, {"decoding": "d2f"}
    mistakes: list[tuple[str, dict[str, Any], str]] = [
        ("/v1/completions", {"prompt": "a", "suffix": "b", **d2f}, "suffix"),
        ("/v1/completions", {"prompt": "a", "suffix": "b", "decoding": "lopa"}, "suffix"),
        ("/v1/completions", {"prompt": "a", "suffix": "b" * 600}, "suffix"),
        ("/v1/completions", {"prompt": "a", "suffix": "b", "max_tokens": 600}, "suffix"),
        ("/v1/completions", {"prompt": "a", "suffix": "b", "max_tokens": 0}, "max_tokens"),
        ("/v1/completions", {"prompt": "a", "suffix": "<|mask|>"}, "suffix"),
        ("/v1/completions", {"prompt": "a", "suffix": "b", "echo": True}, "echo"),
        ("/v1/completions", {"prompt": "a", "suffix": "b", "guided_regex": "x"}, "suffix"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "suffix": "b"}, "suffix"),
        ("/v1/infill", {"parts": [gap, "a"]}, "parts[0]"),
        ("/v1/infill", {"parts": ["a", gap, gap]}, "parts[2]"),
        ("/v1/infill", {"parts": ["a", "b"]}, "parts"),
        ("/v1/infill", {"parts": ["a", gap, ""]}, "parts[2]"),
        ("/v1/infill", {"parts": ["a", {"tokens": 0}]}, "parts[1].tokens"),
        ("/v1/infill", {"parts": ["a", {"tokens": 1, "max_tokens": 2}]}, "parts[1].max_tokens"),
        ("/v1/infill", {"parts": ["a", {"tokens": 600}]}, "parts"),
        ("/v1/infill", {"parts": ["a", gap], **d2f}, "parts"),
        ("/v1/infill", {"parts": ["a", gap], "guided_regex": "x"}, "parts"),
        ("/v1/infill", {"parts": ["a", gap], "prompt": "x"}, "prompt"),
        ("/v1/infill", {}, "parts"),
    ]
    for route, body, field in mistakes:
        error = refused(server.http.post(route, json=body))
        assert error["param"] == field, (body, error)
    message = refused(server.http.post("/v1/completions", json={"prompt": "a", "suffix": "b", **d2f}))["message"]
    assert 'use decoding "parallel"' in message
    assert json.dumps(message)
