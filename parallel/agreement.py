"""A cheap check that all ranks decide the same: a running digest of plans and results, compared now and then."""

from __future__ import annotations

import zlib

from lopa_ascend.parallel.mesh import Mesh
from lopa_ascend.types import SequenceResult, StepPlan, StepResult


class Agreement:
    """Compares each ``interval`` steps what was planned and decided since the start; never if it is 0."""

    def __init__(self, mesh: Mesh, interval: int):
        self._mesh, self._interval = mesh, interval if mesh.size > 1 else 0
        self._digests = {"who takes part": 0, "the page tables": 0, "what was decided": 0}

    def note(self, plan: StepPlan, result: StepResult) -> None:
        """Raises:
        RankError: a rank has drifted.
        """
        if not self._interval:
            return
        news = (
            [sequence.request_id for sequence in plan.sequences],
            [sequence.page_tables for sequence in plan.sequences],
            [_decisions(sequence) for sequence in result.sequences],
        )
        for name, new in zip(self._digests, news, strict=True):
            self._digests[name] = zlib.crc32(repr(new).encode(), self._digests[name])
        if (plan.index + 1) % self._interval == 0:
            self._mesh.agree(plan.index + 1, self._digests)


def _decisions(result: SequenceResult) -> object:
    record = result.record
    if record is None:
        return result.error
    # Not the probabilities: between machines of different kinds their last bits may differ without effect.
    return record.winner, record.span, record.committed, [(fill.position, fill.token) for fill in record.fills]
