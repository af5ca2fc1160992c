"""LoPA: lookahead branches beside another decoding's anchor, and the choice of the winner (SPEC sections 4 to 6, paper
Eq. 2).

A branch's score is compared exactly, as a ratio of integers: confidences become round(c * 2^16), so every rank and
every device that agrees on the confidences agrees on the winner.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from lopa_ascend.config import DecodingParams
from lopa_ascend.decode.blocks import Branch
from lopa_ascend.decode.canvas import Parallel
from lopa_ascend.decode.d2f import D2F
from lopa_ascend.decode.strategy import Strategy
from lopa_ascend.types import Fill, RowResult, SequencePlan

SCALE = 1 << 16


def fixed_point(confidence: float) -> int:
    """A confidence c on the integer grid of branch scores: c * 2^16, rounded half to even."""
    return round(confidence * SCALE)


def branch_score(confidences: Sequence[float], params: DecodingParams) -> tuple[int, int]:
    """The score of a branch, as a fraction.

    "mean" averages the confidences of all n masked positions, "tail" the max(1, floor(n * tail_fraction)) lowest ones,
    and "window" takes the lowest mean over ``score_window`` consecutive masked positions, or over all if there are
    fewer. A branch without masks scores 1.0.

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


class Lookaheads(Strategy):
    """What gives a strategy ``params.lookaheads`` lookahead branches beside the anchor: mixed in before it."""

    @property
    def num_branches(self) -> int:
        return 1 + self.params.lookaheads

    def _scores(self, results: Sequence[RowResult]) -> list[Fraction]:
        """(1 - w) * branch score + w * confidence of the lookahead token (1.0 for the anchor), exactly, where w is
        ``creation_weight``."""
        weight = Fraction(fixed_point(self.params.creation_weight), SCALE)
        scores = []
        for branch, result in zip(self.branches, results, strict=True):
            total, count = branch_score(result.confidences, self.params)
            creation = SCALE if branch.lookahead is None else fixed_point(branch.lookahead.confidence)
            scores.append((1 - weight) * Fraction(total, count * SCALE) + weight * Fraction(creation, SCALE))
        return scores

    def _select(self, plan: SequencePlan, results: Sequence[RowResult]) -> tuple[int, list[float]]:
        scores = self._scores(results)
        return scores.index(max(scores)), [float(score) for score in scores]

    def _spawn(self, anchor: Branch, open_positions: list[Fill]) -> list[Branch]:
        """One branch for each of the most confident open positions, and the anchor after them."""
        ranked = sorted(open_positions, key=lambda fill: (-fill.confidence, fill.position))
        anchor.lookahead = None
        branches = []
        for fill in ranked[: self.params.lookaheads]:
            branch = anchor.copy()
            branch.fill(fill, self.ends)
            branch.lookahead = fill
            branches.append(branch)
        return [*branches, anchor]

    def _finish_without_forward(self) -> bool:
        """A lookahead branch without masks scores 1.0 and would win the pass with the tokens that it has already."""
        if not self.params.finish_at_eos or self.params.creation_weight:
            return False
        done = next((branch for branch in self.branches if not branch.masks), None)
        if done is None:
            return False
        self.winner = done
        return True


class Lopa(Lookaheads, D2F):
    """One sequence under LoPA over D2F, as published."""


class LopaParallel(Lookaheads, Parallel):
    """One sequence under LoPA over parallel decoding of a whole canvas.

    Every branch computes prompt and canvas. It predicts, and is scored by, the first block in which it has masks; where
    its lookahead token was the last of a block, that is the next one.
    """
