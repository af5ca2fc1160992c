"""Decoding on a whole canvas: all generated positions are there from the beginning, and all attend to one another.

No position's keys and values are final before the last token is filled, because every later fill changes what the
others see. So these strategies commit nothing: a pass computes prompt and canvas again.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from lopa_ascend.config import DecodingParams
from lopa_ascend.decode.acceptance import most_confident
from lopa_ascend.decode.blocks import Block, Branch
from lopa_ascend.decode.strategy import Strategy, mean_confidence, predictions
from lopa_ascend.types import BranchRecord, Fill, RowPlan, RowResult, SequencePlan, StepRecord


class Canvas(Strategy):
    """One sequence whose canvas is whole from the beginning, in blocks of masks."""

    def __init__(
        self,
        prompt: Sequence[int],
        params: DecodingParams,
        mask: int,
        eos: frozenset[int],
        num_committed: int = 0,
    ) -> None:
        assert not num_committed, "the keys and values of the prompt depend on the canvas"
        super().__init__(prompt, params, mask, eos)
        while self.canvas.end < self.limit:
            self.canvas.open_block(min(params.block_size, self.limit - self.canvas.end), mask)

    @property
    def canvas(self) -> Branch:
        """The only branch."""
        return self.branches[0]

    @property
    def in_prefill(self) -> bool:
        return not self.num_forwards

    @property
    def num_opened(self) -> int:
        return sum(block.filled for block in self.canvas.blocks[1:])

    def plan(self) -> SequencePlan | None:
        if not self.canvas.masks or (self.params.finish_at_eos and self.visible_is_final()):
            return None
        return self._plan_row(self._next_row())

    @abstractmethod
    def _next_row(self) -> RowPlan:
        """What the next pass computes. The canvas has masks."""

    def _whole_row(self, masked: Sequence[int]) -> RowPlan:
        """The row that computes prompt and canvas, and predicts the positions ``masked``."""
        return RowPlan(0, (*self.prompt, *self.canvas.tokens), 0, (self.canvas.end,), tuple(masked))

    def _plan_row(self, row: RowPlan) -> SequencePlan:
        return SequencePlan(
            start=row.start,
            num_new=0,
            rows=(row,),
            num_branches=self.num_branches,
            num_open_blocks=len(self.canvas.blocks) - 1,
            winner_commits=False,
            prefix_length=row.start,
        )

    def absorb(self, plan: SequencePlan, results: Sequence[RowResult], model_tokens: int, head_rows: int) -> StepRecord:
        """Fills what ``_choose`` says."""
        (row,), (result,) = plan.rows, results
        branch = BranchRecord(None, self.canvas.end, self.canvas.masks, mean_confidence(result))
        fills, fallbacks = self._choose(predictions(row, result))
        for fill in fills:
            self.canvas.fill(fill, self.ends)
        record = StepRecord(
            index=self.num_forwards,
            span=(row.start, row.end),
            cache_length=self.num_committed,
            committed=plan.num_new,
            branches=(branch,),
            winner=0,
            fills=tuple(fills),
            fallbacks=fallbacks,
            model_tokens=model_tokens,
            head_rows=head_rows,
        )
        self.num_forwards += 1
        return record

    @abstractmethod
    def _choose(self, predicted: list[Fill]) -> tuple[list[Fill], int]:
        """What is filled, in the order of positions, and how many of these fills no rule has accepted.

        Args:
            predicted: the predictions for the masked positions of the row.
        """


class Parallel(Canvas):
    """Block after block, from left to right: each pass fills what the acceptance rule lets through in the first block
    that has masks, and its most confident position if the rule lets nothing through (semi-autoregressive parallel
    decoding, arXiv 2505.22618). One block that is as long as the canvas is decoded in any order."""

    @property
    def num_counted(self) -> int:
        return self._block.start - len(self.prompt)

    @property
    def _block(self) -> Block:
        """The first block that has masks."""
        return next(block for block in self.canvas.blocks if block.masks)

    def _masked(self, block: Block) -> list[int]:
        first = self.canvas.first
        return [q for q in range(block.start, block.end) if self.canvas.tokens[q - first] == self.mask]

    def _next_row(self) -> RowPlan:
        return self._whole_row(self._masked(self._block))

    def _choose(self, predicted: list[Fill]) -> tuple[list[Fill], int]:
        accepted = self.accept(predicted)
        return (accepted, 0) if accepted else ([most_confident(predicted)], 1)
