"""Branches over the tokens of one position: which position, which tokens, and how they are scored."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lopa_ascend.config import DecodingParams, ParameterError
from lopa_ascend.decode import begin
from lopa_ascend.decode.strategy import Strategy
from lopa_ascend.types import RowPlan, RowResult
from tests.tiers import examples
from tests.unit import test_verified as verified
from tests.unit.test_verified import EOS, MASK, setups

Candidates = tuple[tuple[int, float], ...]


def started(rows: list[tuple[float, Candidates]], **changes: Any) -> Strategy:
    """After a first pass over one block.

    Args:
        rows: for each position the entropy and the candidates.
    """
    fields = {"block_size": len(rows), "max_new_tokens": len(rows), "tau_conf": 1.0, "num_branches": 2, **changes}
    strategy = begin([1], DecodingParams(branch_candidates="tokens", **fields), MASK, frozenset([EOS]))
    plan = strategy.plan()
    assert plan is not None
    best = [candidates[0] for _, candidates in rows]
    result = RowResult(
        tuple(token for token, _ in best),
        tuple(prob for _, prob in best),
        tuple(-entropy for entropy, _ in rows),
        tuple(candidates for _, candidates in rows),
    )
    strategy.absorb(plan, [result], 0, 0)
    return strategy


def drafts(strategy: Strategy) -> list[tuple[int, int, float] | None]:
    """Position, token and probability of each branch's own token."""
    fills = [branch.lookahead for branch in strategy.branches]
    return [None if fill is None else (fill.position, fill.token, fill.max_prob) for fill in fills]


SURE: tuple[float, Candidates] = (0.1, ((10, 0.995), (11, 0.003)))
"""What the pass fills."""


def test_the_pivot_is_the_most_uncertain_position_with_enough_mass() -> None:
    rows = [SURE, (1.0, ((20, 0.6), (21, 0.35))), (1.5, ((30, 0.5), (31, 0.42))), (2.0, ((40, 0.4), (41, 0.3)))]
    assert drafts(started(rows)) == [(3, 30, 0.5), (3, 31, 0.42), None]
    assert drafts(started(rows, pivot_mass=0.7)) == [(4, 40, 0.4), (4, 41, 0.3), None]
    assert drafts(started(rows, pivot_mass=0.94)) == [(2, 20, 0.6), (2, 21, 0.35), None]
    assert drafts(started(rows, pivot_mass=0.96)) == [None]
    equal = [SURE, rows[1], (1.0, ((30, 0.6), (31, 0.35)))]
    assert drafts(started(equal)) == [(2, 20, 0.6), (2, 21, 0.35), None], "the earliest among equals"


def test_the_pivot_lies_in_the_first_block_with_masks() -> None:
    rows = [SURE, SURE, (1.0, ((20, 0.6), (21, 0.35))), (0.9, ((20, 0.6), (21, 0.35)))]
    strategy = started(rows, block_size=4, max_new_tokens=8, tau_add=0.25)
    plan = strategy.plan()
    assert plan is not None
    assert plan.rows[-1].masked == (2, 3, 4, 5, 6, 7, 8), "the second block is open, and more uncertain"
    results = [with_candidates(row, lambda position: float(position)) for row in plan.rows]
    strategy.absorb(plan, results, 0, 0)
    assert {branch.lookahead.position for branch in strategy.branches if branch.lookahead} == {4}


def with_candidates(row: RowPlan, entropy: Any) -> RowResult:
    """Equal predictions at all positions, but for the entropy."""
    count = len(row.masked)
    candidates = ((10, 0.5), (11, 0.45))
    entropies = tuple(-entropy(position) for position in row.masked)
    return RowResult((10,) * count, (0.5,) * count, entropies, (candidates,) * count)


def test_a_token_that_ends_the_answer_is_tried_only_if_it_is_the_best_one() -> None:
    second = [SURE, (1.0, ((20, 0.6), (EOS, 0.35)))]
    assert drafts(started(second)) == [(2, 20, 0.6), None]
    best = [SURE, (1.0, ((EOS, 0.6), (20, 0.35)))]
    assert drafts(started(best)) == [(2, EOS, 0.6), (2, 20, 0.35), None]
    assert drafts(started(second, ignore_eos=True)) == [(2, 20, 0.6), (2, EOS, 0.35), None]
    missing = [SURE, (1.0, ((20, 0.99), (0, 0.0)))]
    assert drafts(started(missing)) == [(2, 20, 0.99), None], "there is no second token"


def test_score() -> None:
    """The mean of the negative entropies of the other positions, and a tenth of the logarithm of the probability."""
    rows = [SURE, (1.0, ((20, 0.6), (21, 0.35))), (0.9, SURE[1]), (0.8, SURE[1])]
    strategy = started(rows, branch_score="pivot", pivot_weight=0.1)
    plan = strategy.plan()
    assert plan is not None
    assert [row.masked for row in plan.rows] == [(3, 4), (3, 4), (2, 3, 4)]
    entropies = [{3: 0.5, 4: 0.25}, {3: 0.25, 4: 0.25}, {2: 9.0, 3: 0.375, 4: 0.375}]
    results = [with_candidates(row, of.__getitem__) for row, of in zip(plan.rows, entropies, strict=True)]
    record = strategy.absorb(plan, results, 0, 0)
    expected = [-0.375 + 0.1 * math.log(0.6), -0.25 + 0.1 * math.log(0.35), -0.375]
    assert [branch.score for branch in record.branches] == pytest.approx(expected, abs=1e-4)
    assert record.winner == 1


def test_the_last_mask_is_not_filled_without_a_pass() -> None:
    """A branch without masks commits to a token, and the anchor to none."""
    strategy = started([SURE, (1.0, ((20, 0.6), (21, 0.35)))], branch_score="pivot")
    plan = strategy.plan()
    assert plan is not None
    assert [row.masked for row in plan.rows] == [(), (), (2,)]
    record = strategy.absorb(plan, [with_candidates(row, lambda position: 1.0) for row in plan.rows], 0, 0)
    assert record.winner == 2
    assert strategy.final_tokens() == [10, 10]
    assert started([SURE, (1.0, ((20, 0.6), (21, 0.35)))]).plan() is None, '"mean" scores it 1'


tokens: dict[str, Any] = {"branch_candidates": "tokens", "pivot_mass": 0.0}


@settings(max_examples=examples(100))
@given(setups, st.integers(0, 10**6))
def test_exact_is_d2f(setup: dict, seed: int) -> None:
    expected = verified.decoded(setup, seed, decoding="d2f", num_branches=0)
    exact = verified.decoded({**setup, **tokens}, seed, branch_acceptance="exact")
    assert exact[:2] == expected[:2]
    assert exact[2] <= expected[2]


@settings(max_examples=examples(100))
@given(setups, st.integers(0, 10**6))
def test_verified_tokens_passed_the_rule(setup: dict, seed: int) -> None:
    setup = {**setup, **tokens}
    params = DecodingParams(**setup, branch_acceptance="verified")
    for _, plan, results, record in verified.run(setup, seed, branch_acceptance="verified"):
        fills = record.branches[record.winner].own_fills
        own = {(fill.position, fill.token) for fill in fills}
        assert verified.added(plan.rows[record.winner], plan.rows[-1]) == own
        assert own <= verified.rule(params, plan.rows[-1], results[-1])
        filled = {(fill.position, fill.token) for fill in record.fills}
        assert filled == verified.rule(params, plan.rows[record.winner], results[record.winner])


def test_confirmed_tokens_win() -> None:
    setup: dict[str, Any] = {"num_branches": 3, "block_size": 8, "max_new_tokens": 40, "tau_conf": 0.8}
    wins = 0
    for seed in range(20):
        for _, plan, _, record in verified.run({**setup, **tokens}, seed, branch_acceptance="verified"):
            wins += record.winner < len(plan.rows) - 1
    assert wins > 10


@pytest.mark.parametrize(
    ("values", "field", "message"),
    [
        ({"branch_score": "pivot"}, "branch_score", '"pivot" needs branch_candidates "tokens", got "positions"'),
        (
            {**tokens, "confidence": "margin"},
            "branch_candidates",
            '"tokens" needs confidence "max_prob" or "neg_entropy", got "margin"',
        ),
        ({**tokens, "temperature": 0.5}, "branch_candidates", '"tokens" needs temperature 0, got 0.5'),
        (
            {**tokens, "branch_acceptance": "exact", "lookahead_depth": 2},
            "branch_candidates",
            '"tokens" does not go with lookahead_depth 2; use 1, or "positions"',
        ),
    ],
)
def test_what_does_not_go_with_branches_over_tokens(values: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(ParameterError) as error:
        DecodingParams(**values)
    assert error.value.param == field
    assert message in str(error.value)


def test_only_branches_over_tokens_ask_for_candidates() -> None:
    assert DecodingParams().num_candidates == 0
    assert DecodingParams(branch_candidates="tokens", num_branches=5).num_candidates == 5
    assert DecodingParams(branch_candidates="tokens", num_branches="auto").num_candidates == 7
    assert DecodingParams(branch_candidates="tokens", decoding="d2f").num_candidates == 0
    assert DecodingParams(branch_candidates="tokens").ranking == "neg_entropy"
    assert DecodingParams(branch_candidates="tokens", decoding="d2f", temperature=0.5).ranking == "max_prob"
