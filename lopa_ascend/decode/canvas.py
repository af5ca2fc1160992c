"""Decoding on a whole canvas: all generated positions are there from the beginning, and all attend to one another.

No position's keys and values are final before the last token is filled, because every later fill changes what the
others see. So these strategies commit nothing: a pass computes prompt and canvas again.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from lopa_ascend.config import DecodingParams
from lopa_ascend.decode.blocks import Block, Branch
from lopa_ascend.decode.constraint import Constraint
from lopa_ascend.decode.strategy import Strategy
from lopa_ascend.types import DREAM, Fill, ModelProperties, RowPlan, SequencePlan


class Canvas(Strategy):
    """One sequence whose canvas is whole from the beginning, in blocks of masks."""

    def __init__(
        self,
        prompt: Sequence[int],
        params: DecodingParams,
        mask: int,
        eos: frozenset[int],
        num_committed: int = 0,
        properties: ModelProperties = DREAM,
        constraint: Constraint | None = None,
    ) -> None:
        assert not num_committed, "the keys and values of the prompt depend on the canvas"
        super().__init__(prompt, params, mask, eos, num_committed, properties, constraint)
        canvas = self.anchor
        while canvas.end < self.limit:
            canvas = canvas.open_block(min(params.block_size, self.limit - canvas.end), mask)
        self.branches = (canvas,)

    @property
    def in_prefill(self) -> bool:
        return not self.num_forwards

    @property
    def num_opened(self) -> int:
        return sum(block.filled for block in self.answer.blocks[1:])

    def plan(self) -> SequencePlan | None:
        is_final = self.known_winner is not None or (self.params.finish_at_eos and self.visible_is_final())
        if is_final or not self.anchor.masks:
            return None
        rows = tuple(self._row(branch) for branch in self.branches)
        return SequencePlan(
            start=rows[-1].start,
            num_new=0,
            rows=rows,
            max_rows=self.max_rows,
            winner_commits=False,
            prefix_length=rows[-1].start,
        )

    @abstractmethod
    def _row(self, branch: Branch) -> RowPlan:
        """What the next pass computes of a branch."""

    def _whole_row(self, branch: Branch, masked: Sequence[int]) -> RowPlan:
        """The row that computes prompt and canvas, and predicts the positions ``masked``."""
        return RowPlan(0, (*self.prompt, *branch.tokens), 0, (branch.end,), tuple(masked))


class Parallel(Canvas):
    """Block after block, from left to right: each pass fills what the acceptance rule lets through in the first block
    that has masks, and its most confident position if the rule lets nothing through (semi-autoregressive parallel
    decoding, arXiv 2505.22618). One block that is as long as the canvas is decoded in any order."""

    @property
    def num_counted(self) -> int:
        return first_masked(self.anchor).start - len(self.prompt)

    def _row(self, branch: Branch) -> RowPlan:
        masked = branch.masked_in(first_masked(branch), self.mask) if branch.masks else ()
        return self._whole_row(branch, masked)

    def choose(self, branch: Branch, predicted: list[Fill]) -> tuple[list[Fill], int]:
        return self.accept_in(branch, predicted, least=min(1, len(predicted)))


def first_masked(branch: Branch) -> Block:
    """The first block that has masks."""
    return next(block for block in branch.blocks if block.masks)
