"""Decoding of block-causal models on paper: the decisions of the published code, from the probabilities it recorded."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from lopa_ascend.config import DecodingParams
from lopa_ascend.decode import begin
from lopa_ascend.types import ModelProperties, RowPlan, RowResult

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
        trace["prompt_ids"],
        params_of(trace),
        trace["mask_token_id"],
        frozenset([trace["eos_token_id"]]),
        properties=properties,
    )
    for forward in (forward for forward in trace["trace"] if forward["fills"]):
        plan = strategy.plan()
        if plan is None:  # the published code fills the block of a stop token to its end
            break
        record = strategy.absorb(plan, [predicted(plan.rows[0], forward)], 0, 0)
        assert [[fill.position, fill.token] for fill in record.fills] == forward["fills"], forward["i"]
    answer = strategy.final_tokens()
    assert strategy.visible_is_final()
    assert answer == trace["output_ids"][: len(answer)]
    assert trace["output_ids"][len(answer) :][:1] in ([], [trace["eos_token_id"]])
