"""How probable given tokens are as an answer: one pass over masks, which fills nothing."""

from __future__ import annotations

from collections.abc import Sequence

from lopa_ascend.config import DecodingParams
from lopa_ascend.decode.block_pipeline import BlockPipeline
from lopa_ascend.decode.blocks import Branch
from lopa_ascend.decode.canvas import Parallel
from lopa_ascend.decode.strategy import Strategy
from lopa_ascend.types import DREAM, Fill, ModelProperties, RowPlan, SequencePlan


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


def begin_masked(
    prompt: Sequence[int],
    params: DecodingParams,
    mask: int,
    eos: frozenset[int],
    num_committed: int = 0,
    properties: ModelProperties = DREAM,
) -> Strategy:
    """As ``begin``, for one pass over ``params.max_new_tokens`` masks, which see what they see in the decoding."""
    strategy = MaskedWindow if params.is_pipelined else MaskedCanvas
    return strategy(prompt, params, mask, eos, num_committed, properties)
