"""Scores of branches: what a pass predicts of each branch becomes one number, and the best branch wins (SPEC section 4,
paper Eq. 2).

A score is compared exactly, as a ratio of integers: confidences become round(c * 2^16), so every rank and every device
that agrees on the confidences agrees on the winner.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from lopa_ascend.config import DecodingParams
from lopa_ascend.decode.blocks import Branch
from lopa_ascend.types import RowPlan, RowResult

SCALE = 1 << 16


def fixed_point(confidence: float) -> int:
    """A confidence c on the integer grid of branch scores: c * 2^16, rounded half to even."""
    return round(confidence * SCALE)


def branch_score(confidences: Sequence[float], params: DecodingParams) -> tuple[int, int]:
    """The score of a branch by its confidences, as a fraction.

    "mean" averages the confidences of all n masked positions. So does "entropy", with negative entropies in nats as
    confidences even where positions are ranked by probability. "tail" averages the max(1, floor(n * tail_fraction))
    lowest ones, and "window" takes the lowest mean over ``score_window`` consecutive masked positions, or over all if
    there are fewer. A branch without masks scores 1.0.

    Args:
        confidences: of the masked positions, in the order of the positions.

    Returns:
        (sum of the fixed-point confidences, how many they are).
    """
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
    branches: Sequence[Branch], rows: Sequence[RowPlan], results: Sequence[RowResult], params: DecodingParams
) -> list[Fraction]:
    """(1 - w) * score + w * confidence of the lookahead token (1.0 for the anchor), exactly, where w is
    ``creation_weight``.

    Args:
        branches: of one pass.
        rows: what the pass computed of each of them.
        results: the predictions for each of them.
    """
    weight = Fraction(fixed_point(params.creation_weight), SCALE)
    if params.branch_score == "expected":
        unweighted = _expected(branches, results, params)
    elif params.branch_score == "pivot":
        unweighted = _pivot(branches, rows, results, params)
    else:
        # Branches over tokens have entropies as confidences even if ``confidence`` is "max_prob". The entropies choose
        # the pivot; branches are then scored by probability.
        by_probability = params.ranking != params.confidence and params.branch_score != "entropy"
        totals = [branch_score(r.max_probs if by_probability else r.confidences, params) for r in results]
        unweighted = [Fraction(total, count * SCALE) for total, count in totals]
    scores = []
    for branch, score in zip(branches, unweighted, strict=True):
        creation = SCALE if branch.lookahead is None else fixed_point(branch.lookahead.confidence)
        scores.append((1 - weight) * score + weight * Fraction(creation, SCALE))
    return scores


def _expected(branches: Sequence[Branch], results: Sequence[RowResult], params: DecodingParams) -> list[Fraction]:
    """The expected number of positions that the branch has filled more than the anchor once ``tau_conf`` has been
    applied, as a share of the most that any of the branches could fill.

    A position with the probability c counts as min(1, c / tau_conf): as 1 where it passes, and else as the largest
    probability with which it can pass later, if c changes as a martingale (Markov's inequality). A lookahead branch has
    its own tokens filled already.
    """
    tau = fixed_point(params.tau_conf)

    def passing(prob: float) -> int:
        """min(1, prob / tau_conf) on the integer grid of branch scores."""
        return min(SCALE, fixed_point(prob) * SCALE // tau) if tau else SCALE

    num_own = [len(branch.own_fills) for branch in branches]
    most = max(own + len(result.max_probs) for own, result in zip(num_own, results, strict=True))
    scores = []
    for own, result in zip(num_own, results, strict=True):
        if result.max_probs:
            filled = own * SCALE + sum(map(passing, result.max_probs))
            scores.append(Fraction(filled, most * SCALE))
        else:
            scores.append(Fraction(1))
    return scores


def _pivot(
    branches: Sequence[Branch], rows: Sequence[RowPlan], results: Sequence[RowResult], params: DecodingParams
) -> list[Fraction]:
    """RPS (arXiv 2608.11742): the mean of the negative entropies of a branch's masked positions but the pivot, 0 if
    there are no others; and for a lookahead branch ``pivot_weight`` times the logarithm of its token's probability.

    The anchor, whose pivot is masked, is scored by the same other positions, and commits to no token.
    """
    pivots = {branch.lookahead.position for branch in branches if branch.lookahead is not None}
    weight = fixed_point(params.pivot_weight)
    scores = []
    for branch, row, result in zip(branches, rows, results, strict=True):
        at = zip(row.masked, result.confidences, strict=True)
        others = [fixed_point(confidence) for position, confidence in at if position not in pivots]
        score = Fraction(sum(others), SCALE * max(1, len(others)))
        if branch.lookahead is not None:
            score += Fraction(weight * fixed_point(math.log(branch.lookahead.max_prob)), SCALE**2)
        scores.append(score)
    return scores
