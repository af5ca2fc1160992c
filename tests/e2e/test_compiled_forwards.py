"""Compiled forward passes of causal models give what their passes give op by op, whatever a request asks."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from lopa_ascend import DecodingParams
from lopa_ascend.backend.compiler import Eager
from lopa_ascend.config import EngineConfig, GraphParams
from lopa_ascend.core import Request
from lopa_ascend.engine.engine import Engine
from lopa_ascend.graph import setup
from lopa_ascend.types import GraphStats

GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "models"
BLOCKS: dict[str, Any] = {"block_size": 8, "sub_block_size": 8, "tau_conf": 0.3, "ignore_eos": True}
SAMPLED: dict[str, Any] = {"temperature": 0.8, "seed": 5, "top_logprobs": 3, "repetition_penalty": 1.2}


def asked(*lengths: int) -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(12, 99) for _ in range(length)] for length in lengths]


def answers(model: str, ways: list[dict[str, Any]], mode: str, compiled: int) -> tuple[list[Any], GraphStats | None]:
    """The tokens of a batch of one request for each way, and what compiled passes did.

    Args:
        compiled: the way that passes are compiled for.
    """
    params = [DecodingParams(**way) for way in ways]
    options: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 256, "dtype": "float32", "kv_cache_memory": 2**24}
    graph_params = GraphParams.of(params[compiled])
    path = str(GOLDEN / model / "model_a")
    engine = Engine(EngineConfig(model=path, graph_mode=mode, graph_params=graph_params, **options))
    for name, prompt, each in zip("abcd", asked(5, 130, 60, 9), params, strict=False):
        engine.add(Request(name, tuple(prompt), each))
    tokens: dict[str, list[int]] = {}
    while engine.has_work():
        for update in engine.step():
            assert update.error is None
            tokens.setdefault(update.request_id, []).extend(update.token_ids)
    return sorted(tokens.items()), engine.stats().graphs


@pytest.mark.parametrize("model", ["nemotron", "pangu"])
@pytest.mark.parametrize("compiled", range(3))
def test_a_batch_of_all_kinds(model: str, compiled: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup, "load_compiler", lambda *_, **__: Eager())
    ways: list[dict[str, Any]] = [
        {"decoding": "ar", "max_new_tokens": 20, "ignore_eos": True},
        {"decoding": "causal_blocks", "max_new_tokens": 40, **BLOCKS},
        {"decoding": "lopa", "base": "causal_blocks", "num_branches": 3, "max_new_tokens": 40, **BLOCKS},
        {"decoding": "causal_blocks", "max_new_tokens": 37, **BLOCKS, **SAMPLED},
    ]
    expected, _ = answers(model, ways, "eager", compiled)
    found, stats = answers(model, ways, "inductor", compiled)
    assert found == expected
    assert stats is not None
    assert stats.num_steps > 0
    # Among rows of lengths that are not compiled is the last block of an answer of 37 positions.
    assert stats.eager_steps["block_size"] > 0
    assert stats.padded_tokens < stats.tokens


def test_passes_that_draft_have_the_weights_of_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a batch with requests that draft op by op, beside branches, and others that do not draft."""
    monkeypatch.setattr(setup, "load_compiler", lambda *_, **__: Eager())
    ways: list[dict[str, Any]] = [
        {"decoding": "linear_spec", "max_new_tokens": 40, "block_size": 8, "ignore_eos": True},
        {"decoding": "linear_spec", "max_new_tokens": 30, "block_size": 8, "ignore_eos": True, **SAMPLED},
        {"decoding": "lopa", "base": "linear_spec", "max_new_tokens": 40, "block_size": 8, "ignore_eos": True},
        {"decoding": "ar", "max_new_tokens": 20, "ignore_eos": True},
    ]
    expected, _ = answers("orthrus", ways, "eager", 0)
    found, stats = answers("orthrus", ways, "inductor", 0)
    assert found == expected
    assert stats is not None
    assert stats.num_steps > 20


def test_a_compiled_pass_of_each_kind() -> None:
    ways: list[dict[str, Any]] = [{"decoding": "causal_blocks", "max_new_tokens": 24, **BLOCKS, **SAMPLED}]
    expected, _ = answers("nemotron", ways, "eager", 0)
    found, stats = answers("nemotron", ways, "inductor", 0)
    assert found == expected
    assert stats is not None
    assert (stats.num_buckets, stats.num_late, stats.eager_steps) == (4, 0, {})
    assert stats.num_steps > 3
