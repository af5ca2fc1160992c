"""S2D2: a block's drafts are checked by the same model, which reads them token by token (arXiv 2603.25702).

A draft pass predicts the open block's masks, as in the decoding that this one extends. If its first run of masks is to
be checked, it fills nothing. The next pass reads the block causally, with the drafts in these masks, and predicts each
position of the run from the tokens before it alone. A prediction is filled while those before it equal their drafts. So
drafts decide how many positions a check fills, and no token of it. If every step is checked, the answer is that of
checking one position at a time; other steps fill what the extended decoding fills.

If logits predict their own position, a row holds one mask behind the drafts before it, and the rows share these as
branches do. If they predict the next one, a single row makes all predictions.

Noise belongs to a position, in drafts and checks alike. So a check draws what it would draw for this position alone,
and the draft is often the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from operator import mul
from typing import ClassVar

from lopa_ascend.config import DecodingParams
from lopa_ascend.config.combinations import Rule
from lopa_ascend.config.kinds import Choice, Integer, Number
from lopa_ascend.config.settings import research
from lopa_ascend.decode.acceptance import filled_in, float32
from lopa_ascend.decode.block_pipeline import BlockPipeline, PipelineParams
from lopa_ascend.decode.blocks import BlockState, Branch
from lopa_ascend.decode.fast_dllm_v2 import FastDllmV2, FastDllmV2Params
from lopa_ascend.decode.lopa import BaseParams
from lopa_ascend.decode.strategy import Only, SequenceStart
from lopa_ascend.types import Alternatives, Edit, Fill, ModelProperties, RowPlan, RowResult, SequencePlan, StepRecord


@dataclass(frozen=True, kw_only=True)
class RoutingParams(BaseParams):
    routing: str = research(
        "always",
        Choice(("always", "run", "score", "hysteresis")),
        'which drafts "s2d2" checks: "always": all; "run": those for a run of at least `routing_run` masks; "score": '
        'those with a score of at least `routing_on`; "hysteresis": from a score above `routing_on` until one is below '
        "`routing_off`. The score is the number of drafts expected to hold, by their entropies, less the cost",
    )
    routing_run: int = research(1, Integer(1, 4096), 'fewest masks of a run that `routing` "run" checks')
    routing_on: float = research(0.0, Number(-10000, 10000), "score from which on drafts are checked")
    routing_off: float = research(
        0.0, Number(-10000, 10000), 'score below which `routing` "hysteresis" no longer checks'
    )
    routing_cost: float = research(1.0, Number(0, 10000), "cost of a check, in drafts that hold")
    routing_cost_of: str = research(
        "check",
        Choice(("check", "confident")),
        '`routing_cost` is the cost "check": of a check; "confident": for each mask that the extended decoding would '
        "fill because its probability is above `tau_conf`",
    )


@dataclass(frozen=True, kw_only=True)
class S2D2Params(RoutingParams, PipelineParams):
    """S2D2 over blocks."""


class S2D2(BlockPipeline):
    """One sequence under S2D2, for logits that predict their own position."""

    description = "drafts of a block, which the same model checks token by token (S2D2), for block-causal models"
    told_apart_by = ("base",)
    has_one_open_block = True
    has_row_of_each_position = True
    draws_once = True
    parameters = S2D2Params
    own: S2D2Params
    only: ClassVar[Only] = {
        "acceptance": ("threshold", "factor"),
        "branch_acceptance": (),
        "confidence": (),
        "editing_threshold": (),  # an edit would change what checked tokens have seen
        "max_active_blocks": (),
        "max_post_steps": (),
        "window_attention": ("block_causal", "causal"),
    }
    rules: ClassVar[tuple[Rule, ...]] = (
        Rule("routing_run", "routing", ("run",)),
        Rule("routing_on", "routing", ("score", "hysteresis")),
        Rule("routing_off", "routing", ("hysteresis",)),
        Rule("routing_cost", "routing", ("score", "hysteresis")),
        Rule("routing_cost_of", "routing", ("score", "hysteresis")),
    )

    def __init__(self, start: SequenceStart) -> None:
        self._drafted: tuple[Fill, ...] = ()
        """What the next pass checks: drafts for consecutive positions; the mask stands for none."""
        self._checked: tuple[Fill, ...] = ()
        """What the pass that is being absorbed has checked."""
        self._predicted: list[Fill] = []
        """All predictions of the last draft pass."""
        self._from_drafts: set[int] = set()
        """Positions that the last pass, a check, filled with drafts that it did not accept."""
        self._is_on = False
        self._log_vocabulary = math.log(start.vocab_size)
        super().__init__(start)

    @classmethod
    def fits(cls, properties: ModelProperties) -> bool:
        return properties.is_block_causal and not properties.logit_shift

    @classmethod
    def ranked_by(cls, params: DecodingParams) -> str:
        """Scores are made of entropies. Positions are ranked by probability all the same."""
        return "neg_entropy" if params.routing in ("score", "hysteresis") else "max_prob"

    # ---- before a forward pass -------------------------------------------------------------------------------------

    def plan(self) -> SequencePlan | None:
        plan = super().plan()
        if plan is None or not self._drafted:
            return plan
        return replace(plan, rows=self._checking_rows(plan.start, (*self.prompt, *self.anchor.tokens)[plan.start :]))

    def _checking_rows(self, start: int, tokens: tuple[int, ...]) -> tuple[RowPlan, ...]:
        """The rows that check ``_drafted``. The open block begins at ``start``, and nothing before it is computed."""
        positions = tuple(fill.position for fill in self._drafted)
        known = *tokens[: positions[0] - start], *(fill.token for fill in self._drafted)
        if self.properties.logit_shift:
            return (RowPlan(start, known[:-1], start, (), positions, causal_end=positions[-1]),)
        return tuple(
            RowPlan(start, (*known[: p - start], self.mask), p, (p + 1,), (p,), causal_end=p) for p in positions
        )

    def _may_open(self, branch: Branch) -> bool:
        return not branch.blocks[-1].masks and not branch.eos and branch.end < self.limit

    def _row(self, branch: Branch, full: bool) -> RowPlan:
        row = super()._row(branch, full)
        if self.own.window_attention != "causal":
            return row
        causal_end = min(row.end, *row.masked[:1])
        return replace(row, causal_end=causal_end, entry_ends=(row.end,) if causal_end < row.end else ())

    # ---- after a forward pass --------------------------------------------------------------------------------------

    def absorb(self, plan: SequencePlan, results: Sequence[RowResult], model_tokens: int, head_rows: int) -> StepRecord:
        self._checked, self._drafted, self._from_drafts = self._drafted, (), set()
        if self._checked:
            plan, results = _as_one_row(plan, results)
        predicted = self.predicted(plan.rows[0], results[0])
        if not self._checked:
            self._route(plan.rows[0], predicted)
            return replace(super().absorb(plan, results, model_tokens, head_rows), drafted=self._drafted)
        record = super().absorb(plan, results, model_tokens, head_rows)
        written, num_matches = self._written(predicted)
        self._from_drafts = {fill.position for fill in record.fills} - {fill.position for fill in written}
        drafted = tuple(fill for fill in self._checked if fill.token != self.mask)
        self._skip_draft()
        return replace(record, drafted=drafted, accepted=sum(fill in record.fills for fill in written[:num_matches]))

    def _route(self, row: RowPlan, predicted: list[Fill]) -> None:
        """Decides whether the next pass checks these predictions of a draft pass."""
        self._predicted = predicted
        if not predicted or predicted[0].position == row.end:  # a pass that predicts a block's first position alone
            return
        run = [fill for number, fill in enumerate(predicted) if fill.position == predicted[0].position + number]
        num_fitting = self.grammar.num_admitted(self.anchor, [fill.token for fill in run])
        run = run[: num_fitting + 1]  # nothing stays behind a token that does not fit
        if self._pays(run):
            self._drafted = tuple(run)

    def _pays(self, run: Sequence[Fill]) -> bool:
        """Whether to check a run of drafts. With "hysteresis" this depends on the decision before."""
        own = self.own
        if own.routing == "always":
            return True
        if own.routing == "run":
            return len(run) >= own.routing_run
        cost, tau_conf = own.routing_cost, float32(self.params.tau_conf)
        if own.routing_cost_of == "confident":
            cost *= sum(fill.max_prob > tau_conf for fill in self._predicted)
        holds = (math.exp(fill.confidence / self._log_vocabulary) for fill in run)
        score: float = sum(accumulate(holds, mul)) - cost
        if own.routing == "score":
            return score >= own.routing_on
        self._is_on = score >= own.routing_off if self._is_on else score > own.routing_on
        return self._is_on

    def _skip_draft(self) -> None:
        """A single mask that will be checked needs no draft: the check says what is filled."""
        block = self.anchor.blocks[-1]
        commits = any(each.state is BlockState.TO_CACHE for each in self.anchor.blocks)
        if self.own.routing == "always" and block.masks == 1 and self._num_wanted_in(block) == 1 and not commits:
            (position,) = self.anchor.masked_in(block, self.mask)
            self._drafted = (Fill(position, self.mask, 0.0, 0.0),)

    def _written(self, predicted: Sequence[Fill]) -> tuple[list[Fill], int]:
        """What a check fills, all predictions up to the first that differs from its draft; and how many were drafted.
        Rows that did not fit into the pass leave a gap."""
        written: list[Fill] = []
        for draft, fill in zip(self._checked, predicted, strict=False):
            if fill.position != draft.position:
                break
            written.append(fill)
            if fill.token != draft.token:
                return written, len(written) - 1
        return written, len(written)

    def choose(self, branch: Branch, predicted: list[Fill]) -> tuple[list[Fill], int]:
        """A draft pass that will be checked fills nothing. A check fills what it has written, and drafts if that is
        less than the step must fill."""
        if self._drafted:
            return [], 0
        if not self._checked:
            return super().choose(branch, _by_probability(predicted))
        written, _ = self._written(predicted)
        known = {fill.position for fill in written}
        rest = _by_probability([fill for fill in self._predicted if fill.position not in known])
        least = min(self._num_wanted_in(branch.blocks[-1]) - len(written), len(rest))
        if least <= 0:
            return written, 0
        others, fallbacks = filled_in(rest, self.accept(rest), least)
        return sorted([*written, *others], key=lambda fill: fill.position), fallbacks

    def advance(self, branch: Branch, fills: Sequence[Fill], edits: Sequence[Edit] = ()) -> Branch:
        # A grammar wants each pass that it hears of to fill something.
        return super().advance(branch, fills, edits) if fills else self.finish_pass(branch)

    def finish_pass(self, branch: Branch) -> Branch:
        """A draft pass and its check are one step of the schedule."""
        after = super().finish_pass(branch)
        if not self._drafted:
            return after
        *others, block = after.blocks
        return replace(after, blocks=(*others, replace(block, passes=branch.blocks[-1].passes)))

    def recorded_positions(self) -> set[int]:
        return {fill.position for fill in self._predicted} if self._drafted else set()

    def take_alternatives(self, found: Mapping[int, Alternatives]) -> None:
        super().take_alternatives({at: each for at, each in found.items() if at not in self._from_drafts})


def _by_probability(predicted: Sequence[Fill]) -> list[Fill]:
    return [replace(fill, confidence=fill.max_prob) for fill in predicted]


def _as_one_row(plan: SequencePlan, results: Sequence[RowResult]) -> tuple[SequencePlan, list[RowResult]]:
    """A checking pass with all predictions in one row."""
    row = replace(plan.rows[-1], masked=tuple(chain.from_iterable(row.masked for row in plan.rows)))
    columns = zip(*((each.tokens, each.max_probs, each.confidences) for each in results), strict=True)
    tokens, max_probs, confidences = (tuple(chain.from_iterable(column)) for column in columns)
    return replace(plan, rows=(row,)), [RowResult(tokens, max_probs, confidences)]


@dataclass(frozen=True, kw_only=True)
class S2D2FastDllmV2Params(S2D2Params, FastDllmV2Params):
    """S2D2 over Fast-dLLM v2."""


class S2D2FastDllmV2(S2D2, FastDllmV2):
    """S2D2 over Fast-dLLM v2: logits predict the next position."""

    has_row_of_each_position = False
    parameters = S2D2FastDllmV2Params
    own: S2D2FastDllmV2Params
    only: ClassVar[Only] = {"sub_block_cache": ()}

    @classmethod
    def fits(cls, properties: ModelProperties) -> bool:
        return FastDllmV2.fits(properties)
