"""The branch scores of examples/research_decodings against their formulas."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

import pytest

from lopa_ascend.config import DecodingParams, ParameterError
from lopa_ascend.decode import begin
from lopa_ascend.decode.blocks import Branch
from lopa_ascend.decode.lopa import Lopa
from lopa_ascend.decode.strategy import SequenceStart
from lopa_ascend.types import Fill, RowPlan, RowResult, SequencePlan
from tests import research


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    with research.registered():
        yield


def scores(branches: list[Branch], rows: list[tuple[float, ...]], params: DecodingParams) -> list[Fraction]:
    """The scores of branches whose masked positions have these probabilities."""
    strategy = begin(SequenceStart([1], params, 99, frozenset()))
    assert isinstance(strategy, Lopa)
    strategy.branches = branches
    plans = tuple(RowPlan(0, (), 0, (), tuple(range(len(row)))) for row in rows)
    results = [RowResult((1,) * len(row), row, (0.0,) * len(row)) for row in rows]
    plan = SequencePlan(0, 0, plans, len(plans), winner_commits=False, prefix_length=0)
    return strategy.score(plan, results)


def test_expected_counts_what_passes_and_the_branchs_own_token() -> None:
    own, anchor = Branch((), (), 0, own_fills=(Fill(9, 5, 0.5, 0.5),)), Branch((), (), 0)
    rows: list[tuple[float, ...]] = [(0.75, 0.25), (0.75, 0.25, 0.125), ()]
    found = scores([own, anchor, own], rows, DecodingParams(decoding="expected_score", tau_conf=0.5))
    assert found == [Fraction(5, 6), Fraction(7, 12), 1]  # of three: 1 + 1 + 0.5; 1 + 0.5 + 0.25; without masks
    free = scores([own, anchor, own], rows, DecodingParams(decoding="expected_score", tau_conf=0.0))
    assert free == [1, 1, 1]


def test_entropy_scores_branches_and_leaves_positions_to_the_probability() -> None:
    params = DecodingParams(
        decoding="entropy_score", num_branches=2, block_size=4, max_new_tokens=4, tau_conf=1.0
    )  # fmt: skip
    assert params.ranking == "neg_entropy"
    strategy = begin(SequenceStart([1], params, 99, frozenset()))
    plan = strategy.plan()
    assert plan is not None
    strategy.absorb(plan, [RowResult((1, 2, 3, 4), (0.9, 0.8, 0.7, 0.2), (-3.0, -1.0, -2.0, -0.5))], 0, 0)
    assert [branch.lookahead and branch.lookahead.position for branch in strategy.branches] == [2, 3, None]
    plan = strategy.plan()
    assert plan is not None
    rows = [
        RowResult((1, 1), (0.9, 0.9), (-2.0, -2.0)),
        RowResult((1, 1), (0.1, 0.1), (-1.0, -1.5)),
        RowResult((1, 1, 1), (0.5, 0.5, 0.5), (-1.0, -1.0, -2.0)),
    ]
    record = strategy.absorb(plan, rows, 0, 0)
    assert record.winner == 1
    assert [round(branch.score, 3) for branch in record.branches] == [-2.0, -1.25, -1.333]


def test_with_entropies_lookaheads_still_rank_by_probability() -> None:
    params = DecodingParams(decoding="entropy_score", block_size=4, max_new_tokens=4, tau_conf=1.0, num_branches=2)
    strategy = begin(SequenceStart([1], params, 99, frozenset()))
    plan = strategy.plan()
    assert plan is not None
    strategy.absorb(plan, [RowResult((1, 2, 3, 4), (0.9, 0.5, 0.6, 0.7), (-0.1, -0.2, -0.3, -0.4))], 0, 0)
    lookaheads = [branch.lookahead and branch.lookahead.position for branch in strategy.branches]
    assert lookaheads == [4, 3, None]


def test_scores_that_do_not_go_with_other_parameters() -> None:
    with pytest.raises(ParameterError, match=r'acceptance: "factor" does not go with decoding "expected_score"'):
        DecodingParams(decoding="expected_score", acceptance="factor")
    with pytest.raises(ParameterError, match=r'confidence: "margin" does not go with decoding "entropy_score"'):
        DecodingParams(decoding="entropy_score", confidence="margin")
