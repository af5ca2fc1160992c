"""Branch scores: what a pass predicts of each branch becomes one number, and the best branch wins (SPEC section 4,
paper Eq. 2).

A score is an exact ratio of integers: confidences become round(c * 2^16), so all ranks and devices that agree on the
confidences agree on the winner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from lopa_ascend.config.kinds import INT32_MAX, Choice, Integer, Number
from lopa_ascend.config.settings import GraphSupport, research
from lopa_ascend.decode.blocks import Branch

SCALE = 1 << 16
BRANCH_SCORES = ("mean", "tail", "window")


@dataclass(frozen=True, kw_only=True)
class ScoreParams:
    branch_score: str = research(
        "mean",
        Choice(BRANCH_SCORES),
        'score of a branch from the confidences of its masked positions: "mean" of all; "tail": mean of the '
        'lowest; "window": lowest mean over consecutive positions',
        graphs=GraphSupport.DEFAULT,
        is_inert=True,
    )
    tail_fraction: float = research(
        0.5,
        Number(0, 1),
        'fraction of the masked positions that `branch_score` "tail" averages',
        group=None,
        is_inert=True,
    )
    score_window: int = research(
        8,
        Integer(1, INT32_MAX),
        'number of consecutive masked positions that `branch_score` "window" averages',
        group=None,
        is_inert=True,
    )
    creation_weight: float = research(
        0.0,
        Number(0, 1),
        "weight of the confidence of a branch's own lookahead token in the branch's score",
        group=None,
        graphs=GraphSupport.DEFAULT,
        is_inert=True,
    )


def fixed_point(confidence: float) -> int:
    """A confidence on the integer grid of branch scores, rounded half to even."""
    return round(confidence * SCALE)


def branch_score(confidences: Sequence[float], params: ScoreParams) -> tuple[int, int]:
    """(sum of the fixed-point confidences, how many they are), from the masked positions' confidences in order: "mean"
    takes all n, "tail" the max(1, floor(n * tail_fraction)) lowest, "window" the ``score_window`` consecutive ones with
    the lowest mean, or all if there are fewer. A branch without masks scores 1.0."""
    values = [fixed_point(c) for c in confidences]
    if not values:
        return SCALE, 1
    if params.branch_score == "tail":
        values = sorted(values)[: max(1, int(len(values) * params.tail_fraction))]
    elif params.branch_score == "window" and len(values) > params.score_window:
        size = params.score_window
        window_sum = lowest = sum(values[:size])
        for leaving, entering in zip(values, values[size:], strict=False):
            window_sum += entering - leaving
            lowest = min(lowest, window_sum)
        return lowest, size
    return sum(values), len(values)


def branch_scores(
    branches: Sequence[Branch], confidences: Sequence[Sequence[float]], params: ScoreParams
) -> list[Fraction]:
    """Exact scores. ``confidences``: for each branch those of its masked positions."""
    totals = [branch_score(values, params) for values in confidences]
    return with_creation([Fraction(total, count * SCALE) for total, count in totals], branches, params)


def with_creation(scores: Sequence[Fraction], branches: Sequence[Branch], params: ScoreParams) -> list[Fraction]:
    """(1 - w) * score + w * confidence of the lookahead token (1.0 for the anchor), where w is ``creation_weight``."""
    weight = Fraction(fixed_point(params.creation_weight), SCALE)
    weighted = []
    for score, branch in zip(scores, branches, strict=True):
        creation = SCALE if branch.lookahead is None else fixed_point(branch.lookahead.confidence)
        weighted.append((1 - weight) * score + weight * Fraction(creation, SCALE))
    return weighted
