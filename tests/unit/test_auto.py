"""``num_branches`` "auto": when a pass has lookahead branches."""

from __future__ import annotations

from typing import Any

import pytest

from lopa_ascend.config import DecodingParams, ParameterError, fitting_defaults
from lopa_ascend.decode import begin
from lopa_ascend.decode.strategy import SequenceStart, Strategy
from lopa_ascend.types import RowResult

FIELDS: dict[str, Any] = {"num_branches": "auto", "block_size": 8, "max_new_tokens": 8, "tau_conf": 0.9}


def num_rows(strategy: Strategy, prob: float) -> int:
    """The rows of a pass, which predicts its first position with this probability and fills at most that one."""
    plan = strategy.plan()
    assert plan is not None
    probs = (prob, *[0.2] * 7)
    results = [RowResult((5,) * len(r.masked), probs[: len(r.masked)], probs[: len(r.masked)]) for r in plan.rows]
    strategy.absorb(plan, results, 0, 0)
    return len(plan.rows)


def test_published_branches_are_made_after_a_pass_that_was_stuck() -> None:
    strategy = begin(SequenceStart([1], DecodingParams(**FIELDS), 99, frozenset()))
    assert [num_rows(strategy, prob) for prob in (0.5, 0.95, 0.2, 0.2)] == [1, 4, 1, 4]
    strategy = begin(SequenceStart([1], DecodingParams(**FIELDS), 99, frozenset()))
    strategy.is_crowded = True
    assert [num_rows(strategy, prob) for prob in (0.5, 0.95, 0.2, 0.2)] == [1, 4, 1, 4], "whatever others do"


@pytest.mark.parametrize("acceptance", ["verified", "exact"])
@pytest.mark.parametrize("depth", [1, 2])
def test_drafts_are_made_while_few_requests_run(acceptance: str, depth: int) -> None:
    params = DecodingParams(**FIELDS, branch_acceptance=acceptance, lookahead_depth=depth)
    strategy = begin(SequenceStart([1], params, 99, frozenset()))
    rows = []
    for is_crowded in (False, True, True, False, False):
        strategy.is_crowded = is_crowded
        rows.append(num_rows(strategy, 0.5))
    assert rows == [1, 4, 1, 1, 4]


def test_a_fixed_number_depends_on_nothing() -> None:
    strategy = begin(
        SequenceStart([1], DecodingParams(**FIELDS | {"num_branches": 2}, branch_acceptance="exact"), 99, frozenset())
    )
    strategy.is_crowded = True
    assert [num_rows(strategy, prob) for prob in (0.5, 0.95, 0.2)] == [1, 3, 3]


def test_what_goes_with_auto() -> None:
    auto = DecodingParams(num_branches="auto")
    assert (auto.lookaheads, auto.follows_load) == (3, False)
    assert DecodingParams(num_branches="auto", branch_acceptance="verified").follows_load
    assert DecodingParams(num_branches="auto", branch_acceptance="exact").follows_load
    assert not DecodingParams(branch_acceptance="exact").follows_load
    with pytest.raises(ParameterError, match=r'num_branches.*integer from 0 to 255 or "auto", got \'many\''):
        DecodingParams(num_branches="many")
    with pytest.raises(ParameterError, match='num_branches.*"auto" does not go with decoding "d2f"'):
        DecodingParams(decoding="d2f", num_branches="auto")
    assert fitting_defaults({"num_branches": "auto"}, {"decoding": "d2f"}) == {}
