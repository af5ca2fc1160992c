"""Branches over the tokens of one position: which position, which tokens, and how they are scored."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lopa_ascend.config import DecodingParams, ParameterError
from lopa_ascend.decode import begin
from lopa_ascend.decode.strategy import SequenceStart, Strategy
from lopa_ascend.types import Alternatives, RowPlan, RowResult, SequencePlan, StepRecord
from tests import research
from tests.answers import final_tokens

EOS, MASK = 3, 99


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    with research.registered():
        yield


def absorb(
    strategy: Strategy, plan: SequencePlan, results: list[RowResult], tokens: Callable[[int], Alternatives]
) -> StepRecord:
    """Takes a pass, and records the most probable ``tokens`` of positions as the engine does."""
    record = strategy.absorb(plan, results, 0, 0)
    assert strategy.recorded_positions() <= set(plan.rows[record.winner].masked)
    strategy.take_alternatives({position: tokens(position) for position in strategy.recorded_positions()})
    return record


def started(rows: list[tuple[float, Alternatives]], **changes: Any) -> Strategy:
    """After a first pass over one block.

    Args:
        rows: for each position the entropy and the most probable tokens.
    """
    fields = {"block_size": len(rows), "max_new_tokens": len(rows), "tau_conf": 1.0, "num_branches": 2, **changes}
    params = DecodingParams.of(decoding="pivot", top_logprobs=2, **fields)
    strategy = begin(SequenceStart([1], params, MASK, frozenset([EOS])))
    plan = strategy.plan()
    assert plan is not None
    best = [tokens[0] for _, tokens in rows]
    result = RowResult(
        tuple(token for token, _ in best), tuple(prob for _, prob in best), tuple(-entropy for entropy, _ in rows)
    )
    absorb(strategy, plan, [result], lambda position: rows[position - 1][1])
    return strategy


def drafts(strategy: Strategy) -> list[tuple[int, int, float] | None]:
    """Position, token and probability of each branch's own token in the next pass."""
    assert strategy.plan() is not None
    fills = [branch.lookahead for branch in strategy.branches]
    return [None if fill is None else (fill.position, fill.token, fill.max_prob) for fill in fills]


SURE: tuple[float, Alternatives] = (0.1, ((10, 0.995), (11, 0.003)))
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
    results = [with_entropies(row, lambda position: float(position)) for row in plan.rows]
    absorb(strategy, plan, results, lambda _: ((10, 0.5), (11, 0.45)))
    assert strategy.plan() is not None
    assert {branch.lookahead.position for branch in strategy.branches if branch.lookahead} == {4}


def with_entropies(row: RowPlan, entropy: Callable[[int], float]) -> RowResult:
    """Equal predictions at all positions, but for the entropy."""
    count = len(row.masked)
    return RowResult((10,) * count, (0.5,) * count, tuple(-entropy(position) for position in row.masked))


def test_a_token_that_ends_the_answer_is_tried_only_if_it_is_the_best_one() -> None:
    second = [SURE, (1.0, ((20, 0.6), (EOS, 0.35)))]
    assert drafts(started(second, creation_weight=0.1)) == [(2, 20, 0.6), None]
    best = [SURE, (1.0, ((EOS, 0.6), (20, 0.35)))]
    assert drafts(started(best)) == [(2, EOS, 0.6), (2, 20, 0.35), None]
    assert drafts(started(second, ignore_eos=True)) == [(2, 20, 0.6), (2, EOS, 0.35), None]
    missing = [SURE, (1.0, ((20, 0.99),))]
    assert drafts(started(missing)) == [(2, 20, 0.99), None], "there is no second token"


def test_score() -> None:
    """The mean of the negative entropies of the other positions, and a tenth of the logarithm of the probability."""
    rows = [SURE, (1.0, ((20, 0.6), (21, 0.35))), (0.9, SURE[1]), (0.8, SURE[1])]
    strategy = started(rows, pivot_weight=0.1)
    plan = strategy.plan()
    assert plan is not None
    assert [row.masked for row in plan.rows] == [(3, 4), (3, 4), (2, 3, 4)]
    entropies = [{3: 0.5, 4: 0.25}, {3: 0.25, 4: 0.25}, {2: 9.0, 3: 0.375, 4: 0.375}]
    results = [with_entropies(row, of.__getitem__) for row, of in zip(plan.rows, entropies, strict=True)]
    record = strategy.absorb(plan, results, 0, 0)
    expected = [-0.375 + 0.1 * math.log(0.6), -0.25 + 0.1 * math.log(0.35), -0.375]
    assert [branch.score for branch in record.branches] == pytest.approx(expected, abs=1e-4)
    assert record.winner == 1


def test_the_last_mask_is_not_filled_without_a_pass() -> None:
    """A branch without masks commits to a token, and the anchor to none."""
    strategy = started([SURE, (1.0, ((20, 0.6), (21, 0.35)))])
    plan = strategy.plan()
    assert plan is not None
    assert [row.masked for row in plan.rows] == [(), (), (2,)]
    record = strategy.absorb(plan, [with_entropies(row, lambda position: 1.0) for row in plan.rows], 0, 0)
    assert record.winner == 2
    assert final_tokens(strategy) == [10, 10]


@pytest.mark.parametrize(
    ("values", "field", "message"),
    [
        ({"top_logprobs": 2}, "top_logprobs", "2 is less than the 3 branches, each of which tries a token"),
        ({"confidence": "margin"}, "confidence", '"margin" does not go with decoding "pivot", which uses'),
        ({"temperature": 0.5}, "temperature", 'must be 0 with decoding "pivot", got 0.5'),
        ({"bad_words": [[5]]}, "bad_words", 'does not go with decoding "pivot"'),
        ({"min_new_tokens": 4}, "min_new_tokens", 'does not go with decoding "pivot"'),
        ({"branch_acceptance": "exact"}, "branch_acceptance", '"exact" does not go with decoding "pivot"'),
        ({"pivot_mass": 1.5}, "pivot_mass", "must be a number from 0 to 1, got 1.5"),
    ],
)
def test_what_does_not_go_with_branches_over_tokens(values: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(ParameterError) as error:
        DecodingParams.of(**{"decoding": "pivot", "num_branches": 3, "top_logprobs": 3, **values})
    assert error.value.param == field
    assert message in str(error.value)
