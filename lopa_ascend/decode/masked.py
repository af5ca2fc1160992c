"""How probable given tokens are as an answer: one pass over masks, which fills nothing."""

from __future__ import annotations

from lopa_ascend.decode.block_pipeline import BlockPipeline
from lopa_ascend.decode.blocks import Branch
from lopa_ascend.decode.canvas import Parallel
from lopa_ascend.decode.strategy import SequenceStart, Strategy
from lopa_ascend.types import Fill, RowPlan, SequencePlan


class MaskedWindow(BlockPipeline):
    """All blocks of the answer in one window."""

    def plan(self) -> SequencePlan | None:
        return None if self.num_forwards else super().plan()

    def open(self, branch: Branch) -> Branch:
        while branch.end < self.limit:
            branch = branch.open_block(min(self.params.block_size, self.limit - branch.end), self.mask)
        return branch

    def choose(self, branch: Branch, predicted: list[Fill]) -> tuple[list[Fill], int]:
        return [], 0


class MaskedCanvas(Parallel):
    """A whole canvas."""

    def plan(self) -> SequencePlan | None:
        return None if self.num_forwards else super().plan()

    def _row(self, branch: Branch) -> RowPlan:
        return self._whole_row(branch, branch.masked_positions(self.mask))

    def choose(self, branch: Branch, predicted: list[Fill]) -> tuple[list[Fill], int]:
        return [], 0


def begin_masked(start: SequenceStart) -> Strategy:
    """As ``begin``, for one pass over ``params.max_new_tokens`` masks, which see what they see in the decoding."""
    return MaskedWindow(start) if start.params.is_pipelined else MaskedCanvas(start)
