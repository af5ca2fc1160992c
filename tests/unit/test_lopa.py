"""Branch scores and the choice of the winner, exactly."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from lopa_ascend.config import DecodingParams
from lopa_ascend.decode import begin
from lopa_ascend.decode.branch_scores import SCALE, ScoreParams, branch_score, fixed_point
from lopa_ascend.decode.strategy import SequenceStart
from lopa_ascend.types import RowResult

confidences = st.lists(st.floats(-12, 1, width=32), min_size=1, max_size=40)


@given(confidences)
def test_mean(values: list[float]) -> None:
    assert branch_score(values, ScoreParams()) == (sum(map(fixed_point, values)), len(values))


@given(confidences, st.floats(0, 1))
def test_tail_is_the_mean_of_the_least_confident(values: list[float], fraction: float) -> None:
    total, count = branch_score(values, ScoreParams(branch_score="tail", tail_fraction=fraction))
    assert count == max(1, int(len(values) * fraction))
    assert total == sum(sorted(map(fixed_point, values))[:count])


@given(confidences, st.integers(1, 12))
def test_window_is_the_lowest_mean_of_consecutive_ones(values: list[float], size: int) -> None:
    total, count = branch_score(values, ScoreParams(branch_score="window", score_window=size))
    whole = [fixed_point(v) for v in values]
    windows = [whole[i : i + size] for i in range(len(whole) - size + 1)] or [whole]
    assert Fraction(total, count) == min(Fraction(sum(w), len(w)) for w in windows)


def test_a_branch_without_masks_scores_one() -> None:
    assert branch_score((), ScoreParams()) == (SCALE, 1)


def test_scores_count_in_parts_of_two_to_the_sixteenth() -> None:
    assert SCALE == 2**16
    assert branch_score((0.5, 0.25), ScoreParams()) == (2**15 + 2**14, 2)


def first_round(confs: list[float], **kwargs):
    params = DecodingParams(block_size=len(confs), max_new_tokens=2 * len(confs), tau_conf=1.0, tau_add=1.0, **kwargs)
    strategy = begin(SequenceStart([1], params, 99, frozenset()))
    plan = strategy.plan()
    assert plan is not None
    strategy.absorb(plan, [RowResult(tuple(range(len(confs))), tuple(confs), tuple(confs))], 0, 0)
    return strategy


def test_candidates_rank_by_confidence_then_position() -> None:
    strategy = first_round([0.5, 0.9, 0.7, 0.7, 0.6], num_branches=3)
    lookaheads = [branch.lookahead and branch.lookahead.position for branch in strategy.branches]
    assert lookaheads == [3, 4, 5, None]  # position 2 was the fallback fill


def test_fewer_candidates_than_branches() -> None:
    strategy = first_round([0.5, 0.9, 0.7], num_branches=7)
    assert len(strategy.branches) == 3


def test_exact_ties_go_to_the_higher_ranked_lookahead() -> None:
    strategy = first_round([0.5, 0.9, 0.7], num_branches=2)
    plan = strategy.plan()
    assert plan is not None
    tie = [RowResult((1,) * len(r.masked), (0.25,) * len(r.masked), (0.25,) * len(r.masked)) for r in plan.rows]
    assert strategy.absorb(plan, tie, 0, 0).winner == 0


def test_creation_weight_counts_the_lookahead_token() -> None:
    strategy = first_round([0.5, 0.9, 0.7], num_branches=2, creation_weight=1.0)
    plan = strategy.plan()
    assert plan is not None
    tie = [RowResult((1,) * len(r.masked), (0.25,) * len(r.masked), (0.25,) * len(r.masked)) for r in plan.rows]
    record = strategy.absorb(plan, tie, 0, 0)
    assert record.winner == 2  # the anchor's is 1.0
    assert [round(b.score, 3) for b in record.branches] == [0.7, 0.5, 1.0]


def test_a_step_may_drop_the_worst_branches() -> None:
    strategy = first_round([0.5, 0.9, 0.7, 0.7, 0.6], num_branches=3)
    kept = strategy.branches[0], strategy.branches[-1]
    plan = strategy.plan()
    assert plan is not None
    plan = plan.keep(1)
    assert [row.masked for row in plan.rows] == [(1, 4, 5), (1, 3, 4, 5)]
    answers = [
        RowResult((1,) * len(r.masked), (p,) * len(r.masked), (p,) * len(r.masked))
        for r, p in zip(plan.rows, (0.25, 0.5), strict=True)
    ]
    record = strategy.absorb(plan, answers, 0, 0)
    assert [branch.own_fills for branch in record.branches] == [branch.own_fills for branch in kept]
    assert record.winner == 1


def test_a_branch_computes_from_its_lookahead_block_on() -> None:
    params = DecodingParams(block_size=4, max_new_tokens=8, num_branches=2, tau_conf=1.0, tau_add=0.25)
    strategy = begin(SequenceStart([1], params, 99, frozenset()))
    plan = strategy.plan()
    assert plan is not None
    row = (0.9, 0.3, 0.2, 0.1)
    strategy.absorb(plan, [RowResult((1, 1, 1, 1), row, row)], 0, 0)
    plan = strategy.plan()
    assert plan is not None
    window = [0.1, 0.1, 0.1, 0.9, 0.8, 0.3, 0.2]
    strategy.absorb(
        plan,
        [
            RowResult((1,) * len(r.masked), tuple(window[-len(r.masked) :]), tuple(window[-len(r.masked) :]))
            for r in plan.rows
        ],
        0,
        0,
    )
    plan = strategy.plan()
    assert plan is not None
    assert {row.compute_from for row in plan.rows[:-1]} == {5}
    assert plan.rows[-1].compute_from == plan.start
