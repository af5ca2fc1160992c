"""Runs steps eagerly: op by op, with batches of any shape.

Every rank runs all of this. A branch-parallel group evaluates its own branches; one gather of (token, probability,
confidence) tells every rank what all branches predict, and every rank takes the same decisions from that.
"""

from __future__ import annotations

from collections.abc import Sequence as List
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lopa_ascend.backend.interface import Ops
from lopa_ascend.kv.pool import KVPool
from lopa_ascend.model.base import ForwardInputs, Model
from lopa_ascend.parallel.collectives import ALONE, Group
from lopa_ascend.parallel.placement import Placement
from lopa_ascend.probe import Probe, no_probe
from lopa_ascend.runner.alternatives import AlternativesRecorder
from lopa_ascend.runner.bans import bans_for
from lopa_ascend.runner.layout import BEFORE_WINDOW, Layout, Part, build_layout
from lopa_ascend.runner.scoring import Job, Scorer
from lopa_ascend.score.adjust import adjustment_for
from lopa_ascend.score.prediction import NO_PREDICTIONS, NOT_FINITE, NUM_COLUMNS, Predictions
from lopa_ascend.sequence import Sequence
from lopa_ascend.types import RowResult, SequencePlan, SequenceResult, SequenceStep, Share


@dataclass(frozen=True)
class ForwardResult:
    """This rank's part of a sequence's forward pass."""

    predictions: Predictions
    """For every masked position of every row of this group, branch by branch."""
    committing_hidden: Tensor
    """Final hidden state of the last committing position: [rows of the share, hidden] where keys and values differ by
    branch, otherwise [1, hidden]; no rows if nothing commits."""
    model_tokens: int
    head_rows: int
    job: Job | None = None
    """What was predicted, for every masked position as in ``predictions``; None unless the request asks for
    ``top_logprobs``."""


class EagerExecutor:
    """One model on one device with its KV pool.

    Attributes:
        num_rows, idle_rows: see ``EngineStats``.

    Args:
        model: its group ``tp`` is the tensor-parallel one.
        bp: the ranks that hold the same part of the model and evaluate other branches.
    """

    def __init__(self, model: Model, pool: KVPool, ops: Ops, bp: Group = ALONE) -> None:
        self.model, self.pool, self.ops, self.bp = model, pool, ops, bp
        self.placement = Placement(bp.size, bp.rank)
        self.scorer = Scorer(model, ops)
        self._alternatives = AlternativesRecorder(model, self.placement, bp)
        self.probe: Probe = no_probe
        self.num_rows = self.idle_rows = 0

    @torch.inference_mode()
    def run(self, sequences: List[Sequence], steps: List[SequenceStep]) -> list[SequenceResult]:
        """One forward pass of the sequences' plans, and the decisions that follow. A sequence whose logits are not
        finite fails, without an effect on the others.

        Args:
            steps: for each sequence where its keys and values lie.
        """
        plans = [planned(sequence) for sequence in sequences]
        shares = [self.placement.share(plan) for plan in plans]
        forwards = self.forward(sequences, shares, steps)
        for plan in plans:
            self.num_rows += len(plan.rows)
            self.idle_rows += self.placement.num_places(len(plan.rows)) - len(plan.rows)
        results = self.exchange(plans, [forward.predictions for forward in forwards])
        return [self._advance(*item) for item in zip(sequences, steps, shares, forwards, results, strict=True)]

    def _advance(
        self,
        sequence: Sequence,
        step: SequenceStep,
        share: Share,
        forward: ForwardResult,
        results: list[RowResult] | None,
    ) -> SequenceResult:
        """Decides, commits and plans the next pass of one sequence.

        Args:
            results: what ``exchange`` gave for the sequence.
        """
        if results is None:
            sequence.plan = None
            return SequenceResult(sequence.request_id, None, NOT_FINITE)
        record = sequence.strategy.absorb(share.plan, results, forward.model_tokens, forward.head_rows)
        if sequence.request.params.top_logprobs:
            self._alternatives.record(sequence, share.plan, record, forward.job)
        self.commit(sequence, share, step, record.winner, forward)
        sequence.plan = sequence.strategy.plan()
        return SequenceResult(sequence.request_id, record)

    # ---- predictions of all groups ---------------------------------------------------------------------------------

    def exchange(self, plans: List[SequencePlan], own: List[Predictions]) -> list[list[RowResult] | None]:
        """What all groups predict, by sequence and row; None for a sequence with logits that were not finite.

        The groups gather all predictions in one message: 12 bytes for each masked position, padded to the group that
        has most. Full attention and ``top_logprobs`` need further messages: ``_broadcast``, and
        ``AlternativesRecorder``.

        Args:
            own: this group's predictions for each sequence.
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
                    rows.append(Predictions.decode(gathered[group, first:last]))
                    num_read[group] = last
                valid = all(row.valid for row in rows)
                results.append([row.row_result() for row in rows] if valid else None)
            return results

    def _gather(self, plans: List[SequencePlan], own: List[Predictions]) -> NDArray[np.int32]:
        """By group, its encoded predictions for all sequences, one after the other: int32 [groups, n, 3]."""
        sizes = [0] * self.bp.size
        for plan in plans:
            for branch, row in enumerate(plan.rows):
                group, _ = self.placement.home(branch)
                sizes[group] += len(row.masked)
        message = np.zeros((max(sizes), NUM_COLUMNS), dtype=np.int32)
        message[: sizes[self.bp.rank]] = np.concatenate([predictions.encode() for predictions in own])
        gathered = np.broadcast_to(message, (self.bp.size, *message.shape))
        if message.size:
            on_device = torch.from_numpy(message).to(self.ops.device)
            gathered = self.bp.all_gather(on_device, "branches").cpu().numpy()
        return gathered

    # ---- forward pass ----------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def forward(self, sequences: List[Sequence], shares: List[Share], steps: List[SequenceStep]) -> list[ForwardResult]:
        """This rank's part of the forward pass of some sequences, one result each."""
        # torch.empty, because head.new_empty would return a packed tensor if the head is packed, and a packed tensor
        # cannot be sliced.
        no_hidden = torch.empty(0, dtype=self.model.head.dtype, device=self.model.head.device)
        nothing = ForwardResult(NO_PREDICTIONS, no_hidden, model_tokens=0, head_rows=0)
        results = [nothing] * len(sequences)
        busy = [index for index, share in enumerate(shares) if share.rows]
        if not busy:
            return results
        layout = build_layout([(shares[index], steps[index]) for index in busy])
        predicting, committing = self._hidden_states([sequences[index] for index in busy], layout)
        jobs = [
            self._job(sequences[index], part, hidden)
            for index, part, hidden in zip(busy, layout.parts, predicting, strict=True)
        ]
        scored = self.scorer.score(jobs, self.probe)
        for index, part, job, predictions, hidden in zip(busy, layout.parts, jobs, scored, committing, strict=True):
            order = _order_by_branch(part)
            keeps_job = sequences[index].request.params.top_logprobs > 0
            results[index] = ForwardResult(
                predictions=predictions.take(order),
                committing_hidden=hidden,
                model_tokens=part.num_computed,
                head_rows=len(part.predictions.tokens),
                job=replace(job, hidden=job.hidden[order], positions=job.positions[order]) if keeps_job else None,
            )
        return results

    def _job(self, sequence: Sequence, part: Part, hidden: Tensor) -> Job:
        """What is predicted for a sequence from the hidden states [n, hidden]."""
        strategy, prompt = sequence.strategy, sequence.request.prompt
        answer = strategy.anchor.tokens[: strategy.num_counted]
        return Job(
            hidden=hidden,
            positions=part.predictions.positions,
            scoring=sequence.scoring,
            round=strategy.num_forwards,
            adjustment=adjustment_for(sequence.request.params, prompt, answer, self.ops.device),
            bans=bans_for(sequence, part, self.ops.device),
        )

    def _hidden_states(self, sequences: List[Sequence], layout: Layout) -> tuple[list[Tensor], list[Tensor]]:
        """Runs the model.

        Returns:
            For each sequence the hidden states that predict its masked positions; and for each sequence those of its
            last committing positions. [n, hidden] each.
        """
        tokens_by_part = [part.predictions.tokens for part in layout.parts]
        # Indices in the batch, of all sequences the predicting tokens first, and then of all the committing ones.
        wanted = [tokens[tokens != BEFORE_WINDOW] for tokens in tokens_by_part]
        wanted += [part.last_committing for part in layout.parts]
        entries = layout.entries.divided(self.ops.max_queries)
        inputs = ForwardInputs(
            tokens=self._on_device(layout.tokens),
            positions=self._on_device(layout.positions),
            slot_mapping=self._on_device(layout.slot_mapping),
            source=self._on_device(layout.source),
            entries=replace(entries, page_tables=entries.page_tables.to(self.ops.device)),
            rows=self._on_device(np.concatenate(wanted)),
        )
        with self.probe("forward", inputs):
            hidden = self.model.forward(inputs, self.pool.k, self.pool.v)
        states = hidden.split([len(indices) for indices in wanted])
        computed, committing = states[: len(sequences)], states[len(sequences) :]
        predicting = []
        for sequence, part, rows in zip(sequences, layout.parts, computed, strict=True):
            if len(rows) < len(part.predictions.tokens):  # the first token is BEFORE_WINDOW, which is not in the batch
                assert sequence.last_hidden is not None
                rows = torch.cat([sequence.last_hidden[None], rows])
            predicting.append(rows)
        return predicting, list(committing)

    def _on_device(self, array: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> Tensor:
        return torch.from_numpy(array).to(self.ops.device)

    # ---- commit ----------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def commit(self, sequence: Sequence, share: Share, step: SequenceStep, winner: int, forward: ForwardResult) -> None:
        """Puts the keys and values that the winner commits into every slot of every group. Block-causal windows have
        them there already, because all branches commit the same; with full attention they are copied and sent."""
        plan = share.plan
        if not plan.num_new:
            return
        if not plan.winner_commits:
            sequence.last_hidden = forward.committing_hidden[0].clone()
            return
        # If another group has the winner, any row will do: that group sends the hidden state, and this one is ignored.
        row = share.branches.index(winner) if winner in share.branches else 0
        begin, end = plan.start, plan.start + plan.num_new
        group, slot = self.placement.home(winner)
        if self.placement.sends_values(plan):
            hidden = forward.committing_hidden[row : row + 1]
            sequence.last_hidden = self._broadcast(step.page_tables[slot], begin, end, group, hidden)
        else:
            sequence.last_hidden = forward.committing_hidden[row].clone()
        self.pool.copy_to_slots(step.page_tables, slot, begin, end)

    def _broadcast(self, page_table: List[int], begin: int, end: int, group: int, hidden: Tensor) -> Tensor:
        """Sends the winner's keys and values of the positions [begin, end), and its hidden state, to all groups.

        Args:
            page_table: of the winner's slot.
            group: the winner's group.
            hidden: [1, hidden] in that group.

        Returns:
            The winner's hidden state [hidden].
        """
        values = self.pool.read(page_table, begin, end)
        if self.bp.rank != group:
            hidden = values.new_empty(1, self.model.config.hidden_size)
        message = torch.cat([values.flatten(), hidden[0]])
        self.bp.broadcast(message, group, "kv")
        if self.bp.rank != group:
            self.pool.write(page_table, begin, end, message[: values.numel()].view_as(values))
        return message[values.numel() :].clone()


def planned(sequence: Sequence) -> SequencePlan:
    """The plan of a sequence that is not done."""
    assert sequence.plan is not None
    return sequence.plan


def _order_by_branch(part: Part) -> NDArray[np.int64]:
    """For every masked position of a sequence's rows, in branch order: the index in its ``PredictionRows``."""
    share = part.share
    ends = np.cumsum([len(row.masked) for row in share.rows])
    by_row = np.split(part.predictions.inverse, ends[:-1])
    order = sorted(range(len(by_row)), key=share.branches.__getitem__)
    return np.concatenate([by_row[row] for row in order])
