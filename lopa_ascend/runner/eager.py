"""Runs steps eagerly: op by op, with batches of any shape.

Every rank runs all of this. A branch-parallel group evaluates its own branches; one gather of (token, probability,
confidence) tells every rank what all branches predict, and every rank takes the same decisions from that.
"""

from __future__ import annotations

from collections.abc import Sequence as List

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lopa_ascend.backend.interface import Ops
from lopa_ascend.core import Result, Sequence
from lopa_ascend.kv.pool import KVPool
from lopa_ascend.model.base import Model
from lopa_ascend.parallel.collectives import ALONE, Group
from lopa_ascend.parallel.placement import NOTHING, Placement, Share
from lopa_ascend.probe import Probe, no_probe
from lopa_ascend.runner.alternatives import AlternativesRecorder
from lopa_ascend.runner.bans import bans_for
from lopa_ascend.runner.continuations import ContinuationScorer
from lopa_ascend.runner.layout import BEFORE_WINDOW, build_batch, last_committing
from lopa_ascend.runner.scoring import Job, Scorer
from lopa_ascend.score.adjust import adjustment_for
from lopa_ascend.score.prediction import NOT_FINITE, NUM_COLUMNS, decode
from lopa_ascend.types import GrammarError, RowResult, SequencePlan


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
        self._continuations = ContinuationScorer(model, bp)
        self.probe: Probe = no_probe
        self.num_rows = self.idle_rows = 0

    @torch.inference_mode()
    def run(self, sequences: List[Sequence]) -> list[Result]:
        """One forward pass of the sequences' plans, and the decisions that follow. A sequence whose logits are not
        finite fails, without an effect on the others."""
        plans = [sequence.next_pass for sequence in sequences]
        shares = [self.placement.share(plan) for plan in plans]
        jobs = self.forward(sequences, shares)
        for plan in plans:
            self.num_rows += len(plan.rows)
            self.idle_rows += self.placement.num_places(len(plan.rows)) - len(plan.rows)
        results = self.exchange(plans, jobs)
        return [self._advance(*item) for item in zip(sequences, shares, jobs, results, strict=True)]

    def _advance(self, sequence: Sequence, share: Share, job: Job, results: list[RowResult] | None) -> Result:
        """Decides, commits and plans the next pass of one sequence.

        Args:
            results: what ``exchange`` gave for the sequence.
        """
        if sequence.error is not None or results is None:
            sequence.fail(sequence.error or NOT_FINITE)
            return sequence, None
        strategy, plan = sequence.strategy, share.plan
        try:
            record = strategy.absorb(plan, results, model_tokens=share.num_computed, head_rows=len(share.predicting))
        except GrammarError as error:
            sequence.fail(str(error))
            return sequence, None
        if sequence.request.params.top_logprobs:
            self._alternatives.record(sequence, share, record, job)
        if sequence.request.continuations:
            sequence.continuation_logprobs = self._continuations.score(sequence, share, job)
        self.commit(sequence, share, record.winner, job)
        sequence.strategy = strategy.successor or strategy
        sequence.plan = sequence.strategy.plan()
        return sequence, record

    # ---- predictions of all groups ---------------------------------------------------------------------------------

    def exchange(self, plans: List[SequencePlan], own: List[Job]) -> list[list[RowResult] | None]:
        """What all groups predict, by sequence and row; None for a sequence with logits that were not finite.

        The groups gather all predictions in one message: 12 bytes for each masked position, padded to the group that
        has most. Full attention and ``top_logprobs`` need further messages: ``_broadcast``, and
        ``AlternativesRecorder``.

        Args:
            own: what this group predicts for each sequence.
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
                    rows.append(decode(gathered[group, first:last]))
                    num_read[group] = last
                valid = [row for row in rows if row is not None]
                results.append(valid if len(valid) == len(rows) else None)
            return results

    def _gather(self, plans: List[SequencePlan], own: List[Job]) -> NDArray[np.int32]:
        """By group, its encoded predictions for all sequences, one after the other: int32 [groups, n, 3]."""
        sizes = [0] * self.bp.size
        for plan in plans:
            for branch, row in enumerate(plan.rows):
                group, _ = self.placement.home(branch)
                sizes[group] += len(row.masked)
        message = torch.zeros(max(sizes), NUM_COLUMNS, dtype=torch.int32, device=self.ops.device)
        predicted = [job.predictions for job in own if job.predictions is not None]
        if predicted:
            message[: sizes[self.bp.rank]] = torch.cat(predicted)
        if not message.numel():
            return np.zeros((self.bp.size, *message.shape), dtype=np.int32)
        gathered: NDArray[np.int32] = self.bp.all_gather(message, "branches").cpu().numpy()
        return gathered

    # ---- forward pass ----------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def forward(self, sequences: List[Sequence], shares: List[Share]) -> list[Job]:
        """This rank's part of the forward pass of some sequences: what it predicts for every masked position of every
        row of this group, branch by branch. The shares say where the sequences lie in the batch."""
        # torch.empty, because head.new_empty would return a packed tensor if the head is packed, and a packed tensor
        # cannot be sliced.
        no_hidden = torch.empty(0, dtype=self.model.head.dtype, device=self.model.head.device)
        jobs = [Job(no_hidden, NOTHING, sequence.scoring, 0) for sequence in sequences]
        busy = [index for index, share in enumerate(shares) if share.rows]
        for sequence, share in zip(sequences, shares, strict=True):
            if not share.rows:
                bans_for(sequence, share, self.ops.device)  # a grammar that finds no way on fails on every rank
        if not busy:
            return jobs
        inputs = build_batch(
            [(shares[index], sequences[index].page_tables) for index in busy],
            self.ops,
            self.model.properties.logit_shift,
        )
        with self.probe("forward", inputs):
            hidden = self.model.forward(inputs, self.pool.k, self.pool.v)
        num_predicting = [int((shares[index].predicting != BEFORE_WINDOW).sum()) for index in busy]
        states = hidden.split(num_predicting + [len(last_committing(shares[index])) for index in busy])
        for index, predicting, committing in zip(busy, states, states[len(busy) :], strict=False):
            jobs[index] = self._job(sequences[index], shares[index], predicting, committing)
        scored = self.scorer.score([jobs[index] for index in busy], self.probe)
        for index, predictions in zip(busy, scored, strict=True):
            jobs[index].predictions = predictions[torch.from_numpy(shares[index].order).to(predictions.device)]
        return jobs

    def _job(self, sequence: Sequence, share: Share, hidden: Tensor, committing: Tensor) -> Job:
        """What is predicted for a sequence.

        Args:
            hidden: the computed hidden states that predict its masked positions [n, hidden].
            committing: see ``Job``.
        """
        if len(hidden) < len(share.predicting):  # the first one is BEFORE_WINDOW, which is not in the batch
            assert sequence.last_hidden is not None
            hidden = torch.cat([sequence.last_hidden[None], hidden])
        strategy, prompt = sequence.strategy, sequence.request.prompt
        answer = strategy.anchor.tokens[: strategy.num_counted]
        return Job(
            hidden=hidden,
            positions=share.positions,
            scoring=sequence.scoring,
            round=strategy.num_forwards,
            adjustment=adjustment_for(sequence.request.params, prompt, answer, self.ops.device),
            bans=bans_for(sequence, share, self.ops.device),
            committing=committing,
        )

    # ---- commit ----------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def commit(self, sequence: Sequence, share: Share, winner: int, job: Job) -> None:
        """Puts the keys and values that the winner commits into every slot of every group. Block-causal windows have
        them there already, because all branches commit the same; with full attention they are copied and sent."""
        plan, page_tables = share.plan, sequence.page_tables.by_slot
        if not plan.num_new:
            return
        if not plan.winner_commits:
            assert job.committing is not None
            sequence.last_hidden = job.committing[0].clone()
            return
        begin, end = plan.start, plan.start + plan.num_new
        group, slot = self.placement.home(winner)
        own = None  # the winner's hidden state, if this group has it
        if winner in share.branches:
            assert job.committing is not None
            own = job.committing[share.branches.index(winner)]
        if self.placement.sends_values(plan):
            sequence.last_hidden = self._broadcast(page_tables[slot], begin, end, group, own)
        else:
            assert own is not None
            sequence.last_hidden = own.clone()
        self.pool.copy_to_slots(page_tables, slot, begin, end)

    def _broadcast(self, page_table: List[int], begin: int, end: int, group: int, hidden: Tensor | None) -> Tensor:
        """Sends the winner's keys and values of the positions [begin, end), and its hidden state, to all groups.

        Args:
            page_table: of the winner's slot.
            group: the winner's group.
            hidden: [hidden] in that group.

        Returns:
            The winner's hidden state [hidden].
        """
        values = self.pool.read(page_table, begin, end)
        if hidden is None:
            hidden = values.new_empty(self.model.config.hidden_size)
        message = torch.cat([values.flatten(), hidden])
        self.bp.broadcast(message, group, "kv")
        if self.bp.rank != group:
            self.pool.write(page_table, begin, end, message[: values.numel()].view_as(values))
        return message[values.numel() :].clone()
