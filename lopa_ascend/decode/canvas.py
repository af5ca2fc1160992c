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
from lopa_ascend.decode.blocks import Block, Branch, threshold_count
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
    decoding, arXiv 2505.22618). With ``denoising_steps`` it fills at least as many as LLaDA's schedule wants (arXiv
    2502.09992). One block that is as long as the canvas is decoded in any order.

    With ``max_active_blocks`` above 1 a pass also fills what the rule lets through in the blocks behind the first, as
    far as ``tau_add`` opens them. With ``finish_at_eos`` a token that ends the answer is then repeated to the canvas's
    end (d3LLM, arXiv 2601.07568).
    """

    @property
    def num_counted(self) -> int:
        return first_masked(self.anchor).start - len(self.prompt)

    def _row(self, branch: Branch) -> RowPlan:
        return self._whole_row(
            branch, [q for block in self._window(branch) for q in branch.masked_in(block, self.mask)]
        )

    def _window(self, branch: Branch) -> list[Block]:
        """The blocks that a pass fills: the first one that has masks, and those that are open behind it; none if there
        are no masks."""
        first = next((i for i, block in enumerate(branch.blocks) if block.masks), len(branch.blocks))
        window = list(branch.blocks[first : first + 1])
        for block in branch.blocks[first + 1 : first + (self.params.max_active_blocks or 1)]:
            if window[-1].filled < threshold_count(self.params.tau_add, window[-1].length):
                break
            window.append(block)
        return window

    def accept(self, predicted: Sequence[Fill]) -> list[Fill]:
        """What the rule lets through. Fast-dLLM's "factor" for LLaDA takes the first prediction in any case, and the
        last one as soon as it comes to it."""
        accepted = super().accept(predicted)
        takes_last = self.properties.fills_as_llada and self.params.acceptance == "factor"
        return list(predicted) if takes_last and max(1, len(accepted)) == len(predicted) - 1 else accepted

    def choose(self, branch: Branch, predicted: list[Fill]) -> tuple[list[Fill], int]:
        chosen: list[Fill] = []
        fallbacks, window = 0, self._window(branch)
        for block in window:
            in_block = predicted
            if len(window) > 1:
                in_block = [fill for fill in predicted if block.start <= fill.position < block.end]
            eos_last = self.params.eos_last and self.constraint is None  # a grammar says where the answer ends
            late = [fill for fill in in_block if fill.token in self.ends] if eos_last else []
            early = [fill for fill in in_block if fill not in late] if late else in_block
            wanted = min(self._num_wanted(block), len(in_block)) if block is window[0] else 0
            num_late = max(0, wanted - len(early))
            filled, num_fallbacks = self.accept_in(branch, early, wanted - num_late)
            chosen += sorted([*filled, *late[:num_late]], key=lambda fill: fill.position) if late else filled
            fallbacks += num_fallbacks + num_late
        if self.properties.fills_as_llada and len(chosen) == fallbacks and len(window) > 1:
            others = [fill for fill in most_confident(predicted) if fill not in chosen]
            return chosen + others, fallbacks + len(others)
        return chosen, fallbacks

    def _num_wanted(self, block: Block) -> int:
        """Positions of the first block that the next pass must fill: 1, or with ``denoising_steps`` as many as the
        schedule lacks. After n passes it wants n shares of the block, the first ones one larger until these have the
        remainder."""
        steps = self.params.denoising_steps
        if steps is None:
            return 1
        share, remainder = divmod(block.length, steps)
        num_passes = block.passes + 1
        return max(1, num_passes * share + min(num_passes, remainder) - block.filled)

    def settle(self, branch: Branch) -> Branch:
        """Counts the pass in the blocks that are begun, and ends the canvas behind a token that ends the answer."""
        if self.params.denoising_steps is not None:
            blocks = (
                replace(block, passes=block.passes + 1) if block.masks and block.filled else block
                for block in branch.blocks
            )
            branch = replace(branch, blocks=tuple(blocks))
        has_several = (self.params.max_active_blocks or 1) > 1
        may_end = has_several and self.params.finish_at_eos and self.constraint is None
        return self._ended(branch) if may_end and branch.eos else branch

    def _ended(self, branch: Branch) -> Branch:
        """The branch, which has a token that ends the answer, with that token everywhere behind it."""
        end = next(i for i, token in enumerate(branch.tokens) if token in self.ends)
        tokens = branch.tokens[:end] + branch.tokens[end : end + 1] * (len(branch.tokens) - end)
        prompt, *blocks = branch.blocks
        places = (slice(block.start - branch.first, block.end - branch.first) for block in blocks)
        masks = [tokens[place].count(self.mask) for place in places]
        ended = (replace(block, masks=count) for block, count in zip(blocks, masks, strict=True))
        return replace(branch, tokens=tokens, blocks=(prompt, *ended))


def first_masked(branch: Branch) -> Block:
    """The first block that has masks."""
    return next(block for block in branch.blocks if block.masks)
