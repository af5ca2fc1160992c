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
- A token that ends the answer is tried only if it is the most probable one. No block is opened after such a token, so
  the branch would be scored by fewer positions, all of them sure, and would win too easily.
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

    A position qualifies if its candidates together have at least the probability ``pivot_mass``. The pivot is the
    qualifying position with the highest entropy, the earliest among equals.

    Args:
        row: the winner's row.
        result: the predictions for that row, with candidates.
        open_positions: the predictions for the positions that are still masked, one of which may be the pivot.
        ends: token ids that end the answer.
    """
    neg_entropy_at = dict(zip(row.masked, result.confidences, strict=True))
    candidates_at = dict(zip(row.masked, result.candidates, strict=True))

    def mass(fill: Fill) -> float:
        return math.fsum(prob for _, prob in candidates_at[fill.position])

    possible = [fill for fill in open_positions if mass(fill) >= params.pivot_mass]
    if not possible:
        return []
    pivot = min(possible, key=lambda fill: (neg_entropy_at[fill.position], fill.position))
    ranks_by_probability = params.ranking != params.confidence
    fills = []
    for rank, (token, prob) in enumerate(candidates_at[pivot.position]):
        is_excluded = rank > 0 and token in ends
        if prob == 0 or is_excluded:
            continue
        fills.append(Fill(pivot.position, token, prob, prob if ranks_by_probability else pivot.confidence))
    return fills
