"""S2D2: whatever is drafted, always checked it is decoding of one position at a time, and with causal keys and values
the model's own autoregressive decoding."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from lopa_ascend import LLM, DecodingParams, ParameterError
from lopa_ascend.config import EngineConfig
from lopa_ascend.engine.engine import Engine
from tests import drafting, llada2_reference, reference
from tests.e2e.batching import decisions, run
from tests.tiers import examples

GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "models"
FAST = "fast2_b"
MODELS = [f"s2d2/{name}" for name in ("sdar_a", "sdar_b", FAST)] + ["llada2/model_a", "diffcoder/model_b"]


@pytest.fixture(scope="module", autouse=True)
def others() -> Iterator[None]:
    with drafting.registered():
        yield


@cache
def engine(model: str, **options: Any) -> Engine:
    defaults = {"graph_mode": "eager", "kv_cache_memory": 2**25, "max_num_seqs": 4, "enable_prefix_caching": False}
    return Engine(EngineConfig(model=str(GOLDEN / model), dtype="float32", **{**defaults, **options}))


def params(model: str, decoding: str = "s2d2", **fields: Any) -> DecodingParams:
    if not model.endswith(FAST):
        return DecodingParams(decoding=decoding, **fields)
    if decoding != "s2d2":
        return DecodingParams(decoding=f"{decoding}_v2", **fields)
    return DecodingParams(decoding="s2d2", base="fast_dllm_v2", **fields)


@st.composite
def requests(draw: st.DrawFn) -> list[tuple[list[int], dict[str, Any]]]:
    """Up to three prompts, each with settings; some blocks lie in two pages."""
    asked = []
    for _ in range(draw(st.integers(1, 3))):
        length = draw(st.one_of(st.integers(1, 40), st.integers(110, 135)))
        prompt = [draw(st.integers(6, 100)) for _ in range(3)] * length
        fields: dict[str, Any] = {
            "max_new_tokens": draw(st.integers(1, 40)),
            "block_size": draw(st.sampled_from([4, 8, 16])),
            "window_attention": draw(st.sampled_from(["block_causal", "causal"])),
            "temperature": draw(st.sampled_from([0.0, 0.0, 1.0])),
            "seed": draw(st.integers(0, 99)),
            "bad_words": draw(st.sampled_from([(), ((7, 8), (42,)), ((21, 21), (61, 46))])),
            "repetition_penalty": draw(st.sampled_from([1.0, 1.3])),
            "min_new_tokens": draw(st.sampled_from([0, 1])),
            "ignore_eos": draw(st.booleans()),
            "top_logprobs": draw(st.sampled_from([0, 2])),
        }
        asked.append((prompt[:length], fields))
    return asked


@settings(max_examples=examples(6))
@given(model=st.sampled_from(MODELS), asked=requests(), caching=st.booleans(), sub_block=st.sampled_from([4, 16, 32]))
def test_always_checked_drafts_change_no_token(
    model: str, asked: list[tuple[list[int], dict[str, Any]]], caching: bool, sub_block: int
) -> None:
    if model.endswith(FAST):
        asked = [(prompt, {**fields, "block_size": 32, "sub_block_size": sub_block}) for prompt, fields in asked]
    found = {
        decoding: run(
            engine(model, enable_prefix_caching=caching), [(p, params(model, decoding, **f)) for p, f in asked]
        )
        for decoding in ("undrafted", "s2d2", "misled")
    }
    for plain, drafted, misled in zip(*found.values(), strict=True):
        assert drafted.token_ids == misled.token_ids == plain.token_ids
        assert drafted.max_probs == misled.max_probs == plain.max_probs
        assert [len(each) for each in (drafted.alternatives, misled.alternatives)] == [len(plain.alternatives)] * 2
        assert drafted.num_forwards <= plain.num_forwards


def texts(*lengths: int) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(6, 100) for _ in range(length)] for length in lengths]


def answers(model: str, prompts: list[list[int]], **fields: Any) -> list[list[int]]:
    asked = [(prompt, params(model, max_new_tokens=24, ignore_eos=True, **fields)) for prompt in prompts]
    return [list(output.token_ids) for output in run(engine(model), asked)]


@pytest.mark.parametrize("attention", ["causal", "block_causal"])
def test_each_token_is_the_model_s_next_one_behind_the_tokens_before_it(attention: str) -> None:
    """By a dense forward pass for each token: over causal keys and values, and over those of whole blocks."""
    model, size = "llada2/model_a", 8
    config = json.loads((GOLDEN / model / "config.json").read_text())
    tensors, mask = load_file(GOLDEN / model / "model.safetensors"), config["mask_token_id"]
    prompts = texts(5, 16)
    for prompt, answer in zip(
        prompts, answers(model, prompts, block_size=size, window_attention=attention), strict=True
    ):
        for number, token in enumerate(answer):
            seen = [*prompt, *answer[:number], mask]
            begin = 0 if attention == "causal" else (len(seen) - 1) // size * size
            row = llada2_reference.logits(config, tensors, seen, size, causal_from=begin)[-1]
            row[mask] = -torch.inf
            assert token == row.argmax()


def test_over_causal_keys_and_values_it_is_the_autoregressive_model() -> None:
    model = f"s2d2/{FAST}"
    dense, mask = (
        reference.load(GOLDEN / model),
        json.loads((GOLDEN / model / "config.json").read_text())["mask_token_id"],
    )
    prompts = texts(7, 32, 40)
    causal = answers(model, prompts, block_size=32, window_attention="causal")
    for prompt, answer in zip(prompts, causal, strict=True):
        with torch.no_grad():
            rows = dense(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        rows[:, mask] = -torch.inf
        assert answer == rows.argmax(-1).tolist()
    assert answers(model, prompts, block_size=32) != causal, "blocks that are final have seen both directions"


def test_neighbours_change_no_bit_and_cached_prompts_no_token() -> None:
    for model in ("s2d2/sdar_a", "s2d2/fast2_b"):
        size = 32 if model.endswith(FAST) else 16
        ways: list[dict[str, Any]] = [
            {"window_attention": "causal"},
            {"routing": "score"},
            {"routing": "run", "routing_run": 3, "tau_conf": 0.4},
        ]
        asked = [
            (prompt, params(model, max_new_tokens=40, ignore_eos=True, block_size=size, **way))
            for prompt, way in zip(texts(120, 130, 20), ways, strict=True)
        ]
        alone = [run(engine(model), [each])[0] for each in asked]
        together = run(engine(model), asked, [0, 2, 5])
        assert list(map(decisions, together)) == list(map(decisions, alone))
        cached = engine(model, enable_prefix_caching=True)
        run(cached, asked)
        again = run(cached, asked)
        assert min(output.cached_tokens for output in again[:2]) >= 96
        assert [output.token_ids for output in again] == [output.token_ids for output in alone]
        assert cached.stats().pages_in_use == 0


def test_passes_name_their_drafts_and_how_many_hold() -> None:
    fields: dict[str, Any] = {
        "max_new_tokens": 32,
        "ignore_eos": True,
        "block_size": 8,
        "top_logprobs": 2,
        "denoising_steps": 4,
    }
    (output,) = run(engine("s2d2/sdar_a"), [(texts(9)[0], params("s2d2/sdar_a", **fields))])
    assert output.trace is not None
    checks = [record for record in output.trace if record.accepted is not None]
    assert sum(len(record.drafted) for record in checks) > 0
    for before, record in zip(output.trace, output.trace[1:], strict=False):
        if record.accepted is None:
            continue
        assert (before.drafted, before.fills) == (record.drafted, ())
        held = [(fill.position, fill.token) for fill in record.drafted[: record.accepted]]
        assert held == [(fill.position, fill.token) for fill in record.fills][: record.accepted]
    for token, alternatives in zip(output.token_ids, output.alternatives, strict=True):
        assert token == alternatives[0][0], "those of the pass that wrote the token"


@pytest.mark.parametrize(
    ("model", "fields", "param"),
    [
        ("s2d2/sdar_a", {"editing_threshold": 0.5}, "editing_threshold"),
        ("s2d2/sdar_a", {"window_attention": "full"}, "window_attention"),
        ("s2d2/sdar_a", {"base": "fast_dllm_v2"}, "base"),
        ("s2d2/sdar_a", {"routing_run": 3}, "routing_run"),
        ("s2d2/fast2_b", {"base": "d2f"}, "base"),
        ("s2d2/fast2_b", {"base": "fast_dllm_v2", "denoising_steps": 2}, "denoising_steps"),
        ("s2d2/fast2_b", {"base": "fast_dllm_v2", "sub_block_cache": True}, "sub_block_cache"),
        ("llada/model_a", {}, "decoding"),
        ("nemotron/model_a", {}, "decoding"),
    ],
)
def test_what_breaks_it_is_refused_by_name(model: str, fields: dict[str, Any], param: str) -> None:
    with LLM(GOLDEN / model, dtype="float32") as llm, pytest.raises(ParameterError) as refused:
        llm.generate([[7, 8, 9]], DecodingParams(**{"decoding": "s2d2", "max_new_tokens": 8, **fields}), quiet=True)
    assert refused.value.param == param


def test_given_texts_are_scored_as_blocks_see_them_or_not_at_all() -> None:
    assert params("s2d2/sdar_a").for_continuations(4).decoding == "d2f"
    with pytest.raises(ParameterError) as refused:
        params("s2d2/sdar_a", window_attention="causal").for_continuations(4)
    assert refused.value.param == "window_attention"
