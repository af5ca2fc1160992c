"""Which branch-parallel group computes which branch, and in which slot (the slot rules of single-phase commits).

Branch i in evaluation order runs in group i mod size, slot i div size. Page tables belong to slots and hold the same
page ids in every group. Every slot of every group takes every committing write, so a group that has no branch in a step
still computes what commits, unless its values are sent to it (full attention).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lopa_ascend.kv.pages import slots_for
from lopa_ascend.types import Demand, RowPlan, SequencePlan, Share


@dataclass(frozen=True)
class Placement:
    """Group ``group`` of ``size``. ``sharing``: positions that rows have in common are computed once; off, every row
    computes all of its own."""

    size: int = 1
    group: int = 0
    sharing: bool = True

    def home(self, branch: int) -> tuple[int, int]:
        """(group, slot) of a branch."""
        return branch % self.size, branch // self.size

    def num_places(self, num_rows: int) -> int:
        """Rows that all groups could evaluate in the time of ``num_rows``."""
        return slots_for(num_rows, self.size) * self.size

    def sends_values(self, plan: SequencePlan) -> bool:
        """Whether the winner's keys and values must travel to the other groups: they do not have the same ones."""
        return plan.winner_commits and bool(plan.num_new) and len(plan.rows) > 1 and self.size > 1

    def share(self, plan: SequencePlan) -> Share:
        """This group's part."""
        num_slots = slots_for(plan.num_branches, self.size)
        branches = list(range(self.group, len(plan.rows), self.size))
        if not branches:
            row = _repeated(plan)
            rows, branches = ([] if row is None else [row]), ([] if row is None else [len(plan.rows) - 1])
            return Share(plan, tuple(rows), (0,) * len(rows), tuple(branches), num_slots)
        base = self._base(plan, branches)
        branches.remove(base)
        rows = [plan.rows[branch] for branch in branches]
        if not self.sharing:
            rows = [replace(row, compute_from=row.start) for row in rows]
        rows.append(replace(plan.rows[base], compute_from=plan.start))
        branches.append(base)
        slots = tuple(self.home(branch)[1] for branch in branches)
        return Share(plan, tuple(rows), slots, tuple(branches), num_slots)

    def _base(self, plan: SequencePlan, branches: Sequence[int]) -> int:
        """The branch that computes what the group's rows share: the anchor, or that which equals it longest."""
        anchor = len(plan.rows) - 1
        return anchor if anchor in branches else max(branches, key=lambda branch: plan.rows[branch].compute_from)

    def demand(self, plan: SequencePlan) -> Demand:
        """What the step needs on every rank."""
        ends = [0] * slots_for(plan.num_branches, self.size)
        for branch, row in enumerate(plan.rows):
            slot = self.home(branch)[1]
            ends[slot] = max(ends[slot], row.end)
        tokens = [self._num_tokens(plan, group) for group in range(min(self.size, len(plan.rows)))]
        return Demand(max(tokens), plan.start + plan.num_new, tuple(ends), plan.winner_commits)

    def _num_tokens(self, plan: SequencePlan, group: int) -> int:
        """Tokens that a group with branches computes."""
        branches = range(group, len(plan.rows), self.size)
        rows = [plan.rows[branch] for branch in branches]
        if not self.sharing:
            return sum(len(row.tokens) for row in rows)
        shared = plan.rows[self._base(plan, branches)].compute_from - plan.start
        return sum(row.end - row.compute_from for row in rows) + shared


def _repeated(plan: SequencePlan) -> RowPlan | None:
    """What a group without a branch computes: of the anchor what commits, and no prediction. With full attention
    that is all of it, and only of use where the anchor is alone; None where there is nothing to compute."""
    anchor = plan.rows[-1]
    if not plan.num_new or (plan.winner_commits and len(plan.rows) > 1):
        return None
    if plan.winner_commits:
        return replace(anchor, masked=())
    end = plan.start + plan.num_new
    entry_ends = tuple(edge for edge in anchor.entry_ends if edge <= end)
    return replace(anchor, tokens=anchor.tokens[: plan.num_new], entry_ends=entry_ends, masked=())
