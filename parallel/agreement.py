"""Checks at intervals that all ranks decide the same, by a running digest of what they have planned and decided."""

from __future__ import annotations

import zlib

from lopa_ascend.parallel.mesh import Mesh
from lopa_ascend.types import SequenceResult, StepPlan, StepResult


class Agreement:
    """Digests of everything planned and decided since the start, compared between the ranks.

    Args:
        mesh: the ranks.
        interval: steps between two comparisons; 0 for none.
    """

    def __init__(self, mesh: Mesh, interval: int):
        self._mesh = mesh
        self._interval = interval if mesh.size > 1 else 0
        self._digests = {"who takes part": 0, "the page tables": 0, "what was decided": 0}

    def record_step(self, plan: StepPlan, result: StepResult) -> None:
        """Adds a step to the digests, and compares them if the step is the last one of an interval.

        Raises:
            RankError: the ranks differ; the message says which rank, and in what.
        """
        if not self._interval:
            return
        added = {
            "who takes part": [sequence.request_id for sequence in plan.sequences],
            "the page tables": [sequence.page_tables for sequence in plan.sequences],
            "what was decided": [_decisions(sequence) for sequence in result.sequences],
        }
        for name, new in added.items():
            self._digests[name] = zlib.crc32(repr(new).encode(), self._digests[name])
        num_steps = plan.index + 1
        if num_steps % self._interval == 0:
            self._mesh.check_agreement(num_steps, self._digests)


def _decisions(result: SequenceResult) -> object:
    """What must be equal on all ranks of what a step did to a sequence."""
    record = result.record
    if record is None:
        return result.error
    # Not the probabilities: between machines of different kinds their last bits may differ without effect.
    fills = [(fill.position, fill.token) for fill in record.fills]
    return record.winner, record.span, record.committed, fills
