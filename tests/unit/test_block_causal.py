"""Decoding of block-causal models on paper: the decisions of the published code, from the probabilities it recorded."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lopa_ascend.admission import Limits
from lopa_ascend.config import DecodingParams, ParameterError
from lopa_ascend.config.errors import ContextLengthError
from lopa_ascend.decode import begin
from lopa_ascend.decode.strategy import SequenceStart
from lopa_ascend.types import DREAM, ModelProperties, RowPlan, RowResult
from tests.answers import final_tokens

GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "models"
FAMILIES = {
    "sdar": ModelProperties(logit_shift=0, attention="block_causal"),
    "fastdllm2": ModelProperties(logit_shift=1, attention="block_causal"),
}
TRACES = sorted(chain.from_iterable((GOLDEN / family).glob("*/trace.json") for family in FAMILIES))


def params_of(trace: dict[str, Any]) -> DecodingParams:
    published, length = trace["params"], len(trace["output_ids"])
    if trace["family"] == "fastdllm2":
        return DecodingParams(
            decoding="fast_dllm_v2",
            tau_conf=published["threshold"],
            sub_block_size=published.get("small_block_size", 8),
            sub_block_cache=published.get("use_block_cache", False),
            max_new_tokens=length,
        )
    strategy = published["remasking_strategy"].removeprefix("low_confidence_")
    return DecodingParams(
        decoding="d2f",
        block_size=published["block_length"],
        denoising_steps=published["denoising_steps"],
        acceptance="sequential" if strategy == "sequential" else "threshold",
        tau_conf=published["confidence_threshold"] if strategy == "dynamic" else 1.0,
        tau_add=1.0,
        max_new_tokens=length,
    )


def predicted(row: RowPlan, forward: dict[str, Any]) -> RowResult:
    """What the published pass predicted for a row. Passes that fill without a choice have recorded no probability."""
    found = {position: (token, prob) for position, token, prob in forward["masked"]}
    found |= {position: (token, 0.5) for position, token in forward["fills"] if not forward["masked"]}
    tokens, probs = zip(*(found[position] for position in row.masked), strict=True)
    return RowResult(tokens, probs, probs)


@pytest.mark.parametrize("path", TRACES, ids=lambda path: f"{path.parts[-3]}-{path.parts[-2]}")
def test_decisions_are_the_published_ones(path: Path) -> None:
    trace = json.loads(path.read_text())
    properties = FAMILIES[trace["family"]]
    strategy = begin(
        SequenceStart(
            trace["prompt_ids"],
            params_of(trace),
            trace["mask_token_id"],
            frozenset([trace["eos_token_id"]]),
            properties=properties,
        )
    )
    for forward in (forward for forward in trace["trace"] if forward["fills"]):
        plan = strategy.plan()
        if plan is None:  # the published code fills the block of a stop token to its end
            break
        record = strategy.absorb(plan, [predicted(plan.rows[0], forward)], 0, 0)
        assert [[fill.position, fill.token] for fill in record.fills] == forward["fills"], forward["i"]
    answer = final_tokens(strategy)
    assert strategy.visible_is_final()
    assert answer == trace["output_ids"][: len(answer)]
    assert trace["output_ids"][len(answer) :][:1] in ([], [trace["eos_token_id"]])


SDAR = FAMILIES["sdar"]
LIMITS = Limits(
    vocab_size=100,
    mask_token_id=99,
    max_model_len=100,
    num_pages=9,
    max_num_seqs=1,
    max_num_batched_tokens=100,
    max_num_branches=3,
    properties=SDAR,
)


@pytest.mark.parametrize(
    ("fields", "field", "choices"),
    [
        ({"decoding": "vanilla"}, "decoding", 'use "lopa" or "d2f"'),
        ({"decoding": "fast_dllm_v2"}, "decoding", 'predicts each position; use "lopa" or "d2f"'),
        ({"base": "parallel"}, "base", 'use "d2f"'),
        ({"window_attention": "full"}, "window_attention", 'use "block_causal"'),
    ],
)
def test_what_the_model_cannot_decode_is_refused_with_what_it_can(fields: dict, field: str, choices: str) -> None:
    with pytest.raises(ParameterError, match=choices) as error:
        LIMITS.check(5, DecodingParams(**fields, max_new_tokens=8))
    assert error.value.param == field


def test_fast_dllm_v2_does_not_go_with_a_model_of_full_attention() -> None:
    with pytest.raises(ParameterError, match='"lopa" or "d2f" or "parallel" or "vanilla" or "fast_dllm"$'):
        replace(LIMITS, properties=DREAM).check(5, DecodingParams(decoding="fast_dllm_v2", max_new_tokens=8))


def test_the_last_block_must_fit_whole() -> None:
    """96 of 100 positions can be used in blocks of 16: its 4 last ones are no block."""
    params = DecodingParams(decoding="d2f", block_size=16, max_new_tokens=91)
    LIMITS.check(5, params)
    assert LIMITS.room(5, 16) == 91
    with pytest.raises(ContextLengthError, match="leaves 91"):
        LIMITS.check(5, replace(params, max_new_tokens=92))


@given(
    prompt=st.integers(1, 70),
    longest=st.integers(1, 50),
    size=st.sampled_from([1, 3, 4, 16, 32]),
    shift=st.sampled_from([0, 1]),
    branches=st.integers(0, 3),
    data=st.data(),
)
def test_every_plan_keeps_to_the_grid(
    prompt: int, longest: int, size: int, shift: Literal[0, 1], branches: int, data: st.DataObject
) -> None:
    """And the answer is what fills the positions from the prompt's end on."""
    params = DecodingParams(
        decoding="lopa" if branches else "d2f",
        num_branches=branches,
        block_size=size,
        max_new_tokens=longest,
        tau_add=data.draw(st.sampled_from([0.1, 1.0])),
        ignore_eos=True,
    )
    properties = ModelProperties(logit_shift=shift, attention="block_causal")
    strategy = begin(SequenceStart(range(prompt), params, 999, frozenset(), properties=properties))
    assert (strategy.origin, strategy.limit % size) == (prompt // size * size, 0)
    while (plan := strategy.plan()) is not None:
        results = []
        for row in plan.rows:
            assert {end % size for end in row.entry_ends} == {0}
            assert all(end - begin == size for begin, end in pairwise((row.start, *row.entry_ends)))
            assert not row.masked or row.masked[0] >= prompt
            probs = tuple(data.draw(st.sampled_from([0.5, 0.95])) for _ in row.masked)
            results.append(RowResult(tuple(1000 + position for position in row.masked), probs, probs))
        strategy.absorb(plan, results, 0, 0)
    assert final_tokens(strategy) == [1000 + position for position in range(prompt, prompt + longest)]
