"""Editing: the passes of an open block predict its filled positions too, and may replace their tokens (LLaDA2.1)."""

from __future__ import annotations

from collections.abc import Sequence

from lopa_ascend.decode.acceptance import float32
from lopa_ascend.decode.blocks import BlockState, Branch
from lopa_ascend.types import Edit, Fill, RowPlan, RowResult


class NoEditing:
    """In place of ``Editing`` if filled positions stay as they are."""

    is_on = False
    checks = 0
    """See ``Block.checks_left``, of a new block."""

    def predicted_positions(self, branch: Branch, masked: list[int]) -> list[int]:
        """The positions that a pass predicts, given the masked ones."""
        return masked

    def edits(self, branch: Branch, predicted: Sequence[Fill]) -> list[Edit]:
        """The tokens that the predictions replace."""
        return []

    def of_masks(self, branch: Branch, predicted: list[Fill]) -> list[Fill]:
        """The predictions for masked positions."""
        return predicted

    def scored(self, branch: Branch, row: RowPlan, result: RowResult) -> Sequence[float]:
        """The confidences of the masked positions, in order."""
        return result.confidences

    def firm(self, branch: Branch) -> tuple[int, ...]:
        """The generated tokens, masks included, up to the first that may be replaced."""
        return branch.tokens


NO_EDITING = NoEditing()


class Editing(NoEditing):
    """Replaces a token if another one is more probable than ``threshold``. ``checks``: see ``Block.checks_left``."""

    is_on = True

    def __init__(self, threshold: float, checks: int, mask: int) -> None:
        self._least, self.checks, self._mask = float32(threshold), checks, mask

    def predicted_positions(self, branch: Branch, masked: list[int]) -> list[int]:
        return [p for block in branch.active_blocks() for p in range(max(block.start, branch.first), block.end)]

    def edits(self, branch: Branch, predicted: Sequence[Fill]) -> list[Edit]:
        return [
            Edit(fill.position, fill.token, fill.max_prob, fill.confidence, held)
            for fill in predicted
            if (held := branch.token_at(fill.position)) not in (self._mask, fill.token) and fill.max_prob > self._least
        ]

    def of_masks(self, branch: Branch, predicted: list[Fill]) -> list[Fill]:
        return [fill for fill in predicted if branch.token_at(fill.position) == self._mask]

    def scored(self, branch: Branch, row: RowPlan, result: RowResult) -> Sequence[float]:
        at = zip(row.masked, result.confidences, strict=True)
        return [confidence for position, confidence in at if branch.token_at(position) == self._mask]

    def firm(self, branch: Branch) -> tuple[int, ...]:
        final = [block.end for block in branch.blocks if block.state is not BlockState.ACTIVE]
        return branch.tokens[: max(0, final[-1] - branch.first)]
