"""Block-causal models, and LLaDA in block-causal windows, through the whole engine: branches, batches, compiled steps
and long prompts give the tokens of the plain decoding. Here a graph is the step as it is, not compiled."""

from __future__ import annotations

import random
from collections.abc import Callable
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
from lopa_ascend.types import GenerationOutput
from tests.e2e.batching import decisions, run
from tests.tiers import examples

GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "models"
MODELS = [
    str(GOLDEN / family / model)
    for family in ("sdar", "fastdllm2", "llada", "llada2")
    for model in ("model_a", "model_b")
]
FIELDS: dict[str, Any] = {"ignore_eos": True, "block_size": 8}
Asked = tuple[list[int], DecodingParams]


def engine(model: str, **options: Any) -> Engine:
    defaults = {"graph_mode": "eager", "kv_cache_memory": 2**25, "max_num_seqs": 4, "enable_prefix_caching": False}
    return Engine(EngineConfig(model=model, **{**defaults, **options}))


eager: Callable[[str], Engine] = cache(engine)


@cache
def compiled(model: str, branch_acceptance: str) -> Engine:
    shape = GraphParams(num_branches=3, block_size=8, branch_acceptance=branch_acceptance)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setup, "load_compiler", lambda *_, **__: Eager())
        return engine(model, graph_mode="inductor", graph_params=shape)


@st.composite
def requests(draw: st.DrawFn) -> list[Asked]:
    """Up to three prompts, each with settings of D2F."""
    asked = []
    for _ in range(draw(st.integers(1, 3))):
        prompt = draw(st.lists(st.integers(0, 100), min_size=1, max_size=40))
        params = DecodingParams(
            decoding="d2f",
            block_size=draw(st.sampled_from([4, 8])),
            max_new_tokens=draw(st.integers(1, 30)),
            tau_conf=draw(st.sampled_from([0.2, 0.5, 0.9])),
            tau_add=draw(st.sampled_from([0.1, 0.5, 1.0])),
            tau_act=draw(st.sampled_from([0.5, 1.0])),
            max_active_blocks=draw(st.sampled_from([None, 1, 2])),
            ignore_eos=draw(st.booleans()),
        )
        asked.append((prompt, params))
    return asked


def with_branches(asked: list[Asked], **fields: Any) -> list[Asked]:
    """The same requests under LoPA."""
    names = ("block_size", "max_new_tokens", "tau_conf", "tau_add", "tau_act", "max_active_blocks", "ignore_eos")
    own = [{name: getattr(params, name) for name in names} for _, params in asked]
    return [(prompt, DecodingParams(**{**old, **fields})) for (prompt, _), old in zip(asked, own, strict=True)]


def answers(outputs: list[GenerationOutput]) -> list[tuple[int, ...]]:
    return [output.token_ids for output in outputs]


@settings(max_examples=examples(8))
@given(model=st.sampled_from(MODELS), asked=requests(), depth=st.sampled_from([1, 2]))
def test_exact_branches_give_the_tokens_of_d2f(model: str, asked: list[Asked], depth: int) -> None:
    expected = run(eager(model), asked)
    exact = with_branches(asked, num_branches=3, branch_acceptance="exact", lookahead_depth=depth)
    outputs = run(eager(model), exact)
    assert answers(outputs) == answers(expected)
    saved = [base.num_forwards - output.num_forwards for base, output in zip(expected, outputs, strict=True)]
    assert min(saved) >= 0
    if depth == 1:
        assert answers(run(compiled(model, "exact"), exact)) == answers(expected)


@settings(max_examples=examples(8))
@given(model=st.sampled_from(MODELS), asked=requests(), kind=st.sampled_from(["published", "verified"]))
def test_compiled_steps_decide_as_eager_ones(model: str, asked: list[Asked], kind: str) -> None:
    asked = [*asked, *with_branches(asked, num_branches=3, branch_acceptance=kind)]
    served = compiled(model, kind)
    before = served.stats().graphs
    outputs, expected = run(served, asked), run(eager(model), asked)
    after = served.stats().graphs
    assert before is not None
    assert after is not None
    # In the first pass of a prompt of no whole block there is nothing to prefill.
    assert after.num_steps > before.num_steps or all(output.num_forwards == 1 for output in outputs)
    assert after.eager_steps == {}
    for one, other in zip(outputs, expected, strict=True):
        assert one.token_ids == other.token_ids
        assert [record.winner for record in one.trace or ()] == [record.winner for record in other.trace or ()]


@pytest.mark.parametrize("model", MODELS)
def test_neighbours_change_nothing(model: str) -> None:
    rng = random.Random(model)
    decodings: list[dict[str, Any]] = [{"decoding": "d2f", "denoising_steps": 3}, {"num_branches": 3}]
    if "/llada/" in model:
        decodings += [
            {"decoding": "parallel", "denoising_steps": 3},
            {"decoding": "fast_dllm", "block_cache": "dual", "acceptance": "factor"},
            {"base": "fast_dllm", "num_branches": 3},
        ]
    if "llada2" in model:
        editing = {"tau_add": 1.0, "editing_threshold": 0.2}
        decodings += [{"decoding": "d2f", **editing}, {"num_branches": 3, **editing}]
    if "fastdllm2" in model:
        decodings += [
            {"decoding": "fast_dllm_v2", "sub_block_size": 4},
            {"decoding": "fast_dllm_v2", "sub_block_size": 4, "sub_block_cache": True},
            {"base": "fast_dllm_v2", "sub_block_size": 4, "num_branches": 3},
        ]
    asked = []
    for fields in decodings:
        prompt = [rng.randrange(100) for _ in range(rng.randint(1, 50))]
        asked.append((prompt, DecodingParams(**FIELDS, **fields, max_new_tokens=rng.randint(5, 40), tau_conf=0.4)))
    alone = [run(eager(model), [one])[0] for one in asked]
    together = run(eager(model), asked, [rng.randrange(4) * bool(i) for i in range(len(asked))])
    assert [decisions(output) for output in together] == [decisions(output) for output in alone]


@pytest.mark.parametrize("model", MODELS)
def test_a_long_prompt_is_one_forward_pass_and_sampling_repeats(model: str) -> None:
    prompt = [token % 100 for token in range(301)]
    params = DecodingParams(**FIELDS, decoding="d2f", max_new_tokens=3, tau_conf=0.0, temperature=1.0, seed=1)
    served = engine(model, max_model_len=512)
    first, second = run(served, [(prompt, params), (prompt, params)])
    assert first.num_forwards == 1  # the 3 tokens lie in the block that the prompt's last 5 begin
    assert first.token_ids == second.token_ids
    assert served.stats().num_prefill_steps == 1
