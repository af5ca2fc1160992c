"""Branches over the tokens of one uncertain position, the pivot, as in RPS (arXiv 2608.11742).

RPS takes as pivot the most uncertain position at which few tokens have most of the probability, so that one of them is
probably right, and tries each of these tokens. Which one is best shows in what it does to the other masked positions M:
a token c at the pivot i scores -(1 / (|M| - 1)) * sum of H(p_j) over the other j in M + lambda * log p_i(c).

What is our own reading, because LoPA has an anchor and D2F a window of blocks:

- The pivot lies in the first block that has masks. Later blocks wait for this one, and they are uncertain because it is
  not filled.
- The anchor is a branch as well, with a mask at the pivot. It is scored by the same other positions, and commits to no
  token, so its second term is 0. So a token wins only if it makes the others surer by more than its own improbability
  costs.
- A token that ends the answer is tried only where it is the most probable one. Behind it no block is opened, so the
  branch would be compared by fewer positions, and sure ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set

from lopa_ascend.config import DecodingParams
from lopa_ascend.types import Fill, RowPlan, RowResult


def pivot_fills(
    row: RowPlan, result: RowResult, open_positions: Sequence[Fill], params: DecodingParams, ends: Set[int]
) -> list[Fill]:
    """The most probable tokens of the pivot, best first; none if there is no pivot.

    The pivot is the position of highest entropy, the earliest among equals, of those whose candidates have the
    probability ``pivot_mass`` together.

    Args:
        row: the winner's.
        result: the predictions for it, with candidates.
        open_positions: where the pivot may be: the predictions of positions that are still masked.
        ends: token ids that end the answer.
    """
    at = dict(zip(row.masked, zip(result.confidences, result.candidates, strict=True), strict=True))
    possible = [
        fill for fill in open_positions if math.fsum(prob for _, prob in at[fill.position][1]) >= params.pivot_mass
    ]
    if not possible:
        return []
    pivot = min(possible, key=lambda fill: (at[fill.position][0], fill.position))
    by_probability = params.ranking != params.confidence
    return [
        Fill(pivot.position, token, prob, prob if by_probability else pivot.confidence)
        for rank, (token, prob) in enumerate(at[pivot.position][1])
        if prob and (not rank or token not in ends)
    ]
