"""Variants of LoPA that were measured and not kept: two acceptance rules, two branch scores, and branches over tokens.

Each is a decoding of its own over D2F's window of blocks, and goes with the parameters of "lopa". With
``num_branches`` 0 the acceptance rules extend "d2f". docs/add-a-decoding.md explains how such a package is made.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from lopa_ascend.config import DecodingParams, ParameterError
from lopa_ascend.config.kinds import Number
from lopa_ascend.config.settings import parameter
from lopa_ascend.decode.acceptance import before_refused, by_probability
from lopa_ascend.decode.blocks import Branch
from lopa_ascend.decode.branch_scores import SCALE, fixed_point, with_creation
from lopa_ascend.decode.canvas import first_masked
from lopa_ascend.decode.lopa import Lopa, LopaParams
from lopa_ascend.types import Alternatives, Fill, RowPlan, RowResult, SequencePlan

# ---- acceptance rules ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class EntropyBoundParams(LopaParams):
    acceptance_gamma: float = parameter(
        0.1, Number(0, 1000), "the bound of entropies, in nats; higher is faster and less accurate"
    )


class EntropyBound(Lopa):
    """LoPA that fills positions together as EB-Sampler does (arXiv 2505.24857).

    With entropies H_1 <= H_2 <= ... in nats, the first n are accepted for the largest n with
    H_1 + ... + H_n - max H_i <= acceptance_gamma. The left side bounds how far the product of the n distributions is
    from their joint distribution. One position alone always passes.
    """

    confidence = "neg_entropy"
    parameters = EntropyBoundParams
    own: EntropyBoundParams

    def accept(self, predicted: Sequence[Fill]) -> list[Fill]:
        """The sum of entropies grows with n, so the first n that fails ends the search."""
        ranked = sorted(predicted, key=lambda fill: (-fill.confidence, fill.position))
        total = 0.0  # of the entropies before the n-th, which is the largest
        allowed = []
        for fill in ranked:
            allowed.append(total <= self.own.acceptance_gamma)
            total -= fill.confidence
        return before_refused(ranked, allowed)


@dataclass(frozen=True, kw_only=True)
class FrechetParams(LopaParams):
    acceptance_delta: float = parameter(
        0.25, Number(0, 1), "the bound of probabilities; lower is faster and less accurate"
    )


class Frechet(Lopa):
    """LoPA that fills positions together by Frechet's bound (arXiv 2606.02955).

    With probabilities c_1 >= c_2 >= ..., the first n are accepted for the largest n with
    max(0, c_1 + ... + c_n - (n - 1)) - (1 - c_n) > acceptance_delta. The first term is Frechet's lower bound of the
    probability that all n tokens are right together.
    """

    parameters = FrechetParams
    own: FrechetParams

    def accept(self, predicted: Sequence[Fill]) -> list[Fill]:
        """The bound falls with n and 1 - c_n grows, so the first n that fails ends the search."""
        ranked = by_probability(predicted)
        doubt = 0.0  # the sum of 1 - c_i: the bound is 1 - doubt
        allowed = []
        for fill in ranked:
            doubt += 1 - fill.max_prob
            allowed.append(max(0.0, 1 - doubt) - (1 - fill.max_prob) > self.own.acceptance_delta)
        return before_refused(ranked, allowed)


# ---- branch scores ---------------------------------------------------------------------------------------------------


class ExpectedScore(Lopa):
    """LoPA whose branches are scored by the positions that they are expected to fill.

    The score is the expected number of positions filled beyond the anchor's once ``tau_conf`` has been applied, divided
    by the most that any branch could fill. A position of probability c counts as min(1, c / tau_conf): as 1 if it
    passes, and otherwise as the largest probability with which it can pass later, if c changes as a martingale
    (Markov's inequality). A lookahead branch has its own tokens filled already.
    """

    @classmethod
    def check(cls, params: DecodingParams) -> None:
        if params.acceptance != "threshold":
            message = f'"{params.acceptance}" does not go with decoding "{params.decoding}"; use "threshold"'
            raise ParameterError("acceptance", message)

    def score(self, plan: SequencePlan, results: Sequence[RowResult]) -> list[Fraction]:
        num_own = [len(branch.own_fills) for branch in self.branches]
        most = max(own + len(result.max_probs) for own, result in zip(num_own, results, strict=True))
        scores = []
        for own, result in zip(num_own, results, strict=True):
            filled = own * SCALE + sum(map(self._passing, result.max_probs))
            scores.append(Fraction(filled, most * SCALE) if result.max_probs else Fraction(1))
        return with_creation(scores, self.branches, self.own)

    def _passing(self, prob: float) -> int:
        """min(1, prob / tau_conf) on the integer grid of branch scores."""
        tau = fixed_point(self.params.tau_conf)
        return min(SCALE, fixed_point(prob) * SCALE // tau) if tau else SCALE


class EntropyScore(Lopa):
    """LoPA whose branches are scored by negative entropies, while positions are ranked by ``confidence``."""

    confidence = "neg_entropy"

    def predicted(self, row: RowPlan, result: RowResult) -> list[Fill]:
        fills = super().predicted(row, result)
        if self.params.confidence == "neg_entropy":
            return fills
        return [replace(fill, confidence=fill.max_prob) for fill in fills]


# ---- branches over tokens --------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PivotParams(LopaParams):
    pivot_mass: float = parameter(
        0.9,
        Number(0, 1),
        "a position can be the pivot if the tokens of all branches together have at least this probability there",
    )
    pivot_weight: float = parameter(
        0.1, Number(0, 1000), "weight of the log-probability of a branch's own token in the branch's score"
    )


class Pivot(EntropyScore):
    """LoPA whose branches try the most probable tokens of one uncertain position, the pivot, as in RPS
    (arXiv 2608.11742).

    RPS takes as pivot the most uncertain position at which few tokens have most of the probability, so that one of them
    is probably right, and tries each of these tokens. Which one is best shows in what it does to the other masked
    positions M: token c at pivot i scores -(1 / (|M| - 1)) * sum of H(p_j) over the other j in M + lambda * log p_i(c).

    LoPA has an anchor and D2F a window of blocks, so three rules are ours:

    - The pivot lies in the first block that has masks. Later blocks wait for this one, and they are uncertain because
      it is not filled.
    - The anchor is a branch as well, with a mask at the pivot. It is scored by the same other positions, and commits to
      no token, so its second term is 0. A token wins only if it makes the others surer by more than its own
      improbability costs.
    - A token that ends the answer is tried only if it is the most probable one. No block is opened after such a token,
      so the branch would be scored by few positions, all of them sure, and would win too easily.

    The tokens are those that ``top_logprobs`` records, so the branches begin when these have been recorded.
    """

    parameters = PivotParams
    own: PivotParams
    _open: Sequence[Fill] = ()
    """What the last pass predicted for the open positions of the first block that has masks."""
    _anchor: Branch
    """The anchor of the next pass, before it opens blocks."""
    _neg_entropy_at: dict[int, float]
    """What the last winner's row reported, by position."""

    @classmethod
    def check(cls, params: DecodingParams) -> None:
        if params.top_logprobs < params.lookaheads:
            message = (
                f"{params.top_logprobs} is less than the {params.lookaheads} branches, each of which tries a token"
            )
            raise ParameterError("top_logprobs", message)
        if params.temperature:
            raise ParameterError(
                "temperature", f'must be 0 with decoding "{params.decoding}", got {params.temperature}'
            )
        if params.bad_words or params.min_new_tokens:
            # Lists of most probable tokens hold what a position may not get.
            name = "bad_words" if params.bad_words else "min_new_tokens"
            raise ParameterError(name, f'does not go with decoding "{params.decoding}"')

    def select(self, plan: SequencePlan, results: Sequence[RowResult]) -> tuple[int, Branch, list[float]]:
        winner, branch, scores = super().select(plan, results)
        self._neg_entropy_at = dict(zip(plan.rows[winner].masked, results[winner].confidences, strict=True))
        return winner, branch, scores

    def score(self, plan: SequencePlan, results: Sequence[RowResult]) -> list[Fraction]:
        """The mean of the negative entropies of a branch's masked positions other than the pivot, 0 if there are none;
        and for a lookahead branch ``pivot_weight`` times the logarithm of its token's probability."""
        pivots = {branch.lookahead.position for branch in self.branches if branch.lookahead is not None}
        weight = fixed_point(self.own.pivot_weight)
        scores = []
        for branch, row, result in zip(self.branches, plan.rows, results, strict=True):
            at = zip(row.masked, result.confidences, strict=True)
            others = [fixed_point(confidence) for position, confidence in at if position not in pivots]
            score = Fraction(sum(others), SCALE * max(1, len(others)))
            if branch.lookahead is not None:
                score += Fraction(weight * fixed_point(math.log(branch.lookahead.max_prob)), SCALE**2)
            scores.append(score)
        return with_creation(scores, self.branches, self.own)

    def spawn(self, anchor: Branch, open_positions: list[Fill]) -> list[Branch]:
        end = first_masked(anchor).end if open_positions else 0
        self._open = [fill for fill in open_positions if fill.position < end]
        self._anchor = anchor
        return [anchor]

    def take_alternatives(self, found: Mapping[int, Alternatives]) -> None:
        super().take_alternatives(found)
        if all(fill.position in self.alternatives for fill in self._open):
            drafts = [[fill] for fill in self._tokens_of_pivot()[: self.num_wanted]]
            self.branches = [self.open(branch) for branch in self.branches_with(self._anchor, drafts)]

    @property
    def known_winner(self) -> Branch | None:
        """None: a branch without masks commits to a token and the anchor to none, so the next pass scores both."""
        return None

    def recorded_positions(self) -> set[int]:
        return {fill.position for fill in self._open}

    def _tokens_of_pivot(self) -> list[Fill]:
        """The most probable tokens of the pivot, best first; none if there is no pivot.

        A position qualifies if its tokens together have at least the probability ``pivot_mass``. The pivot is the
        qualifying position with the highest entropy, the earliest among equals.
        """
        count = self.params.lookaheads
        if not count:
            return []
        tokens_at = {fill.position: self.alternatives[fill.position][:count] for fill in self._open}
        possible = [
            fill
            for fill in self._open
            if math.fsum(prob for _, prob in tokens_at[fill.position]) >= self.own.pivot_mass
        ]
        if not possible:
            return []
        pivot = min(possible, key=lambda fill: (self._neg_entropy_at[fill.position], fill.position))
        ranks_by_entropy = self.params.confidence == "neg_entropy"
        return [
            Fill(pivot.position, token, prob, pivot.confidence if ranks_by_entropy else prob)
            for rank, (token, prob) in enumerate(tokens_at[pivot.position])
            if rank == 0 or token not in self.ends
        ]
