"""Every recorded trace of the published code, reproduced token for token and step by step."""

from __future__ import annotations

import functools

import pytest

from lopa_ascend import LLM
from tests import golden


@functools.cache
def model(path: str) -> LLM:
    return LLM(path, dtype="float32", enable_prefix_caching=False)


def generate(trace, **changes):
    params = golden.decoding_params(trace, **changes)
    return model(str(golden.model_path(trace))).generate([trace["prompt_ids"]], params, trace=True, quiet=True)[0]


@pytest.mark.parametrize("case", [case for case in golden.CASES if case != golden.MASK_CHOSEN])
def test_case(case: str) -> None:
    trace = golden.read(case)
    output = generate(trace)
    assert list(output.token_ids) == trace["output_ids"]
    assert output.num_forwards == trace["n_forward_rounds"]
    assert output.num_forwards + 1 == trace["reported_steps"]
    assert output.published_tokens_per_step == pytest.approx(trace["summary"]["tpf_reported"], abs=1e-4)
    expected = golden.rounds(trace)
    assert len(output.trace) == len(expected)
    for ours, theirs in zip(output.trace, expected, strict=True):
        assert ours.span == theirs["span"]
        assert ours.cache_length == theirs["cache_length"]
        assert ours.committed == theirs["committed"]
        assert ours.winner == theirs["winner"]
        assert [(fill.position, fill.token) for fill in ours.fills] == theirs["fills"]
        assert [branch.end for branch in ours.branches] == theirs["branch_ends"]


@pytest.mark.parametrize("case", [c for c in golden.CASES if c.startswith("lopa") and "forcebase" not in c])
def test_confidences(case: str) -> None:
    """Branch scores and the probabilities of what was filled, as recorded, to float32 rounding."""
    trace = golden.read(case)
    for ours, theirs in zip(generate(trace).trace, golden.rounds(trace), strict=True):
        assert [branch.score for branch in ours.branches] == pytest.approx(theirs["confidences"], abs=5e-5)
        recorded = {position: (prob, conf) for position, _, prob, conf in theirs["masked"]}
        for fill in ours.fills:
            assert (fill.max_prob, fill.confidence) == pytest.approx(recorded[fill.position], abs=2e-4)


def test_the_mask_is_never_produced() -> None:
    trace = golden.read(golden.MASK_CHOSEN)
    output = generate(trace)
    assert trace["mask_token_id"] not in output.token_ids
    assert len(output.token_ids) == len(trace["output_ids"])


@pytest.mark.parametrize("case", [case for case in golden.CASES if "eos" in case])
def test_finish_at_eos_changes_no_visible_token(case: str) -> None:
    trace = golden.read(case)
    whole, cut = generate(trace), generate(trace, finish_at_eos=True)
    visible = list(whole.token_ids)
    visible = visible[: visible.index(trace["eos_token_id"])]
    assert list(cut.token_ids) == visible
    assert cut.finish_reason == "stop"
    assert cut.num_forwards <= whole.num_forwards
