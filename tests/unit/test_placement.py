"""Which group computes what: every branch is computed once, and every group computes what the pass commits."""

from __future__ import annotations

import random

import pytest

from lopa_ascend.config import DecodingParams
from lopa_ascend.decode import begin
from lopa_ascend.parallel.placement import Placement
from lopa_ascend.types import RowResult, SequencePlan, Share


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
    strategy = begin(list(range(10)), params, 99, frozenset())
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
@pytest.mark.parametrize("sharing", [True, False])
def test_every_branch_is_computed_once_and_every_group_has_what_commits(window: str, size: int, sharing: bool) -> None:
    seen_idle = 0
    for plan in [plan for seed in range(6) for plan in plans(seed, window)]:
        placements = [Placement(size, group, sharing) for group in range(size)]
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
        for share in shares:
            if plan.num_new and not placements[0].sends_values(plan):
                assert share.rows
                assert share.rows[-1].tokens[: plan.num_new] == plan.rows[-1].tokens[: plan.num_new]
            seen_idle += not share.rows
        demands = {placement.demand(plan) for placement in placements}
        assert len(demands) == 1
        (demand,) = demands
        computed = [sum(row.end - row.compute_from for row in share.rows) for share in shares]
        assert demand.num_computed == max(computed)
        assert all(
            end >= row.end
            for share in shares
            for row, end in zip(share.rows, ends(share, demand.slot_ends), strict=True)
        )
        assert demand.committed_end == plan.start + plan.num_new
    assert seen_idle or size == 1


def ends(share: Share, by_slot: tuple[int, ...]) -> list[int]:
    return [max(by_slot[slot], share.plan.start + share.plan.num_new) for slot in share.slots]


def test_a_group_without_a_branch_computes_only_what_commits() -> None:
    first = plans(0, "block_causal")[0]
    assert len(first.rows) == 1
    (row,) = Placement(2, 1).share(first).rows
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
