"""Records the most probable tokens of positions as they are filled, for requests that ask for ``top_logprobs``.

The lists belong to the pass that predicted the filled token. A winning lookahead branch brings a token that the pass
before predicted, so the lists of lookahead positions are recorded when their branches begin. If predictions of the same
pass confirm the token (``branch_acceptance``), the lists are the confirming branch's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lopa_ascend.core import Sequence
from lopa_ascend.model.base import Model
from lopa_ascend.parallel.collectives import Group
from lopa_ascend.parallel.placement import Placement
from lopa_ascend.runner.batch import Part
from lopa_ascend.runner.scoring import Job
from lopa_ascend.score.most_probable import most_probable
from lopa_ascend.types import SequencePlan, StepRecord

ROWS_AT_A_TIME = 64
"""Positions at a time: with a large vocabulary the logits of all would take gigabytes."""


@dataclass(frozen=True)
class AlternativesRecorder:
    model: Model
    placement: Placement
    bp: Group
    """The ranks that hold the same part of the model and evaluate other branches."""

    def record(self, sequence: Sequence, part: Part, record: StepRecord, job: Job) -> None:
        """Records one pass's lists in ``Strategy.alternatives`` on every rank, after the next branches have begun."""
        wanted: dict[int, set[int]] = {}
        changed = {fill.position for fill in (*record.fills, *record.edits)}
        for position in changed | sequence.strategy.recorded_positions():
            if (branch := _predicting(part.share.plan, record.winner, position)) is not None:
                wanted.setdefault(branch, set()).add(position)
        won = record.branches[record.winner]
        # As published, nothing confirms a token: ``confirmed_by`` is empty then.
        for fill, branch in zip(won.own_fills, won.confirmed_by, strict=False):
            wanted.setdefault(branch, set()).add(fill.position)
        for branch, positions in wanted.items():
            if positions:
                self._record_branch(sequence, part, branch, sorted(positions), job)

    def _record_branch(self, sequence: Sequence, part: Part, branch: int, positions: list[int], job: Job) -> None:
        """As one branch (index in ``plan.rows``) predicted them. ``positions``: masked there, ascending."""
        count, plan = sequence.request.params.top_logprobs, part.share.plan
        group, _ = self.placement.home(branch)
        message = torch.zeros(len(positions), 2 * count, device=self.model.head.device)
        if self.bp.rank == group:
            earlier_rows = plan.rows[group : branch : self.placement.size]  # of the same group
            num_before = sum(len(row.masked) for row in earlier_rows)
            places = num_before + np.searchsorted(plan.rows[branch].masked, positions)
            message = self._lists(job, part.order[places], count)
        message = self.bp.broadcast(message, group, "top_logprobs")
        read = self.model.ops.read_later(message, self.bp.while_waiting)
        ids, probs = read().split(count, dim=1)
        found = {}
        for position, tokens, values in zip(positions, ids.long().tolist(), probs.tolist(), strict=True):
            pairs = zip(tokens, values, strict=True)
            found[position] = tuple((token, prob) for token, prob in pairs if prob > 0)
        sequence.strategy.take_alternatives(found)

    def _lists(self, job: Job, index: NDArray[np.int64], count: int) -> Tensor:
        """Token ids, which float32 holds exactly up to 2^24, and probabilities, float32 [n, 2 * count]. ``index``: of
        the hidden states in ``job``."""
        model, lists = self.model, []
        for rows in torch.from_numpy(index).to(job.hidden.device).split(ROWS_AT_A_TIME):
            logits = model.logits(job.hidden[rows])
            if job.adjustment is not None:
                logits = job.adjustment.of_rows(rows).apply(logits, model.first_token_id)
            found = most_probable(logits, job.scoring, count, model.first_token_id, model.tp)
            lists.append(torch.cat([found.ids.float(), found.probs], -1))
        return torch.cat(lists)


def _predicting(plan: SequencePlan, winner: int, position: int) -> int | None:
    """The row that predicts a position: the winner, or in a checking pass another one; None if an earlier pass did."""
    rows = (winner, *reversed(range(len(plan.rows))))  # the anchor predicts what is before the winner's own tokens
    return next((row for row in rows if position in plan.rows[row].masked), None)
