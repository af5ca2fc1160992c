"""Greedy scores with fixed shapes, for compiled steps: the same as ``shards.py`` and ``merge.py`` at temperature 0.

A compiled step wants few kernels; eager steps score in place, which is faster on a CPU. Tests hold the two equal. If
ranks split the vocabulary, each sends a few numbers for each row, and every rank merges them.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from lopa_ascend.backend.interface import Ops, RowStats
from lopa_ascend.parallel.collectives import Group
from lopa_ascend.score.reductions import columns_of
from lopa_ascend.types import Traffic

PURPOSE = "vocabulary"


class Scored(NamedTuple):
    """The predictions for n positions: int32 and float32 [n]."""

    ids: Tensor
    probs: Tensor
    confidences: Tensor
    """For "max_prob" the same tensor as ``probs``."""


class GreedyScore:
    """Scores logits [n, V] of this rank's part of the vocabulary; all ranks get the same predictions.

    The mask and ids from ``num_token_ids`` on are never chosen, but keep their share of the denominator. Ties go to the
    lowest id. A row with a logit that is NaN or +inf has the probability NaN, and any token. A logit of -inf is allowed
    if an id that may be chosen has a finite one; ``prediction.py`` names the exceptions. ``tp``: the ranks of the other
    parts, in the order of their ids.
    """

    def __init__(
        self, ids: range, mask: int, num_token_ids: int, tp: Group, ops: Ops, confidence: str = "max_prob"
    ) -> None:
        self._tp, self._confidence, self._kernel, device = tp, confidence, ops.row_stats, ops.device
        own = torch.arange(ids.start, ids.stop, dtype=torch.int32)
        never_chosen = (own == mask) | (own >= num_token_ids)
        self._has_choice = not bool(never_chosen.all())
        self._ids = own.to(device)
        never_chosen &= self._has_choice
        self._never_chosen = torch.zeros(len(ids)).masked_fill(never_chosen, -math.inf).to(device)
        self._shard_index = torch.arange(tp.size)[:, None].to(device)  # [shards, 1]

    @property
    def num_columns(self) -> int:
        """Different tensors in ``Scored``: the confidences may be the probabilities."""
        return 2 if self._confidence == "max_prob" else 3

    def __call__(self, logits: Tensor) -> Scored:
        shard = self._score_shard(logits)
        ids = self._ids.index_select(0, shard.column)
        if self._tp.size > 1:
            return self._merge(shard, ids)
        probs = shard.log_share.exp()
        if self._confidence == "margin":
            return Scored(ids, probs, probs - shard.rest[0].exp())
        return Scored(ids, probs, shard.rest[0] if shard.rest else probs)

    def _score_shard(self, logits: Tensor) -> RowStats:
        if self._kernel is not None:
            return self._kernel(logits, self._never_chosen, self._confidence)
        wide = logits.float()
        choosable = wide + self._never_chosen if self._has_choice else wide
        best, index = choosable.max(-1, keepdim=True)
        log_shares = torch.log_softmax(wide, -1)
        log_share = columns_of(log_shares, index)
        log_total = best - log_share
        index = index.view(-1)
        rest = self._rest(log_shares, self._ids.index_select(0, index))
        return RowStats(best.view(-1), log_share.view(-1), log_total.view(-1), rest, index)

    def _rest(self, log_shares: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
        """``RowStats.rest`` of the shard's log softmax float32 [n, V]. ``ids``: of its largest logits, int32 [n]."""
        if self._confidence == "margin":
            others = torch.where(self._ids == ids[:, None], -math.inf, log_shares)
            return (others.max(-1).values,)
        if self._confidence == "neg_entropy":
            return ((log_shares.exp() * log_shares).sum(-1),)
        return ()

    def _merge(self, shard: RowStats, own_ids: Tensor) -> Scored:
        """All shards' predictions. ``own_ids``: of this rank's best, int32 [n]."""
        best = shard.best if self._has_choice else torch.full_like(shard.best, -math.inf)
        columns = (best, shard.log_share, shard.log_total, *shard.rest)
        message = torch.stack([*(column.view(torch.int32) for column in columns), own_ids])
        *bits, ids = self._tp.all_gather(message, PURPOSE).unbind(1)  # [shards, n] each
        best, log_share, log_total, *rest = (column.view(torch.float32) for column in bits)
        winning_shard = best.argmax(0).view(1, -1)
        # By shard, the logarithms of its share of the whole softmax, and of its best token's probability.
        log_weight = torch.log_softmax(log_total, 0)
        log_probs = log_weight + log_share
        probs = log_probs.gather(0, winning_shard).exp().view(-1)
        ids = ids.gather(0, winning_shard).view(-1)
        if self._confidence == "margin":
            best_elsewhere = torch.where(self._shard_index == winning_shard, -math.inf, log_probs)
            other = torch.maximum(log_weight + rest[0], best_elsewhere).max(0).values
            return Scored(ids, probs, probs - other.exp())
        if self._confidence == "neg_entropy":
            return Scored(ids, probs, (log_weight.exp() * (rest[0] + log_weight)).sum(0))
        return Scored(ids, probs, probs)

    def traffic(self, num_rows: int) -> tuple[Traffic, ...]:
        if self._tp.size == 1:
            return ()
        num_rest = self.num_columns - 2
        num_columns = 4 + num_rest  # best, log_share, log_total, ids
        return (Traffic(PURPOSE, 1, 4 * num_columns * num_rows),)
