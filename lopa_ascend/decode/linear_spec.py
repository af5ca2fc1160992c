"""Linear self-speculation: a causal model drafts a block at once, and then reads it causally.

A round is two passes. In the first the positions of a block see one another, and are drafted. The second is causal: its
predictions are those of "ar" as far as the drafts before them are right, so they are written up to the first that
differs from its draft, that one included. A round writes one token at least, and the answer is that of "ar".

At a temperature it is, too: draft and check draw with the same noise (Gumbel-max), which depends on seed and position
alone. So a draft is right if the drafting distribution leads to the same draw, and no draw depends on drafts (arXiv
2408.07978).

Sources: Nemotron-Labs-Diffusion and Orthrus (``linear_spec_generate`` and ``generate`` in their code).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from lopa_ascend.config import DecodingParams
from lopa_ascend.config.kinds import Number
from lopa_ascend.config.settings import research
from lopa_ascend.decode.causal import Autoregressive
from lopa_ascend.decode.fast_dllm_v2 import FastDllmV2Params
from lopa_ascend.decode.strategy import Only, SequenceStart
from lopa_ascend.types import BranchRecord, Fill, RowPlan, RowResult, SequencePlan, StepRecord


@dataclass(frozen=True, kw_only=True)
class LinearSpecParams(FastDllmV2Params):
    """How a block is drafted."""

    draft_threshold: float = research(
        0.0,
        Number(0, 1),
        'a pass of "linear_spec" drafts the positions whose probability is at least this, or the most probable one, '
        "and further passes the others; 0: one pass drafts all. It changes no answer",
    )


@dataclass(frozen=True)
class Draft(Fill):
    """A drafted token."""

    second: int
    """The token that would be drafted without it."""
    second_prob: float
    """Its probability."""


class LinearSpec(Autoregressive):
    """One sequence under linear self-speculation. Its state is that of "ar": what is written, and one open position."""

    description = (
        'drafts a block at once and checks it in a causal pass, for causal models: the answer of "ar" in fewer passes'
    )
    base = "linear_spec"
    parameters = LinearSpecParams
    own: LinearSpecParams
    only: ClassVar[Only] = {
        "acceptance": (),
        "confidence": (),
    }

    def __init__(self, start: SequenceStart) -> None:
        super().__init__(start)
        self._drafts: dict[int, Draft] = {}
        """By position, behind the last token that is written."""

    @classmethod
    def row_length(cls, params: DecodingParams) -> int:
        return params.block_size

    # ---- before a forward pass -------------------------------------------------------------------------------------

    def plan(self) -> SequencePlan | None:
        plan = super().plan()
        if plan is None or not self.num_forwards:  # the prompt's last position predicts the first token
            return plan
        (row,) = plan.rows
        room = self.limit - row.end  # positions to be written
        end = row.start + min(self.params.block_size, room + 1)
        drafted = range(row.end, end) if room > 1 else range(0)
        if missing := [position for position in drafted if position not in self._drafts]:
            tokens = (self._drafts[position].token if position in self._drafts else self.mask for position in drafted)
            draft = RowPlan(row.start, (*row.tokens, *tokens), row.start, (end,), tuple(missing), drafts=True)
            return replace(plan, num_new=0, rows=(draft,))
        return self._verifying(plan, [self._drafts[position].token for position in drafted])

    def _verifying(self, plan: SequencePlan, drafts: Sequence[int]) -> SequencePlan:
        """The pass that checks drafts.

        Args:
            plan: of "ar".
        """
        (row,) = plan.rows
        tokens = (*row.tokens, *self._useful(drafts)[: self.limit - row.end - 1])
        return replace(plan, num_new=0, rows=(self._checking(row, tokens),), fills_all_slots=True)

    def _useful(self, drafts: Sequence[int]) -> Sequence[int]:
        """The drafts that something can be written behind: those before one that ends the answer or does not fit the
        grammar."""
        end = next((index for index, token in enumerate(drafts) if token in self.ends), None)
        return drafts[: self.grammar.num_admitted(self.anchor, drafts[:end])]

    @staticmethod
    def _checking(row: RowPlan, tokens: tuple[int, ...]) -> RowPlan:
        """The row that checks the drafts in ``tokens``."""
        end = row.start + len(tokens)
        return replace(row, tokens=tokens, causal_end=end, masked=tuple(range(row.end, end + 1)))

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
            branches=(BranchRecord((), row.end, len(row.masked), 1.0),),
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
        """The record of a pass that drafts."""
        drafts = [
            Draft(fill.position, fill.token, fill.max_prob, fill.confidence, second, prob)
            for fill, (second, prob) in zip(self.predicted(row, result), result.seconds, strict=True)
        ]
        kept = [draft for draft in drafts if draft.max_prob >= self.own.draft_threshold]
        kept = kept or [max(drafts, key=lambda draft: draft.max_prob)]
        self._drafts |= {draft.position: draft for draft in kept}
        return replace(record, drafted=tuple(kept))

    def _checked(self, record: StepRecord, plan: SequencePlan, results: Sequence[RowResult]) -> StepRecord:
        """The record of a pass that checks drafts, and writes what is right and one token more."""
        row = plan.rows[-1]
        written = self._write(self.predicted(row, results[-1]), row.tokens[1:])
        drafted = [self._drafts[position] for position in row.masked[:-1]]
        matched = sum(fill.token == draft.token for fill, draft in zip(written, drafted, strict=False))
        self._drafts = {}
        second = matched < min(len(written), len(drafted)) and written[matched].token == drafted[matched].second
        return replace(
            record,
            committed=len(written),
            fills=tuple(written),
            drafted=tuple(drafted),
            accepted=matched,
            second_was_right=second,
        )

    def _write(self, predicted: Sequence[Fill], drafts: Sequence[int]) -> list[Fill]:
        """Writes the predictions of a causal pass one after the other, as "ar" does, as long as the draft behind a
        token is that token."""
        branch, written = self.anchor, list[Fill]()
        for fill, draft in zip(predicted, [*drafts, None], strict=True):
            branch = self.open(self.advance(branch, [fill]))
            written.append(fill)
            if fill.token != draft or not branch.masks:
                break
        self.branches = [branch]
        return written
