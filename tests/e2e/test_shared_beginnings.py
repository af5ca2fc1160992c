"""Block-causal models compute a common beginning of prompts once, and answer as without the cache."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lopa_ascend import DecodingParams
from lopa_ascend.backend.compiler import Eager
from lopa_ascend.config import EngineConfig, GraphParams
from lopa_ascend.engine.engine import Engine
from lopa_ascend.graph import setup
from tests.e2e.batching import run
from tests.tiers import examples

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


@cache
def engines(model: str) -> tuple[Engine, Engine]:
    """One with the cache and compiled steps, which are launched ahead of the host; one without both."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setup, "load_compiler", lambda *_, **__: Eager())
        options: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 512, "graph_params": GraphParams(block_size=8)}
        return Engine(EngineConfig(model=str(GOLDEN / model), graph_mode="inductor", **options)), plain(model)


turns = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 300), st.integers(1, 40)), min_size=1, max_size=6)


@settings(max_examples=examples(5))
@given(model=st.sampled_from(["sdar/model_a", "fastdllm2/model_b"]), asked=turns, num_branches=st.sampled_from([0, 3]))
def test_compiled_steps_go_on_from_cached_blocks(
    model: str, asked: list[tuple[int, int, int]], num_branches: int
) -> None:
    """Prompts that begin like earlier ones, or go on from their answers."""
    cached, uncached = engines(model)
    kind = {"decoding": "d2f"} if not num_branches else {"num_branches": num_branches}
    texts = [[3] * 400, [3] * 100 + [5] * 300]
    for which, length, new in asked:
        prompt = texts[which % len(texts)][: length + 1]
        params = DecodingParams(**kind, block_size=8, max_new_tokens=new, tau_conf=0.4, ignore_eos=True)
        (ours,), (theirs,) = run(cached, [(prompt, params)]), run(uncached, [(prompt, params)])
        assert ours.token_ids == theirs.token_ids
        texts.append([*prompt, *ours.token_ids, 7, 8])
    assert not cached.stats().pages_in_use
