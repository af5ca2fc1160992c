"""A decoding strategy in forty lines: LoPA that trusts near positions more than far ones, and that spends lookahead
branches only where it would otherwise wait. docs/add-a-decoding.md explains it."""

from __future__ import annotations

from lopa_ascend.decode.acceptance import most_confident
from lopa_ascend.decode.blocks import Branch
from lopa_ascend.decode.lopa import Lopa
from lopa_ascend.types import Fill

SLOPE = 0.002
"""How much surer a prediction must be for each position between the block's first mask and its own."""


class NearFirst(Lopa):
    """One sequence. Fills near positions sooner, and looks ahead only after a pass in which no rule accepted any."""

    def choose(self, branch: Branch, predicted: list[Fill]) -> tuple[list[Fill], int]:
        """In each block, what is above a threshold that rises from tau_conf with the distance from the first mask. A
        fully activated block fills at least its most confident position, as under D2F."""
        chosen: list[Fill] = []
        fallbacks = 0
        for block in branch.active_blocks():
            here = [fill for fill in predicted if block.start <= fill.position < block.end]
            accepted = [fill for fill in here if fill.max_prob > self._threshold(fill.position - here[0].position)]
            if here and not accepted and block.activated:
                accepted = most_confident(here)
                fallbacks += 1
            chosen += accepted
        return chosen, fallbacks

    def _threshold(self, distance: int) -> float:
        return min(self.params.tau_conf + SLOPE * distance, (1 + self.params.tau_conf) / 2)

    def spawn(self, anchor: Branch, open_positions: list[Fill]) -> list[Branch]:
        """The rows of the next pass: the anchor, and before it lookahead branches if the last pass was stuck."""
        return super().spawn(anchor, open_positions if self.is_stuck else [])
