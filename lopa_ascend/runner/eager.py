"""Runs steps eagerly: op by op, with batches of any shape; or, of a causal model, with compiled forward passes. Every
rank runs all of this. A branch-parallel group evaluates its own branches; one gather of (token, probability,
confidence) tells every rank what all branches predict, and every rank takes the same decisions from that."""

from __future__ import annotations

from collections.abc import Sequence as List
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from lopa_ascend.backend.interface import Ops
from lopa_ascend.core import Result, Sequence
from lopa_ascend.graph.forwards import Forwards, PassKind
from lopa_ascend.kv.pool import KVPool
from lopa_ascend.model.base import ForwardInputs, Model
from lopa_ascend.parallel.collectives import ALONE, Group
from lopa_ascend.parallel.placement import Placement, Share
from lopa_ascend.probe import Probe, no_probe
from lopa_ascend.runner.alternatives import AlternativesRecorder
from lopa_ascend.runner.bans import bans_for
from lopa_ascend.runner.batch import Part, build_batch
from lopa_ascend.runner.continuations import ContinuationScorer
from lopa_ascend.runner.scoring import Job, Scorer
from lopa_ascend.score.adjust import adjustment_for
from lopa_ascend.score.prediction import NOT_FINITE, NUM_COLUMNS, NUM_WITH_RUNNER_UP, decode
from lopa_ascend.types import GrammarError, RowResult, SequencePlan, StepRecord


class Pass(NamedTuple):
    """What one rank's group has computed of a sequence's forward pass."""

    part: Part
    job: Job
    committing: Tensor
    """Of the last committing positions, [n, hidden]; see ``Part.committing``."""
    error: str | None
    """Why the grammar does not go on."""


class EagerExecutor:
    """One model on one device with its KV pool. ``num_rows`` and ``idle_rows``: see ``EngineStats``. ``bp``: the ranks
    that hold the same part of the model and evaluate other branches; ``forwards``: compiled forward passes."""

    def __init__(
        self, model: Model, pool: KVPool, ops: Ops, bp: Group = ALONE, forwards: Forwards | None = None
    ) -> None:
        self.model, self.pool, self.ops, self.bp, self.forwards = model, pool, ops, bp, forwards
        self.placement = Placement(bp.size, bp.rank)
        self.scorer = Scorer(model, ops)
        self._alternatives = AlternativesRecorder(model, self.placement, bp)
        self._continuations = ContinuationScorer(model, bp)
        self.probe: Probe = no_probe
        self.num_rows = self.idle_rows = 0

    @torch.inference_mode()
    def run(self, sequences: List[Sequence]) -> list[Result]:
        """A pass of the sequences, and the decisions that follow. One with logits that are not finite fails alone."""
        if self.forwards is None:
            return self._run(sequences, None)
        return [result for kind, group in self.forwards.divide(sequences) for result in self._run(group, kind)]

    def _run(self, sequences: List[Sequence], kind: PassKind | None) -> list[Result]:
        plans = [sequence.next_pass for sequence in sequences]
        passes, predictions = self.forward(sequences, [self.placement.share(plan) for plan in plans], kind)
        for plan in plans:
            self.num_rows += len(plan.rows)
            self.idle_rows += self.placement.num_places(len(plan.rows)) - len(plan.rows)
        results = self.exchange(plans, predictions)
        return [self._advance(*item) for item in zip(sequences, passes, results, strict=True)]

    def _advance(self, sequence: Sequence, computed: Pass, results: list[RowResult] | None) -> Result:
        """Decides, commits and plans the next pass of one sequence. ``results``: what ``exchange`` gave for it."""
        if computed.error is not None or results is None:
            sequence.fail(computed.error or NOT_FINITE)
            return sequence, None
        strategy, part = sequence.strategy, computed.part
        try:
            record = strategy.absorb(part.share.plan, results, part.num_computed, head_rows=len(part.positions))
        except GrammarError as error:
            sequence.fail(str(error))
            return sequence, None
        if sequence.request.params.top_logprobs:
            self._alternatives.record(sequence, part, record, computed.job)
        if sequence.request.continuations:
            sequence.continuation_logprobs = self._continuations.score(sequence, part, computed.job)
        self.commit(sequence, computed, record)
        sequence.strategy = strategy.successor or strategy
        sequence.plan = sequence.strategy.plan()
        return sequence, record

    # ---- predictions of all groups ---------------------------------------------------------------------------------

    def exchange(self, plans: List[SequencePlan], own: List[Tensor]) -> list[list[RowResult] | None]:
        """What all groups predict, by sequence and row; None for a sequence with logits that were not finite.

        One message gathers all predictions (``own``: from ``forward``): 12 bytes for each masked position, padded to
        the group that has most. Full attention and ``top_logprobs`` need further ones: ``_broadcast``, and
        ``AlternativesRecorder``.
        """
        with self.probe("exchange", plans):
            gathered = self._gather(plans, own)
            num_read = [0] * self.bp.size
            results: list[list[RowResult] | None] = []
            for plan in plans:
                rows = []
                for branch, row in enumerate(plan.rows):
                    group, _ = self.placement.home(branch)
                    first, last = num_read[group], num_read[group] + len(row.masked)
                    width = NUM_WITH_RUNNER_UP if row.drafts else NUM_COLUMNS
                    rows.append(decode(gathered[group, first:last, :width]))
                    num_read[group] = last
                valid = [row for row in rows if row is not None]
                results.append(valid if len(valid) == len(rows) else None)
            return results

    def _gather(self, plans: List[SequencePlan], own: List[Tensor]) -> NDArray[np.int32]:
        """By group, its encoded predictions: int32 [groups, n, 3]; if any row drafts, [groups, n, 5]."""
        sizes = [0] * self.bp.size
        for plan in plans:
            for branch, row in enumerate(plan.rows):
                group, _ = self.placement.home(branch)
                sizes[group] += len(row.masked)
        drafts = any(row.drafts for plan in plans for row in plan.rows)
        width = NUM_WITH_RUNNER_UP if drafts else NUM_COLUMNS
        message = torch.zeros(max(sizes), width, dtype=torch.int32, device=self.ops.device)
        message[: sizes[self.bp.rank]] = torch.cat([pad(each, (0, width - each.shape[1])) for each in own])
        if not message.numel():
            return np.zeros((self.bp.size, *message.shape), dtype=np.int32)
        read = self.ops.read_later(self.bp.all_gather(message, "branches"), self.bp.while_waiting)
        gathered: NDArray[np.int32] = read().numpy()
        return gathered

    # ---- forward pass ----------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def forward(
        self, sequences: List[Sequence], shares: List[Share], kind: PassKind | None = None
    ) -> tuple[list[Pass], list[Tensor]]:
        """This rank's part of a forward pass; and by sequence the predictions for every masked position of this group's
        rows, branch by branch: int32 [n, 3], see ``prediction.encode``. ``kind`` None: op by op."""
        items = list(zip(shares, (sequence.page_tables for sequence in sequences), strict=True))
        compiled, shift = kind is not None, self.model.properties.logit_shift
        batch = build_batch(items, self.ops.max_queries, shift, compiled=compiled)
        # Before the device computes: a copy of the host's memory waits for all that was launched.
        orders = [torch.from_numpy(part.order).to(self.ops.device) for part in batch.parts]
        states = batch.split(self._hidden(batch.inputs, kind))
        # The device computes while the grammars are asked.
        passes = [self._pass(*item) for item in zip(sequences, batch.parts, states, strict=True)]
        scored = self.scorer.score([computed.job for computed in passes], self.probe)
        return passes, [predictions[order] for predictions, order in zip(scored, orders, strict=True)]

    def _hidden(self, inputs: ForwardInputs | None, kind: PassKind | None) -> Tensor:
        """[n, hidden]; empty if there is nothing to compute."""
        if inputs is None:
            # torch.empty, because head.new_empty would return a packed tensor if the head is packed, and a packed
            # tensor cannot be sliced.
            head = self.model.head
            return torch.empty(0, self.model.config.hidden_size, dtype=head.dtype, device=head.device)
        with self.probe("forward", inputs):
            if kind is not None:
                assert self.forwards is not None
                return self.forwards.hidden(kind, inputs)
            return self.model.forward(inputs.to(self.ops.device), self.pool.k, self.pool.v)

    def _pass(self, sequence: Sequence, part: Part, states: tuple[Tensor, Tensor]) -> Pass:
        """What is to be predicted for a sequence. ``states``: see ``Batch.split``."""
        hidden, committing = states
        if part.starts_before:
            assert sequence.last_hidden is not None
            hidden = torch.cat([sequence.last_hidden[None], hidden])
        try:
            bans, error = bans_for(sequence, part, self.ops.device), None
        except GrammarError as no_way_on:
            bans, error = None, str(no_way_on)
        strategy, prompt = sequence.strategy, sequence.request.prompt
        job = Job(
            hidden=hidden,
            positions=part.positions,
            scoring=replace(sequence.scoring, runner_up=True) if part.drafts else sequence.scoring,
            round=0 if strategy.draws_once else strategy.num_forwards,
            adjustment=adjustment_for(sequence.request.params, prompt, _counted(sequence, part), self.ops.device),
            bans=bans,
        )
        return Pass(part, job, committing, error)

    # ---- commit ----------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def commit(self, sequence: Sequence, computed: Pass, record: StepRecord) -> None:
        """Puts what the winner commits into every slot of every group. With block-causal windows it is there already,
        because all branches commit the same. With full attention, and if branches verify drafts, the winner's keys and
        values are copied and sent."""
        share, page_tables = computed.part.share, sequence.page_tables.by_slot
        plan, winner = share.plan, record.winner
        if plan.num_new and not plan.winner_commits:
            sequence.last_hidden = computed.committing[0].clone()
        if not plan.winner_commits or not record.committed:
            return
        begin, end = plan.start, plan.start + record.committed
        group, slot = self.placement.home(winner)
        own = None  # the winner's hidden state, if this group has it; drafts that are verified need none
        if winner in share.branches and plan.num_new:
            own = computed.committing[share.branches.index(winner)]
        if self.placement.sends_values(plan):
            own = self._broadcast(page_tables[slot], begin, end, group, own)
        if plan.num_new:
            assert own is not None
            sequence.last_hidden = own.clone()
        self.pool.copy_to_slots(page_tables, slot, begin, end)

    def _broadcast(self, page_table: List[int], begin: int, end: int, group: int, hidden: Tensor | None) -> Tensor:
        """Sends the winner's keys and values of the positions [begin, end) in its slot, and its hidden state [hidden],
        to all groups; returns the latter. ``hidden`` is None in other groups than the winner's ``group``."""
        values = self.pool.read(page_table, begin, end)
        if hidden is None:
            hidden = values.new_zeros(self.model.config.hidden_size)
        message = torch.cat([values.flatten(), hidden])
        self.bp.broadcast(message, group, "kv")
        if self.bp.rank != group:
            self.pool.write(page_table, begin, end, message[: values.numel()].view_as(values))
        return message[values.numel() :].clone()


def _counted(sequence: Sequence, part: Part) -> List[List[int]]:
    """What penalties count: the answer as far as the decoding counts it, or by prediction, if a causal row predicts
    several positions, with the drafts before each. Decodings that count finished blocks count no drafts within one."""
    strategy = sequence.strategy
    answer = strategy.anchor.tokens[: strategy.num_counted]
    rows, end = part.share.rows, len(sequence.request.prompt) + len(answer)
    if not strategy.drafts or not any(row.is_causal and len(row.masked) > 1 for row in rows):
        return [answer]
    places = zip((rows[row] for row in part.predicted_rows), part.positions.tolist(), strict=True)
    stops = ((row, row.masked[0] if row.drafts else position) for row, position in places)
    return [(*answer, *row.tokens[end - row.start : stop - row.start]) for row, stop in stops]
