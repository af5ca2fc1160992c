"""From the hidden states of several sequences to predictions for their masked positions."""

from __future__ import annotations

from collections.abc import Sequence as List
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lopa_ascend.backend.interface import Ops
from lopa_ascend.model.base import Model
from lopa_ascend.probe import Probe
from lopa_ascend.score.adjust import Adjustment
from lopa_ascend.score.merge import merge_scores
from lopa_ascend.score.prediction import NO_PREDICTIONS, Predictions
from lopa_ascend.score.shards import MAX_OFFERED, Bans, shard_scores
from lopa_ascend.types import Scoring

HEAD_ROWS = 512
"""Rows of logits that are computed at a time: enough to use each of the head's weights many times. With 128 the head
and the scores of 380 positions and 32,000 token ids took 1.1 to 1.2 times as long."""

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Job:
    """What one sequence wants predicted, at n positions."""

    hidden: Tensor
    """The hidden states that predict the positions [n, hidden]."""
    positions: Indices
    """The predicted positions [n]."""
    scoring: Scoring
    round: int
    """Number of the forward pass: part of the sampling noise."""
    adjustment: Adjustment | None = None
    """What is done to the logits first."""
    bans: Bans | None = None


@dataclass
class _Batch:
    """Neighbouring jobs that are scored alike."""

    scoring: Scoring
    round: int
    """0 for all greedy requests, so that they share a batch."""
    jobs: list[Job]
    """A job with an adjustment or bans is alone in its batch."""


class Scorer:
    """The LM head and the scores of one rank. All ranks of the model's group ``tp`` get the same predictions."""

    def __init__(self, model: Model, ops: Ops) -> None:
        self.model, self.ops = model, ops

    def score(self, jobs: List[Job], probe: Probe) -> list[Predictions]:
        """The predictions of each job."""
        out: list[Predictions] = []
        for batch in _batches(jobs):
            lengths = [len(job.hidden) for job in batch.jobs]
            rows = torch.cat([job.hidden for job in batch.jobs])
            where = np.concatenate([job.positions for job in batch.jobs])
            with probe("score", (len(rows), batch.scoring)):
                scored = self._score_rows(rows, where, batch)
            ends = np.cumsum(lengths)
            out += [scored.take(slice(end - length, end)) for length, end in zip(lengths, ends, strict=True)]
        return out

    def _score_rows(self, rows: Tensor, positions: Indices, batch: _Batch) -> Predictions:
        """The predictions of hidden states [n, hidden] for the positions [n]."""
        num_rows, scoring, round_ = len(rows), batch.scoring, batch.round
        if not num_rows:
            return NO_PREDICTIONS
        where = torch.from_numpy(positions).to(self.ops.device)
        score_rows = self.ops.score_rows or HEAD_ROWS
        if num_rows % score_rows == 1:  # torch sums a single row in several threads, so in another order
            rows, where = torch.cat([rows, rows[-1:]]), torch.cat([where, where[-1:]])
        tp = self.model.tp
        is_split = tp.size > 1
        first_row = 0
        pieces: list[tuple[Tensor, ...]] = []  # statistics of this shard if the vocabulary is split, else predictions
        for chunk, chunk_positions in zip(rows.split(HEAD_ROWS), where.split(HEAD_ROWS), strict=True):
            logits = self.model.logits(chunk).split(score_rows)
            for piece, at in zip(logits, chunk_positions.split(score_rows), strict=True):
                shard = self._shard_scores(piece, at, batch, first_row)
                first_row += len(piece)
                if is_split:
                    pieces.append((shard,))
                else:  # merged at once, while the statistics are in the CPU's cache
                    pieces.append(merge_scores(shard[None], scoring, at, round_))
        columns = [torch.cat(column) for column in zip(*pieces, strict=True)]
        if is_split:
            columns = list(merge_scores(tp.all_gather(columns[0], "vocabulary"), scoring, where, round_))
        tokens, probs, confidences = (column[:num_rows].cpu().numpy() for column in columns)
        return Predictions(tokens.astype(np.int32), probs, confidences)

    def _shard_scores(self, logits: Tensor, positions: Tensor, batch: _Batch, first_row: int) -> Tensor:
        """The statistics of this rank's shard for some rows of a batch; see ``shards.shard_scores``.

        Args:
            logits: of these rows [R, local_vocab_size].
            positions: which they predict, int64 [R].
            first_row: index of the first of them in the batch.
        """
        first_token_id = self.model.first_token_id
        job = batch.jobs[0]  # the only one if it has an adjustment or bans
        if job.adjustment is not None:
            logits = job.adjustment.apply(logits, first_token_id)
        bans = None if job.bans is None else job.bans.within(first_row, len(logits))
        limit = MAX_OFFERED if self.model.tp.size > 1 else None
        return shard_scores(logits, batch.scoring, positions, batch.round, first_token_id, limit, bans)


def _batches(jobs: List[Job]) -> list[_Batch]:
    batches: list[_Batch] = []
    last_is_alone = True
    for job in jobs:
        round_ = job.round if job.scoring.temperature else 0
        is_alone = job.adjustment is not None or job.bans is not None
        joins = not is_alone and not last_is_alone and (batches[-1].scoring, batches[-1].round) == (job.scoring, round_)
        if joins:
            batches[-1].jobs.append(job)
        else:
            batches.append(_Batch(job.scoring, round_, [job]))
        last_is_alone = is_alone
    return batches
