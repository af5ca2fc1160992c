"""From the hidden states of several sequences to predictions for their masked positions."""

from __future__ import annotations

from collections.abc import Sequence as List
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lopa_ascend.backend.interface import Ops
from lopa_ascend.model.base import Model
from lopa_ascend.probe import Probe
from lopa_ascend.runner.batch import Indices
from lopa_ascend.score.adjust import Adjustment
from lopa_ascend.score.merge import merge_scores
from lopa_ascend.score.prediction import NUM_COLUMNS, NUM_WITH_RUNNER_UP, encode
from lopa_ascend.score.shards import MAX_OFFERED, Bans, is_plain, join_bans, shard_scores
from lopa_ascend.types import Scoring

HEAD_ROWS = 512
"""Rows of logits that are computed at a time: enough to use each of the head's weights many times. With 128 the head
and the scores of 380 positions and 32,000 token ids took 1.1 to 1.2 times as long."""


@dataclass(frozen=True, eq=False)
class Job:
    """What the hidden states of one sequence are to predict, at n positions."""

    hidden: Tensor
    """That predict the positions, [n, hidden]."""
    positions: Indices
    """Predicted, [n]."""
    scoring: Scoring
    round: int
    """The noise of samples depends on it, seed and position."""
    adjustment: Adjustment | None = None
    """Done to the logits first."""
    bans: Bans | None = None

    def is_like(self, other: Job) -> bool:
        """Whether both may be scored in one batch. Greedy jobs may whatever the numbers of their passes are."""
        same_noise = not self.scoring.temperature or self.round == other.round
        is_alone = self.adjustment is not None or other.adjustment is not None
        return not is_alone and self.scoring == other.scoring and same_noise


class Scorer:
    """The LM head and the scores of one rank. All ranks of the model's group ``tp`` get the same predictions."""

    def __init__(self, model: Model, ops: Ops) -> None:
        self.model, self.ops = model, ops

    def score(self, jobs: List[Job], probe: Probe) -> list[Tensor]:
        out: list[Tensor] = []
        for batch in _batches(jobs):
            rows = torch.cat([job.hidden for job in batch])
            where = np.concatenate([job.positions for job in batch])
            bans = join_bans([(job.bans, len(job.hidden)) for job in batch])
            with probe("score", (len(rows), batch[0].scoring)):
                scored = self._score_rows(rows, where, batch[0], bans)
            out += scored.split([len(job.hidden) for job in batch])
        return out

    def _score_rows(self, rows: Tensor, positions: Indices, job: Job, bans: Bans | None) -> Tensor:
        """Encoded predictions of hidden states [n, hidden] for ``positions`` [n]. ``job``: the batch's first job; all
        its jobs are scored the same way. ``bans``: of the whole batch."""
        num_rows, scoring, round_ = len(rows), job.scoring, job.round
        if not num_rows:
            width = NUM_WITH_RUNNER_UP if scoring.runner_up else NUM_COLUMNS
            return torch.empty(0, width, dtype=torch.int32, device=self.ops.device)
        where = torch.from_numpy(positions).to(self.ops.device)
        has_kernel = self.ops.shard_stats is not None and is_plain(scoring)
        score_rows = self.ops.score_rows or HEAD_ROWS
        if num_rows % score_rows == 1:  # torch sums a single row in several threads, so in another order
            rows, where = torch.cat([rows, rows[-1:]]), torch.cat([where, where[-1:]])
        tp = self.model.tp
        merges_at_once = tp.size == 1 and not has_kernel
        first_row = 0
        pieces: list[tuple[Tensor, ...]] = []  # predictions if these are merged at once, else statistics of this shard
        for chunk, chunk_positions in zip(rows.split(HEAD_ROWS), where.split(HEAD_ROWS), strict=True):
            logits = self.model.logits(chunk).split(score_rows)
            for piece, at in zip(logits, chunk_positions.split(score_rows), strict=True):
                if job.adjustment is not None:
                    span = torch.arange(first_row, first_row + len(piece), device=piece.device)
                    piece = job.adjustment.of_rows(span).apply(piece, self.model.first_token_id)
                shard = self._shard_scores(piece, at, job, bans and bans.within(first_row, len(piece)))
                first_row += len(piece)
                # Merged while the logits are in the CPU's cache.
                pieces.append(merge_scores(shard[None], scoring, at, round_) if merges_at_once else (shard,))
        columns = [torch.cat(column) for column in zip(*pieces, strict=True)]
        if not merges_at_once:
            columns = list(merge_scores(tp.all_gather(columns[0], "vocabulary"), scoring, where, round_))
        return encode(*(column[:num_rows] for column in columns))

    def _shard_scores(self, logits: Tensor, positions: Tensor, job: Job, bans: Bans | None) -> Tensor:
        """This rank's statistics (``shards.shard_scores``) for rows of logits [R, local_vocab_size] that predict
        ``positions``, int64 [R]. ``job``: the batch's first; ``bans``: of these rows."""
        first_token_id, scoring, kernel = self.model.first_token_id, job.scoring, self.ops.shard_stats
        limit = MAX_OFFERED if self.model.tp.size > 1 else None
        if kernel is None or not is_plain(scoring):
            return shard_scores(logits, scoring, positions, job.round, first_token_id, limit, bans)
        mask, end = scoring.mask - first_token_id, scoring.num_token_ids - first_token_id
        stats = kernel(logits, mask, end, scoring.confidence == "neg_entropy")
        if scoring.runner_up:
            others = logits.scatter(1, stats[:, -1:].long(), -torch.inf)
            second = kernel(others, mask, end, False)[:, 2:]
            stats = torch.cat([stats[:, :-1], second[:, :1], stats[:, -1:], second[:, 1:]], 1)
        stats[:, -1 - scoring.runner_up :] += first_token_id
        if bans is not None and len(rows := bans.rows):  # the kernel knows none
            if len(rows) == 1:  # never a single row, as in `_score_rows`
                rows = rows.repeat(2)
            at = torch.from_numpy(rows).to(logits.device)
            own = shard_scores(logits[at], scoring, positions[at], job.round, first_token_id, limit, bans.at(rows))
            stats[at] = own
        return stats


def _batches(jobs: List[Job]) -> list[list[Job]]:
    """Neighbouring jobs that are scored alike."""
    batches: list[list[Job]] = []
    for job in jobs:
        if batches and batches[-1][0].is_like(job):
            batches[-1].append(job)
        else:
            batches.append([job])
    return batches
