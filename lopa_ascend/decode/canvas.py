"""Decoding on a whole canvas: all generated positions are there from the beginning, and all attend to one another.

No position's keys and values are final before the last token is filled, because every later fill changes what the
others see. So these strategies commit nothing: a pass computes prompt and canvas again.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace

from lopa_ascend.config import DecodingParams
from lopa_ascend.decode.acceptance import most_confident
from lopa_ascend.decode.blocks import Block, Branch
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
    ) -> None:
        assert not num_committed, "the keys and values of the prompt depend on the canvas"
        super().__init__(prompt, params, mask, eos, num_committed, properties)
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
    decoding, arXiv 2505.22618). With ``denoising_steps`` it fills at least as many as LLaDA's schedule wants (arXiv
    2502.09992). One block that is as long as the canvas is decoded in any order."""

    @property
    def num_counted(self) -> int:
        return first_masked(self.anchor).start - len(self.prompt)

    def _row(self, branch: Branch) -> RowPlan:
        masked = branch.masked_in(first_masked(branch), self.mask) if branch.masks else ()
        return self._whole_row(branch, masked)

    def accept(self, predicted: Sequence[Fill]) -> list[Fill]:
        """What the rule lets through. Fast-dLLM's "factor" for LLaDA takes the first prediction in any case, and the
        last one as soon as it comes to it."""
        accepted = super().accept(predicted)
        takes_last = self.properties.factor_takes_last and self.params.acceptance == "factor"
        return list(predicted) if takes_last and max(1, len(accepted)) == len(predicted) - 1 else accepted

    def choose(self, branch: Branch, predicted: list[Fill]) -> tuple[list[Fill], int]:
        accepted = self.accept(predicted)
        wanted = min(self._num_wanted(branch), len(predicted))
        if len(accepted) >= wanted:
            return accepted, 0
        return most_confident(predicted, wanted), wanted - len(accepted)

    def _num_wanted(self, branch: Branch) -> int:
        """Positions that the next pass must fill: 1, or with ``denoising_steps`` as many as the schedule lacks. After n
        passes it wants n shares of the block, the first ones one larger until these have the remainder."""
        steps = self.params.denoising_steps
        if steps is None or not branch.masks:
            return 1
        block = first_masked(branch)
        share, remainder = divmod(block.length, steps)
        num_passes = block.passes + 1
        return max(1, num_passes * share + min(num_passes, remainder) - block.filled)

    def settle(self, branch: Branch) -> Branch:
        """Counts the pass in the block that it has begun to fill. A block that it has filled needs no count."""
        if self.params.denoising_steps is None:
            return branch
        blocks = (
            replace(block, passes=block.passes + 1) if block.masks and block.filled else block
            for block in branch.blocks
        )
        return replace(branch, blocks=tuple(blocks))


def first_masked(branch: Branch) -> Block:
    """The first block that has masks."""
    return next(block for block in branch.blocks if block.masks)
