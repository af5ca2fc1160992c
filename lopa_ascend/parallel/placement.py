"""Which branch-parallel group computes which branch, and in which slot.

Branch i, in evaluation order, is computed by group i mod ``size`` in slot i div ``size``.

Page tables belong to slots and hold the same page ids in every group. What a step commits is written in every slot of
every group, so a group without a branch still computes the positions that the step commits. Only with full attention,
where keys and values differ between branches, does it receive the winner's values instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lopa_ascend.kv.pages import slots_for
from lopa_ascend.types import RowPlan, SequencePlan


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """What one branch-parallel group computes in a sequence's forward pass."""

    plan: SequencePlan
    rows: tuple[RowPlan, ...]
    """The last row computes all its positions; the others reuse its results before their ``compute_from``. Rows that
    another group predicts have no ``masked`` positions here."""
    slots: tuple[int, ...]
    branches: tuple[int, ...]
    """Index of each row in ``plan.rows``."""
    num_slots: int


@dataclass(frozen=True)
class Placement:
    """One branch-parallel group among ``size``."""

    size: int = 1
    group: int = 0

    def home(self, branch: int) -> tuple[int, int]:
        return branch % self.size, branch // self.size

    def num_places(self, num_rows: int) -> int:
        """``num_rows``, rounded up to a full round of all groups."""
        return slots_for(num_rows, self.size) * self.size

    def sends_values(self, plan: SequencePlan) -> bool:
        """Whether the winner's keys and values must travel to the other groups, which have not computed the same."""
        return plan.winner_commits and len(plan.rows) > 1 and self.size > 1

    def share(self, plan: SequencePlan) -> Share:
        num_slots = slots_for(plan.max_rows, self.size)
        own_branches = self._branches_of(plan, self.group)
        if not own_branches:
            row = _committing_row(plan)
            if row is None:
                return Share(plan, (), (), (), num_slots)
            anchor = len(plan.rows) - 1
            return Share(plan, (row,), (0,), (anchor,), num_slots)
        base = _base_branch(plan, own_branches)
        others = [branch for branch in own_branches if branch != base]
        rows = [plan.rows[branch] for branch in others]
        rows.append(replace(plan.rows[base], compute_from=plan.start))
        branches = [*others, base]
        slots = tuple(self.home(branch)[1] for branch in branches)
        return Share(plan, tuple(rows), slots, tuple(branches), num_slots)

    def slot_ends(self, plan: SequencePlan) -> tuple[int, ...]:
        """Positions for which each slot needs room, the same on every rank; 0 for a slot without a row."""
        slot_ends = [0] * slots_for(plan.max_rows, self.size)
        for branch, row in enumerate(plan.rows):
            _, slot = self.home(branch)
            slot_ends[slot] = max(slot_ends[slot], row.end)
        if plan.fills_all_slots:
            slot_ends = [max(row.end for row in plan.rows)] * len(slot_ends)
        return tuple(slot_ends)

    def num_computed(self, plan: SequencePlan) -> int:
        """Tokens of the busiest group, the same on every rank."""
        groups_with_branches = range(min(self.size, len(plan.rows)))
        return max(self._num_computed(plan, group) for group in groups_with_branches)

    def _branches_of(self, plan: SequencePlan, group: int) -> range:
        return range(group, len(plan.rows), self.size)

    def _num_computed(self, plan: SequencePlan, group: int) -> int:
        branches = self._branches_of(plan, group)
        rows = [plan.rows[branch] for branch in branches]
        own = sum(row.end - row.compute_from for row in rows)
        shared = plan.rows[_base_branch(plan, branches)].compute_from - plan.start
        return own + shared


def _base_branch(plan: SequencePlan, branches: Sequence[int]) -> int:
    """The branch that computes the positions shared by the group's rows: the anchor if the group has it, otherwise the
    branch that equals the anchor for longest."""
    anchor = len(plan.rows) - 1
    return anchor if anchor in branches else max(branches, key=lambda branch: plan.rows[branch].compute_from)


def _committing_row(plan: SequencePlan) -> RowPlan | None:
    """The row of a group without a branch: positions that the pass commits, or that later passes read from every slot.
    It predicts nothing.

    With full attention the committed values depend on the whole row. So the group computes the whole anchor if that is
    the only branch; otherwise it receives the winner's values. None if there is nothing to compute.
    """
    anchor = plan.rows[-1]
    alone = len(plan.rows) == 1
    if plan.fills_all_slots:
        return replace(anchor, masked=())
    if not plan.num_new or (plan.winner_commits and not alone):
        return None
    if plan.winner_commits:
        return replace(anchor, masked=())
    end = plan.start + plan.num_new
    entry_ends = tuple(entry_end for entry_end in anchor.entry_ends if entry_end <= end)
    return replace(anchor, tokens=anchor.tokens[: plan.num_new], entry_ends=entry_ends, masked=())
