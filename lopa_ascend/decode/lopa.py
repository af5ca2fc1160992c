"""LoPA: lookahead branches beside another decoding's anchor, and the choice of the winner (SPEC sections 4 to 6, paper
Eq. 2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

from lopa_ascend.decode.blocks import Branch
from lopa_ascend.decode.branch_scores import branch_scores
from lopa_ascend.decode.canvas import Parallel, first_masked
from lopa_ascend.decode.d2f import D2F
from lopa_ascend.decode.fast_dllm import FastDllm
from lopa_ascend.decode.pivot import pivot_fills
from lopa_ascend.decode.strategy import Strategy
from lopa_ascend.types import Fill, RowPlan, RowResult, SequencePlan


class Lookaheads(Strategy):
    """Mixin that gives a strategy up to ``params.lookaheads`` lookahead branches beside the anchor. It precedes the
    strategy in the list of base classes."""

    _max_spawned = 1
    """With ``params.follows_load``: the most lookahead branches that are made for the next pass. The load decides how
    many of them are kept."""

    @property
    def _num_wanted(self) -> int:
        """The most lookahead branches of the next pass.

        With ``num_branches`` "auto" that does not follow the load, a request gets all its branches after a pass in
        which no rule accepted anything, and otherwise none.
        """
        most = self.params.lookaheads
        if self.params.follows_load:
            return min(most, self._max_spawned)
        if self.params.is_auto and not self.is_stuck:
            return 0
        return most

    def keep(self, plan: SequencePlan, num_lookaheads: int) -> SequencePlan:
        # Room for the number to double from pass to pass, but no work for branches that are hardly ever kept.
        self._max_spawned = 2 * num_lookaheads + 1
        return super().keep(plan, num_lookaheads)

    def _predicted(self, row: RowPlan, result: RowResult) -> list[Fill]:
        """The predictions as in ``Strategy``, but ranked by probability if the pass reports entropies only because
        branches need them."""
        predicted = super()._predicted(row, result)
        if self.params.ranking == self.params.confidence:
            return predicted
        return [replace(fill, confidence=fill.max_prob) for fill in predicted]

    def _scores(self, plan: SequencePlan, results: Sequence[RowResult]) -> list[Fraction]:
        return branch_scores(self.branches, plan.rows, results, self.params)

    def _select(self, plan: SequencePlan, results: Sequence[RowResult]) -> tuple[int, list[float]]:
        scores = self._scores(plan, results)
        return scores.index(max(scores)), [float(score) for score in scores]

    def _spawn(self, anchor: Branch, open_positions: list[Fill]) -> list[Branch]:
        """One branch for each of the most confident open positions, or for each of the most probable tokens of one
        open position; and the anchor after them."""
        if self.params.branch_candidates == "tokens":
            ranked = self._pivot_fills(anchor, open_positions)
        else:
            ranked = sorted(open_positions, key=lambda fill: (-fill.confidence, fill.position))
        return self._branches(anchor, [[fill] for fill in ranked[: self._num_wanted]])

    def _pivot_fills(self, anchor: Branch, open_positions: list[Fill]) -> list[Fill]:
        """What branches over the tokens of one position fill into it, best first."""
        if not open_positions or not self.params.lookaheads:
            return []
        block = first_masked(anchor)
        here = [fill for fill in open_positions if fill.position < block.end]
        row, result = self._won
        return pivot_fills(row, result, here, self.params, self.ends)

    def _branches(self, anchor: Branch, drafts: Sequence[Sequence[Fill]]) -> list[Branch]:
        """A lookahead branch for each of ``drafts``, which are its own tokens; and the anchor after them."""
        anchor.become_anchor()
        branches = []
        for draft in drafts:
            branch = anchor.copy()
            branch.become_lookahead(draft, self.ends)
            branches.append(branch)
        return [*branches, anchor]

    def _finish_without_forward(self) -> bool:
        """Ends the sequence if a lookahead branch has no masks left: it would score 1.0, the highest score, and win the
        next pass unchanged. This does not hold with the score "pivot" or with a ``creation_weight``."""
        if not self.params.finish_at_eos or self.params.creation_weight or self.params.branch_score == "pivot":
            return False
        done = next((branch for branch in self.branches if not branch.masks), None)
        if done is None:
            return False
        self.winner = done
        return True


class Lopa(Lookaheads, D2F):
    """One sequence under LoPA over D2F, as published."""


class LopaFastDllm(Lookaheads, FastDllm):
    """One sequence under LoPA over Fast-dLLM.

    The first pass of a block computes the anchor alone, and leaves the anchor's keys and values in every slot. The
    branches of the later passes read them there: these keys and values are stale by design, so they are the same for
    all branches. A lookahead branch never fills the last mask of a block, because the next block needs a first pass.
    """

    def plan(self) -> SequencePlan | None:
        plan = super().plan()
        if plan is None or plan.start > 0:
            return plan
        # Only the first pass of a block computes from position 0 on.
        return replace(plan, fills_all_slots=True)

    def _spawn(self, anchor: Branch, open_positions: list[Fill]) -> list[Branch]:
        if len(open_positions) == 1:
            open_positions = []
        return super()._spawn(anchor, open_positions)


class LopaParallel(Lookaheads, Parallel):
    """One sequence under LoPA over parallel decoding of a whole canvas.

    Every branch computes prompt and canvas. It predicts, and is scored by, the first block in which it has masks; where
    its lookahead token was the last of a block, that is the next one.
    """
