"""How probable given tokens are as an answer: one pass over masks, which fills nothing. A causal model reads the tokens
instead, and predicts each from those before it."""

from __future__ import annotations

from collections.abc import Sequence

from lopa_ascend.decode.block_pipeline import BlockPipeline
from lopa_ascend.decode.blocks import Branch
from lopa_ascend.decode.canvas import Parallel
from lopa_ascend.decode.causal import Autoregressive
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
    def plan(self) -> SequencePlan | None:
        return None if self.num_forwards else super().plan()

    def _row(self, branch: Branch) -> RowPlan:
        return self._whole_row(branch, branch.masked_positions(self.mask))

    def choose(self, branch: Branch, predicted: list[Fill]) -> tuple[list[Fill], int]:
        return [], 0


class InOrder(Autoregressive):
    """The pass that commits the prompt, for the first token of every text; then a pass for each longer text."""

    def __init__(self, start: SequenceStart, texts: Sequence[tuple[int, ...]]) -> None:
        self._texts = [text for text in dict.fromkeys(texts) if len(text) > 1]
        super().__init__(start)

    def plan(self) -> SequencePlan | None:
        if not self.num_forwards:
            return super().plan()
        if self.num_forwards > len(self._texts):
            return None
        text, begin = self._texts[self.num_forwards - 1], len(self.prompt)
        masked = tuple(range(begin + 1, begin + len(text)))
        row = RowPlan(begin, text[:-1], begin, (), masked, causal_end=masked[-1], logit_shift=1)
        return SequencePlan(start=begin, num_new=0, rows=(row,), max_rows=1, winner_commits=False, prefix_length=begin)

    def extend(self, branch: Branch) -> Branch:
        return branch.open_block(self.params.max_new_tokens, self.mask) if branch.end < self.limit else branch

    def choose(self, branch: Branch, predicted: list[Fill]) -> tuple[list[Fill], int]:
        return [], 0


def begin_masked(start: SequenceStart, texts: Sequence[tuple[int, ...]]) -> Strategy:
    """As ``begin``, for texts of at most ``params.max_new_tokens`` tokens as the answer."""
    if start.properties.is_causal:
        return InOrder(start, texts)
    return MaskedWindow(start) if start.params.is_pipelined else MaskedCanvas(start)
