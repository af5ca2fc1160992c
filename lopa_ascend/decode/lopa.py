"""LoPA: lookahead branches beside another decoding's anchor, and the choice of the winner (SPEC sections 4 to 6, paper
Eq. 2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import ClassVar

from lopa_ascend.config.combinations import Rule
from lopa_ascend.config.decodings import Variant
from lopa_ascend.config.kinds import Integer
from lopa_ascend.config.settings import GraphSupport, research
from lopa_ascend.decode.block_pipeline import BlockPipeline, PipelineParams
from lopa_ascend.decode.blocks import Branch
from lopa_ascend.decode.branch_scores import ScoreParams, branch_scores
from lopa_ascend.decode.canvas import Parallel, ParallelParams, first_masked
from lopa_ascend.decode.causal import CausalBlocks
from lopa_ascend.decode.fast_dllm import FastDllm, FastDllmParams
from lopa_ascend.decode.fast_dllm_v2 import FastDllmV2, FastDllmV2Params
from lopa_ascend.decode.strategy import Only, Strategy
from lopa_ascend.types import Fill, RowResult, SequencePlan


@dataclass(frozen=True, kw_only=True)
class BaseParams:
    base: str = research(
        "d2f",
        Variant(attribute="base"),
        'the decoding that "lopa" and "s2d2" extend: it decodes the anchor branch, and "lopa" adds lookahead branches; '
        'it fills what "s2d2" does not check',
        graphs=GraphSupport.DEFAULT,
    )


@dataclass(frozen=True, kw_only=True)
class LookaheadParams(BaseParams, ScoreParams):
    branch_acceptance: str = research(
        "published",
        Variant(attribute="branch_acceptance"),
        'which branch wins: "published": the one with the highest score; "verified": the one that fills most '
        'positions, among the anchor and the branches whose lookahead token the base would fill now; "exact": the one '
        "that the base would have after this pass, so that the answer is the base's",
        graphs=GraphSupport.COMPILED,
    )


class Lookaheads(Strategy):
    """Mixin: up to ``params.lookaheads`` lookahead branches beside the anchor. It precedes the extended strategy."""

    description = "an anchor branch and lookahead branches"
    told_apart_by = ("base", "branch_acceptance")
    branch_acceptance: ClassVar[str] = "published"
    default_branches = 3
    own: LookaheadParams
    only: ClassVar[Only] = {"num_branches": None}

    @property
    def num_wanted(self) -> int:
        """The most lookahead branches of the next pass; with ``num_branches`` "auto" 0 if they do not pay."""
        if self.params.is_auto and (self.is_crowded if self.params.follows_load else not self.is_stuck):
            return 0
        return self.params.lookaheads

    def score(self, plan: SequencePlan, results: Sequence[RowResult]) -> list[Fraction]:
        confidences = [self.editing.scored(*each) for each in zip(self.branches, plan.rows, results, strict=True)]
        return branch_scores(self.branches, confidences, self.own)

    def select(self, plan: SequencePlan, results: Sequence[RowResult]) -> tuple[int, Branch, list[float]]:
        """The highest score wins, the earliest among equals."""
        scores = self.score(plan, results)
        winner = scores.index(max(scores))
        return winner, self.branches[winner], [float(score) for score in scores]

    def spawn(self, anchor: Branch, open_positions: list[Fill]) -> list[Branch]:
        """One branch for each of the most confident open positions, then the anchor."""
        ranked = sorted(open_positions, key=lambda fill: (-fill.confidence, fill.position))
        return self.branches_with(anchor, [[fill] for fill in ranked[: self.num_wanted]])

    def branches_with(self, anchor: Branch, drafts: Sequence[Sequence[Fill]]) -> list[Branch]:
        """A lookahead branch for each draft (its own tokens), then the anchor. A draft is left out if none of its
        tokens fits the grammar."""
        branches = [self.grammar.follow(anchor.as_lookahead(draft, self.ends), self.extend) for draft in drafts]
        return [*(branch for branch in branches if branch.own_fills), anchor]

    @property
    def known_winner(self) -> Branch | None:
        """A lookahead branch without masks would score 1.0, the highest score. But with ``creation_weight`` it may not,
        and with ``editing_threshold`` the pass may still change tokens."""
        if not self.params.finish_at_eos or self.own.creation_weight or self.editing.is_on:
            return None
        return next((branch for branch in self.branches[:-1] if not branch.masks), None)


@dataclass(frozen=True, kw_only=True)
class DraftParams(LookaheadParams):
    lookahead_depth: int = research(
        1,
        Integer(1, 16),
        "most tokens that a lookahead branch has in addition to the anchor's; above 1 one pass may replace several "
        'passes of the base; needs `branch_acceptance` "verified" or "exact"',
        graphs=GraphSupport.DEFAULT,
    )


DRAFTS = (
    # With "exact" a draw would depend on the number of its pass.
    Rule("branch_acceptance", "temperature", (0,), ("verified",), "verified"),
    Rule("lookahead_depth", "branch_acceptance", ("verified", "exact")),
)


@dataclass(frozen=True, kw_only=True)
class LopaParams(DraftParams, PipelineParams):
    """LoPA over D2F."""


class Lopa(Lookaheads, BlockPipeline):
    """One sequence under LoPA over D2F, as published."""

    has_graphs = True
    parameters = LopaParams
    own: LopaParams
    rules = (
        *DRAFTS,
        Rule("denoising_steps", "branch_acceptance", ("published",)),  # a pass that a branch saves would be counted
    )


@dataclass(frozen=True, kw_only=True)
class LopaFastDllmParams(LookaheadParams, FastDllmParams):
    """LoPA over Fast-dLLM."""


class LopaFastDllm(Lookaheads, FastDllm):
    """LoPA over Fast-dLLM. A block's first pass computes the anchor alone, and leaves its keys and values in every
    slot. Later passes' branches read them there: stale by design, they are the same for all branches. A lookahead
    branch never fills a block's last mask, because the next block needs a first pass."""

    parameters = LopaFastDllmParams
    own: LopaFastDllmParams
    only: ClassVar[Only] = {"eos_last": ()}

    def plan(self) -> SequencePlan | None:
        plan = super().plan()
        if plan is None or plan.start > 0:
            return plan
        # Only the first pass of a block computes from position 0 on.
        return replace(plan, fills_all_slots=True)

    def spawn(self, anchor: Branch, open_positions: list[Fill]) -> list[Branch]:
        *lookaheads, anchor = super().spawn(anchor, open_positions)
        if lookaheads:
            block = first_masked(anchor)
            lookaheads = [branch for branch in lookaheads if branch.masks and first_masked(branch).start == block.start]
        return [*lookaheads, anchor]


@dataclass(frozen=True, kw_only=True)
class LopaFastDllmV2Params(LookaheadParams, FastDllmV2Params):
    """LoPA over Fast-dLLM v2."""


class LopaFastDllmV2(Lookaheads, FastDllmV2):
    """LoPA over Fast-dLLM v2. Lookahead branches fill positions of the anchor's sub-block. One that fills its last mask
    predicts, and is scored by, the next sub-block; if the block had no other mask, the next block's first position."""

    parameters = LopaFastDllmV2Params
    own: LopaFastDllmV2Params
    only: ClassVar[Only] = {"sub_block_cache": ()}


@dataclass(frozen=True, kw_only=True)
class LopaCausalBlocksParams(DraftParams, FastDllmV2Params):
    """LoPA over causal blocks."""


class LopaCausalBlocks(Lookaheads, CausalBlocks):
    """LoPA over causal blocks. A lookahead branch never fills a block's last mask: the causal pass that commits a block
    is the anchor's alone."""

    parameters = LopaCausalBlocksParams
    own: LopaCausalBlocksParams
    rules = DRAFTS

    def branches_with(self, anchor: Branch, drafts: Sequence[Sequence[Fill]]) -> list[Branch]:
        *lookaheads, anchor = super().branches_with(anchor, drafts)
        # A grammar may have filled the last mask, and opened the next block.
        return [*(branch for branch in lookaheads if branch.masks and branch.end == anchor.end), anchor]


@dataclass(frozen=True, kw_only=True)
class LopaParallelParams(LookaheadParams, ParallelParams):
    """LoPA over parallel decoding."""


class LopaParallel(Lookaheads, Parallel):
    """LoPA over parallel decoding. Every branch predicts, and is scored by, the first block in which it has masks."""

    parameters = LopaParallelParams
    own: LopaParallelParams
    only: ClassVar[Only] = {"eos_last": ()}
    computes_whole_branches = True
