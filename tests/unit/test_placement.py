"""Which group computes what: every branch is computed once, and every group computes what the pass commits."""

from __future__ import annotations

import random

import pytest

from lopa_ascend.config import DecodingParams
from lopa_ascend.decode import begin
from lopa_ascend.decode.strategy import SequenceStart
from lopa_ascend.parallel.placement import Placement, Share
from lopa_ascend.types import RowResult, SequencePlan


def plans(seed: int, window: str) -> list[SequencePlan]:
    """The plans of one sequence with random predictions."""
    rng = random.Random(seed)
    params = DecodingParams(
        num_branches=rng.choice([0, 1, 3, 4, 7]),
        block_size=rng.choice([4, 8]),
        max_new_tokens=40,
        tau_conf=0.7,
        tau_add=0.3,
        window_attention=window,
    )
    strategy = begin(SequenceStart(list(range(10)), params, 99, frozenset()))
    out = []
    while (plan := strategy.plan()) is not None:
        out.append(plan)
        results = []
        for row in plan.rows:
            confidences = tuple(rng.random() for _ in row.masked)
            results.append(RowResult(tuple(rng.randrange(50) for _ in row.masked), confidences, confidences))
        strategy.absorb(plan, results, 0, 0)
    return out


def check_share(plan: SequencePlan, share: Share, placement: Placement) -> None:
    """Checks that a row which takes positions from the last row has the same tokens as that row there."""
    base = share.rows[-1]
    assert base.compute_from == plan.start
    for row, slot, branch in zip(share.rows, share.slots, share.branches, strict=True):
        shared = row.compute_from - plan.start
        assert row.tokens[:shared] == base.tokens[:shared]
        assert len(base.tokens) >= shared
        if row.masked:
            assert (placement.group, slot) == placement.home(branch)
    assert len(set(share.slots)) == len(share.slots)
    assert all(slot < share.num_slots for slot in share.slots)


@pytest.mark.parametrize("window", ["block_causal", "full"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_branch_is_computed_once_and_every_group_has_what_commits(window: str, size: int) -> None:
    seen_idle = 0
    for plan in [plan for seed in range(6) for plan in plans(seed, window)]:
        placements = [Placement(size, group) for group in range(size)]
        shares = [placement.share(plan) for placement in placements]
        for placement, share in zip(placements, shares, strict=True):
            if share.rows:
                check_share(plan, share, placement)
        predicted = [
            branch for share in shares for row, branch in zip(share.rows, share.branches, strict=True) if row.masked
        ]
        assert sorted(predicted) == [branch for branch, row in enumerate(plan.rows) if row.masked]
        for branch, row in enumerate(plan.rows):
            group, slot = branch % size, branch // size
            at = shares[group].branches.index(branch)
            assert shares[group].slots[at] == slot
            assert shares[group].rows[at].tokens == row.tokens
            assert shares[group].rows[at].masked == row.masked
        if placements[0].sends_values(plan):
            assert not any(share.rows for share in shares[len(plan.rows) :])
        for share in shares:
            if plan.num_new and not placements[0].sends_values(plan):
                assert share.rows
                assert share.rows[-1].tokens[: plan.num_new] == plan.rows[-1].tokens[: plan.num_new]
            if share.rows and not any(row.masked for row in share.rows):
                (row,) = share.rows
                assert (share.slots, share.branches) == ((0,), (len(plan.rows) - 1,))
                assert row.entry_ends == plan.rows[-1].entry_ends[: len(row.entry_ends)]
                assert row.entry_ends[-1] == row.end
            seen_idle += not share.rows
        check_demand(plan, shares, placements)
    assert seen_idle or size == 1


def check_demand(plan: SequencePlan, shares: list[Share], placements: list[Placement]) -> None:
    """Checks that all groups ask for the same pages, and only for those that rows fill."""
    (num_computed,) = {placement.num_computed(plan) for placement in placements}
    (slot_ends,) = {placement.slot_ends(plan) for placement in placements}
    computed = [sum(row.end - row.compute_from for row in share.rows) for share in shares]
    assert num_computed == max(computed)
    own = [(slot, row.end) for share in shares for slot, row in zip(share.slots, share.rows, strict=True) if row.masked]
    assert slot_ends == tuple(
        max((end for filled, end in own if filled == slot), default=0) for slot in range(shares[0].num_slots)
    )


@pytest.mark.parametrize(("num_rows", "size", "places"), [(1, 1, 1), (3, 1, 3), (1, 2, 2), (4, 2, 4), (8, 3, 9)])
def test_places_are_the_rows_that_all_groups_could_evaluate(num_rows: int, size: int, places: int) -> None:
    assert Placement(size).num_places(num_rows) == places


def test_rows_share_what_the_anchor_computes_where_the_group_has_it() -> None:
    plan = next(plan for seed in range(9) for plan in plans(seed, "block_causal") if len(plan.rows) > 3)
    anchor = len(plan.rows) - 1
    for group in range(2):
        share = Placement(2, group).share(plan)
        later = max(sorted(share.branches), key=lambda branch: plan.rows[branch].compute_from)
        assert share.branches[-1] == (anchor if anchor % 2 == group else later)


def test_a_row_that_fills_all_slots_needs_pages_in_all_of_them() -> None:
    params = DecodingParams(base="fast_dllm", num_branches=3, block_size=8, max_new_tokens=24)
    plan = begin(SequenceStart(list(range(10)), params, 99, frozenset())).plan()
    assert plan is not None
    assert plan.fills_all_slots
    assert Placement(2).slot_ends(plan) == (34, 34)


def test_a_group_without_a_branch_computes_only_what_commits() -> None:
    first = plans(0, "block_causal")[0]
    assert len(first.rows) == 1
    share = Placement(2, 1).share(first)
    assert (share.slots, share.branches) == ((0,), (0,))
    (row,) = share.rows
    assert (row.tokens, row.entry_ends, row.masked) == (tuple(range(10)), (10,), ())


def test_with_full_attention_every_group_runs_a_branch_that_is_alone() -> None:
    """Then its keys and values need not travel."""
    first = plans(0, "full")[0]
    (row,) = Placement(2, 1).share(first).rows
    assert row.tokens == first.rows[0].tokens
    assert row.masked == ()
    assert not Placement(2, 1).sends_values(first)
    later = next(plan for seed in range(9) for plan in plans(seed, "full") if len(plan.rows) > 1 and plan.num_new)
    assert Placement(2, 1).sends_values(later)
    assert not Placement(1, 0).sends_values(later)
