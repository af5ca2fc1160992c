"""Linear self-speculation: a causal model drafts a block at once, and then reads it causally.

A round is two passes. In the first a block's positions see one another, and are drafted. The second is causal: its
predictions are those of "ar" as far as the drafts before them are right. They are written up to the first that differs
from its draft, that one included. So a round writes at least one token, and the answer is that of "ar".

At a temperature, too: draft and check draw with the same noise (Gumbel-max), which depends on seed and position alone,
so no draw depends on drafts (arXiv 2408.07978).

Sources: the code of Nemotron-Labs-Diffusion (``linear_spec_generate``) and of Orthrus (``generate``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from lopa_ascend.config.kinds import Choice, Number
from lopa_ascend.config.settings import research
from lopa_ascend.decode.causal import Autoregressive
from lopa_ascend.decode.fast_dllm_v2 import FastDllmV2Params
from lopa_ascend.decode.lopa import LookaheadParams, Lookaheads
from lopa_ascend.decode.strategy import Only, SequenceStart
from lopa_ascend.types import BranchRecord, Fill, ModelProperties, RowPlan, RowResult, SequencePlan, StepRecord


@dataclass(frozen=True, kw_only=True)
class LinearSpecParams(FastDllmV2Params):
    draft_threshold: float = research(
        0.0,
        Number(0, 1),
        'a pass of "linear_spec" drafts the positions whose probability is at least this, or the most probable one, '
        "and further passes the others; 0: one pass drafts all. It changes no answer",
    )


@dataclass(frozen=True)
class Draft(Fill):
    second: int
    """The token that would be drafted without it, and ``second_prob`` its probability."""
    second_prob: float


class LinearSpec(Autoregressive):
    """One sequence. Its state is that of "ar": what is written, and one open position."""

    description = (
        'drafts a block at once and checks it in a causal pass, for causal models: the answer of "ar" in fewer passes'
    )
    base = "linear_spec"
    fills_one = False
    drafts = True
    parameters = LinearSpecParams
    own: LinearSpecParams
    only: ClassVar[Only] = {
        "acceptance": (),
        "confidence": (),
    }

    @classmethod
    def fits(cls, properties: ModelProperties) -> bool:
        return properties.is_causal and properties.drafts_blocks

    def __init__(self, start: SequenceStart) -> None:
        super().__init__(start)
        self._drafts: dict[int, Draft] = {}
        """By position, behind the last written token."""

    @property
    def num_wanted(self) -> int:
        """The most branches beside the main row."""
        return 0

    @property
    def writes_on(self) -> bool:
        """Whether a branch checks the drafts behind its second choice."""
        return True

    # ---- before a forward pass -------------------------------------------------------------------------------------

    def plan(self) -> SequencePlan | None:
        plan = super().plan()
        if plan is None or not self.num_forwards:  # the prompt's last position predicts the first token
            return plan
        (row,) = plan.rows
        drafted = self._drafted_behind(row.start)
        if missing := [position for position in drafted if position not in self._drafts]:
            tokens = (self._drafts[position].token if position in self._drafts else self.mask for position in drafted)
            draft = RowPlan(row.start, (*row.tokens, *tokens), row.start, (drafted.stop,), tuple(missing), drafts=True)
            return replace(plan, num_new=0, rows=(draft,))
        return self._verifying(plan, [self._drafts[position].token for position in drafted])

    def _drafted_behind(self, position: int) -> range:
        """The positions of a block behind its first, known token. The last position of all needs no draft."""
        room = self.limit - position - 1
        return range(position + 1, position + min(self.params.block_size, room + 1)) if room > 1 else range(0)

    def _verifying(self, plan: SequencePlan, drafts: Sequence[int]) -> SequencePlan:
        """The pass that checks drafts, from a plan of "ar"."""
        (row,) = plan.rows
        useful = self._useful(drafts)
        main = self._checking(row, useful, row.start)
        rows = *self._branches(row, drafts, len(useful)), main
        return replace(plan, num_new=0, rows=rows, winner_commits=len(rows) > 1, fills_all_slots=True)

    def _branches(self, row: RowPlan, drafts: Sequence[int], num_useful: int) -> list[RowPlan]:
        """The rows of second choices, by rank: each has one for one position, behind the drafts before it."""
        found = list[RowPlan]()
        for place in self._places(row.end, min(num_useful + 1, len(drafts))):
            position, second = row.end + place, self._drafts[row.end + place].second
            useful = self._useful([*drafts[:place], second, *drafts[place + 1 :]])
            if len(useful) > place and len(found) < self.num_wanted:
                found.append(self._branch(row, useful, position))
        return [branch for branch in found if branch.masked]

    def _branch(self, row: RowPlan, drafts: Sequence[int], position: int) -> RowPlan:
        return self._checking(row, drafts, position)

    def _places(self, first: int, count: int) -> list[int]:
        """Places among the drafts, from position ``first`` on, by the tokens that a second choice is expected to add:
        most first, the earlier among equals. That is the probability that the drafts before it and itself are right,
        times the tokens up to the next wrong one."""
        drafts = [self._drafts[first + place] for place in range(count)]
        following, gains = 0.0, list[tuple[float, int]]()
        for place in reversed(range(count)):
            before = math.prod(draft.max_prob for draft in drafts[:place])
            gains.append((-before * drafts[place].second_prob * (1 + following), place))
            following = drafts[place].max_prob * (1 + following) if self.writes_on else 0.0
        return [place for gain, place in sorted(gains) if gain]

    def _useful(self, drafts: Sequence[int]) -> Sequence[int]:
        """The drafts that something can be written behind: those before one that is the last, ends the answer or does
        not fit the grammar."""
        room = self.limit - self.anchor.end
        end = next((index for index, token in enumerate(drafts[:room]) if token in self.ends), room)
        return drafts[: self.grammar.num_admitted(self.anchor, drafts[:end])]

    @staticmethod
    def _checking(row: RowPlan, drafts: Sequence[int], begin: int) -> RowPlan:
        """Checks drafts behind a row of "ar". ``begin``: the first position that differs from the main row."""
        end = row.end + len(drafts)
        tokens, masked = (*row.tokens, *drafts), tuple(range(begin + 1, end + 1))
        return replace(row, tokens=tokens, causal_end=end, masked=masked, compute_from=begin)

    # ---- after a forward pass --------------------------------------------------------------------------------------

    def absorb(self, plan: SequencePlan, results: Sequence[RowResult], model_tokens: int, head_rows: int) -> StepRecord:
        row = plan.rows[-1]
        if not self.num_forwards:
            return super().absorb(plan, results, model_tokens, head_rows)
        record = StepRecord(
            index=self.num_forwards,
            span=(row.start, row.end),
            cache_length=self.num_committed,
            committed=0,
            branches=(_recorded(row, (), 1.0),),
            winner=0,
            fills=(),
            fallbacks=0,
            model_tokens=model_tokens,
            head_rows=head_rows,
        )
        record = self._drafted(record, row, results[-1]) if row.drafts else self._checked(record, plan, results)
        self.num_committed += record.committed
        self.num_forwards += 1
        return record

    def _drafted(self, record: StepRecord, row: RowPlan, result: RowResult) -> StepRecord:
        kept = self._take(row, result)
        self._drafts |= {draft.position: draft for draft in kept}
        return replace(record, drafted=tuple(kept))

    def _take(self, row: RowPlan, result: RowResult) -> list[Draft]:
        """Its drafts from ``draft_threshold`` on, or else the most probable one."""
        drafts = [
            Draft(fill.position, fill.token, fill.max_prob, fill.confidence, second, prob)
            for fill, (second, prob) in zip(self.predicted(row, result), result.seconds, strict=True)
        ]
        kept = [draft for draft in drafts if draft.max_prob >= self.own.draft_threshold]
        return kept or [max(drafts, key=lambda draft: draft.max_prob)]

    def _checked(self, record: StepRecord, plan: SequencePlan, results: Sequence[RowResult]) -> StepRecord:
        """Writes what is right and one token more. If that is a branch's second choice, the branch goes on from there,
        or has the next drafts."""
        *others, main = plan.rows
        written = self._write(self.predicted(main, results[-1]), main.tokens[1:])
        drafted = [self._drafts[position] for position in main.masked[:-1]]
        matched = sum(fill.token == draft.token for fill, draft in zip(written, drafted, strict=False))
        last, winner, own, ready = written[-1], len(others), tuple[Fill, ...](), list[Draft]()
        for rank in self._holding(others, last):
            row = others[rank]
            if row.drafts:
                ready = self._take(row, results[rank])
                continue
            winner, own = rank, (last,)
            written += self._write(self.predicted(row, results[rank]), row.tokens[last.position - row.start + 1 :])
        second = matched < min(len(written), len(drafted)) and written[matched].token == drafted[matched].second
        branches = [_recorded(row, (self._second(row),), 0.0) for row in others]
        branches.append(record.branches[-1])
        if own:
            branches[winner] = replace(branches[winner], own_fills=own, confirmed_by=(len(others),))
        self._drafts = {draft.position: draft for draft in ready}
        return replace(
            record,
            span=(main.start, plan.rows[winner].end),
            committed=len(written),
            branches=tuple(branches),
            winner=winner,
            fills=tuple(fill for fill in written if fill not in own),
            drafted=tuple(drafted),
            accepted=matched,
            second_was_right=second,
        )

    def _holding(self, rows: Sequence[RowPlan], last: Fill) -> list[int]:
        """The branches whose second choice was written last, if anything is left to write."""
        of_place = [rank for rank, row in enumerate(rows) if row.compute_from == last.position]
        is_right = [rank for rank in of_place if rows[rank].tokens[last.position - rows[rank].start] == last.token]
        return is_right if self.anchor.masks else []

    def _second(self, row: RowPlan) -> Fill:
        draft = self._drafts[row.compute_from]
        return Fill(row.compute_from, draft.second, draft.second_prob, draft.second_prob)

    def _write(self, predicted: Sequence[Fill], drafts: Sequence[int]) -> list[Fill]:
        """Writes the predictions of a causal pass, as "ar" does, up to the first that differs from its draft."""
        branch, written = self.anchor, list[Fill]()
        for fill, draft in zip(predicted, [*drafts, None], strict=True):
            branch = self.open(self.advance(branch, [fill]))
            written.append(fill)
            if fill.token != draft or not branch.masks:
                break
        self.branches = [branch]
        return written


def _recorded(row: RowPlan, own: tuple[Fill, ...], score: float) -> BranchRecord:
    """A causal row predicts a position behind its own."""
    return BranchRecord(own, max(row.end, *(position + 1 for position in row.masked[-1:])), len(row.masked), score)


@dataclass(frozen=True, kw_only=True)
class LopaLinearSpecParams(LookaheadParams, LinearSpecParams):
    branch_rows: str = research(
        "second",
        Choice(("second", "ahead")),
        'what branches of `base` "linear_spec" hold: "second": the draft\'s second choice for one position, and the '
        'drafts behind it; "ahead": the next draft behind that second choice, which saves a pass if it is right',
    )


class LopaLinearSpec(Lookaheads, LinearSpec):
    """LoPA over linear self-speculation: branches check second choices beside the drafts. At most one is right, and
    writes more. So the answer is that of "ar", and no round writes less than without branches."""

    parameters = LopaLinearSpecParams
    own: LopaLinearSpecParams

    @property
    def num_wanted(self) -> int:
        return 0 if self.params.is_auto and self.is_crowded else self.params.lookaheads

    @property
    def writes_on(self) -> bool:
        return self.own.branch_rows == "second"

    def _branch(self, row: RowPlan, drafts: Sequence[int], position: int) -> RowPlan:
        checking = super()._branch(row, drafts, position)
        if self.writes_on:
            return checking
        positions = self._drafted_behind(position)
        return replace(
            checking,
            tokens=(*checking.tokens[: position + 1 - row.start], *[self.mask] * len(positions)),
            entry_ends=(positions.stop,),
            causal_end=position,
            masked=tuple(positions),
            logit_shift=None,
            drafts=True,
        )

    @property
    def known_winner(self) -> None:
        return None
