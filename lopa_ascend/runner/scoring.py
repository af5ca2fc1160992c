"""Scores hidden states of several sequences at once: logits in pieces that fit a CPU's cache, then predictions."""

from __future__ import annotations

from collections.abc import Sequence as List
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lopa_ascend.backend import Ops
from lopa_ascend.model.base import Model
from lopa_ascend.probe import Probe
from lopa_ascend.score.adjust import Adjustment
from lopa_ascend.score.merge import merge_scores
from lopa_ascend.score.prediction import NO_PREDICTIONS, Predictions
from lopa_ascend.score.shards import CANDIDATES, shard_scores
from lopa_ascend.types import Scoring

HEAD_ROWS = 128
"""Rows of logits that are computed at a time: enough to use each of the head's weights many times."""
SCORE_ROWS = 16
"""Rows of logits that are scored at a time: few enough to stay in a CPU's cache."""

Indices = NDArray[np.int64]


@dataclass
class _Batch:
    """Neighbouring sequences that are scored alike."""

    scoring: Scoring
    round: int
    """Part of the sampling noise; 0 for all greedy requests, so that they share a batch."""
    adjustment: Adjustment | None
    """What is done to the logits first. A sequence that asks for something is alone in its batch."""
    members: list[int]
    """Indices of the sequences."""


class Scorer:
    """The LM head and the scores of one rank. All ranks of the model's group ``tp`` get the same predictions."""

    def __init__(self, model: Model, ops: Ops) -> None:
        self.model, self.ops = model, ops

    def score(
        self,
        hidden: List[Tensor],
        scorings: List[tuple[Scoring, int, Adjustment | None]],
        positions: List[Indices],
        probe: Probe,
    ) -> list[Predictions]:
        """The predictions of each sequence.

        Args:
            hidden: for each sequence the hidden states [n, hidden] that predict its positions.
            scorings: for each sequence how it is scored, its round, and what is done to its logits first.
            positions: for each sequence the predicted positions [n].
        """
        out: list[Predictions] = []
        for batch in _batches(scorings):
            lengths = [len(hidden[index]) for index in batch.members]
            rows = torch.cat([hidden[index] for index in batch.members])
            where = np.concatenate([positions[index] for index in batch.members])
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
        if num_rows % SCORE_ROWS == 1:  # torch sums a single row in several threads, so in another order
            rows, where = torch.cat([rows, rows[-1:]]), torch.cat([where, where[-1:]])
        tp = self.model.tp
        limit = None if tp.size == 1 else CANDIDATES
        stats = []
        for chunk, chunk_positions in zip(rows.split(HEAD_ROWS), where.split(HEAD_ROWS), strict=True):
            logits = self.model.logits(chunk).split(SCORE_ROWS)
            for piece, at in zip(logits, chunk_positions.split(SCORE_ROWS), strict=True):
                if batch.adjustment is not None:
                    piece = batch.adjustment.apply(piece, self.model.first_token_id)
                shard = shard_scores(piece, scoring, at, round_, self.model.first_token_id, limit)
                # A shard that is alone is merged at once, while its statistics are in the cache.
                stats.append(merge_scores(shard[None], scoring, at, round_) if tp.size == 1 else (shard,))
        columns = [torch.cat(column) for column in zip(*stats, strict=True)]
        if tp.size > 1:
            columns = list(merge_scores(tp.all_gather(columns[0], "vocabulary"), scoring, where, round_))
        tokens, probs, confidences = (column[:num_rows].cpu().numpy() for column in columns)
        return Predictions(tokens.astype(np.int32), probs, confidences)


def _batches(scorings: List[tuple[Scoring, int, Adjustment | None]]) -> list[_Batch]:
    batches: list[_Batch] = []
    for index, (scoring, sequence_round, adjustment) in enumerate(scorings):
        round_ = sequence_round if scoring.temperature else 0
        last = batches[-1] if batches else None
        is_alone = adjustment is not None or (last is not None and last.adjustment is not None)
        if last is not None and not is_alone and (last.scoring, last.round) == (scoring, round_):
            last.members.append(index)
        else:
            batches.append(_Batch(scoring, round_, adjustment, [index]))
    return batches
