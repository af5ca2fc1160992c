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
from lopa_ascend.decode.fast_dllm_v2 import FastDllmV2
from lopa_ascend.decode.strategy import Strategy
from lopa_ascend.types import Fill, RowResult, SequencePlan


class Lookaheads(Strategy):
    """Mixin that gives a strategy up to ``params.lookaheads`` lookahead branches beside the anchor. It precedes the
    strategy in the list of base classes."""

    @property
    def num_wanted(self) -> int:
        """The most lookahead branches of the next pass. With ``num_branches`` "auto" it is 0 where they do not pay."""
        if self.params.is_auto and (self.is_crowded if self.params.follows_load else not self.is_stuck):
            return 0
        return self.params.lookaheads

    def score(self, plan: SequencePlan, results: Sequence[RowResult]) -> list[Fraction]:
        """The branch scores, exactly. The arguments are those of ``absorb``."""
        confidences = [self.editing.scored(*each) for each in zip(self.branches, plan.rows, results, strict=True)]
        return branch_scores(self.branches, confidences, self.params)

    def select(self, plan: SequencePlan, results: Sequence[RowResult]) -> tuple[int, Branch, list[float]]:
        """The branch with the highest score, the earliest among equals."""
        scores = self.score(plan, results)
        winner = scores.index(max(scores))
        return winner, self.branches[winner], [float(score) for score in scores]

    def spawn(self, anchor: Branch, open_positions: list[Fill]) -> list[Branch]:
        """One branch for each of the most confident open positions, and the anchor after them."""
        ranked = sorted(open_positions, key=lambda fill: (-fill.confidence, fill.position))
        return self.branches_with(anchor, [[fill] for fill in ranked[: self.num_wanted]])

    def branches_with(self, anchor: Branch, drafts: Sequence[Sequence[Fill]]) -> list[Branch]:
        """A lookahead branch for each of ``drafts``, which are its own tokens; and the anchor after them. A draft none
        of whose tokens fits a grammar is left out."""
        branches = [self.grammar.follow(anchor.as_lookahead(draft, self.ends), self.extend) for draft in drafts]
        return [*(branch for branch in branches if branch.own_fills), anchor]

    @property
    def known_winner(self) -> Branch | None:
        """A lookahead branch without masks would score 1.0, the highest score. This does not hold with a
        ``creation_weight``, and with ``editing_threshold`` the pass may still change tokens."""
        if not self.params.finish_at_eos or self.params.creation_weight or self.editing.is_on:
            return None
        return next((branch for branch in self.branches[:-1] if not branch.masks), None)


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

    def spawn(self, anchor: Branch, open_positions: list[Fill]) -> list[Branch]:
        if len(open_positions) == 1:
            open_positions = []
        *lookaheads, anchor = super().spawn(anchor, open_positions)
        if lookaheads:  # a grammar may force the last mask of a block, too
            block = first_masked(anchor)
            lookaheads = [branch for branch in lookaheads if branch.masks and first_masked(branch).start == block.start]
        return [*lookaheads, anchor]


class LopaFastDllmV2(Lookaheads, FastDllmV2):
    """One sequence under LoPA over Fast-dLLM v2.

    Lookahead branches fill positions of the anchor's sub-block. One that fills the last mask of its sub-block predicts,
    and is scored by, the next one; if it was the last mask of a block, by the first position of the next block.
    """


class LopaParallel(Lookaheads, Parallel):
    """One sequence under LoPA over parallel decoding of a whole canvas.

    Every branch computes prompt and canvas. It predicts, and is scored by, the first block in which it has masks; where
    its lookahead token was the last of a block, that is the next one.
    """
