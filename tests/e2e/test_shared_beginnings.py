"""Block-causal models compute a common beginning of prompts once, and answer as without the cache."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from lopa_ascend import DecodingParams
from lopa_ascend.config import EngineConfig
from lopa_ascend.engine.engine import Engine
from tests.e2e.batching import run

GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "models"
DECODINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "sdar": ("sdar/model_a", {"decoding": "d2f", "block_size": 4, "tau_add": 1.0}),
    "lopa": ("sdar/model_b", {"num_branches": 3, "block_size": 8, "branch_acceptance": "exact"}),
    "fast_dllm_v2": ("fastdllm2/model_b", {"decoding": "fast_dllm_v2"}),
    "sub_block_cache": ("fastdllm2/model_a", {"decoding": "fast_dllm_v2", "sub_block_cache": True}),
}


@cache
def plain(model: str) -> Engine:
    return Engine(EngineConfig(model=str(GOLDEN / model), enable_prefix_caching=False))


@pytest.mark.parametrize("name", DECODINGS)
def test_a_system_prompt_is_computed_once(name: str) -> None:
    """Four prompts of 200 common tokens, and one that is a whole number of blocks; then the next turn of the first."""
    model, fields = DECODINGS[name]
    params = DecodingParams(**fields, max_new_tokens=30, tau_conf=0.5, ignore_eos=True)
    size = params.block_size
    engine = Engine(EngineConfig(model=str(GOLDEN / model)))
    rng = random.Random(name)
    system = [rng.randrange(100) for _ in range(200)]
    prompts = [[*system, *[rng.randrange(100) for _ in range(length)]] for length in (7, 60, 1, 130)]
    prompts.append(system[: 200 // size * size])
    (first,) = run(engine, [(prompts[0], params)])
    outputs = [first, *run(engine, [(prompt, params) for prompt in prompts[1:]], [0, 1, 1, 5])]
    turn = [*prompts[0], *first.token_ids, 3, 4]
    prompts.append(turn)
    outputs += run(engine, [(turn, params)])
    shared = 200 // size * size
    last = shared if "sdar" in model else shared - size  # with shifted logits the last block predicts the first token
    assert [output.cached_tokens for output in outputs[:5]] == [0, shared, shared, shared, last]
    assert outputs[5].cached_tokens >= (len(prompts[0]) + 30) // size * size - size
    for prompt, output in zip(prompts, outputs, strict=True):
        (expected,) = run(plain(model), [(prompt, params)])
        assert output.token_ids == expected.token_ids
        assert output.num_forwards <= expected.num_forwards
        assert expected.model_tokens - output.model_tokens >= output.cached_tokens
    stats = engine.stats()
    assert stats.prefix_queries == sum(map(len, prompts))
    assert stats.prefix_hits == sum(output.cached_tokens for output in outputs)
    assert not stats.pages_in_use
