"""Greedy scores as tensor functions of fixed shape, for use inside a compiled step: ``score.py`` at temperature 0.

The vocabulary may be split between ranks. Then each tells a few numbers a row, and every rank merges those of all.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from lopa_ascend.parallel.collectives import Group
from lopa_ascend.types import Traffic

PURPOSE = "vocabulary"


class Scored(NamedTuple):
    """Of n positions: ``ids`` int32, ``probs`` and ``confidences`` float32, which are the same tensor for
    "max_prob"."""

    ids: Tensor
    probs: Tensor
    confidences: Tensor


class GreedyScore:
    """Scores logits [n, V] of this rank's ``ids``; all ranks of ``tp``, in the order of their ids, get the same.

    The id ``mask`` and those from ``num_token_ids`` on are never chosen, but keep their share of the denominator.
    Ties go to the lowest id.

    A row with a logit that is NaN or +inf has the probability NaN, and any token; -inf is a logit
    like another as long as one is finite that can be chosen, but for "neg_entropy", which is NaN then.
    """

    def __init__(
        self, ids: range, mask: int, num_token_ids: int, tp: Group, device: torch.device, confidence: str = "max_prob"
    ):
        self._tp, self._confidence = tp, confidence
        own = torch.arange(ids.start, ids.stop, dtype=torch.int32)
        never = (own == mask) | (own >= num_token_ids)
        self._has_choice = not bool(never.all())
        self._ids = own.to(device)
        self._never = torch.zeros(len(ids)).masked_fill(never, -math.inf).to(device)
        self._shards = torch.arange(tp.size)[:, None].to(device)

    @property
    def told(self) -> int:
        """How many of the first tensors of Scored are different ones."""
        return 2 if self._confidence == "max_prob" else 3

    def __call__(self, logits: Tensor) -> Scored:
        wide = logits.float()
        best, at = (wide + self._never if self._has_choice else wide).max(-1, keepdim=True)
        # Logarithms, for a share itself may vanish beside ids that are never chosen.
        log_shares = torch.log_softmax(wide, -1)
        log_share = log_shares.gather(1, at)
        ids = self._ids.index_select(0, at.view(-1))
        rest = self._rest(log_shares, ids)
        if self._tp.size > 1:
            return self._merged(best, log_share, best - log_share, rest, ids)
        probs = log_share.exp().view(-1)
        if self._confidence == "margin":
            return Scored(ids, probs, probs - rest[0].exp())
        return Scored(ids, probs, rest[0] if rest else probs)

    def _rest(self, log_shares: Tensor, ids: Tensor) -> list[Tensor]:
        """What the confidence needs of a shard besides, [n]: "margin" the largest share of another id (logarithm),
        "neg_entropy" the sum of p log p."""
        if self._confidence == "margin":
            return [torch.where(self._ids == ids[:, None], -math.inf, log_shares).max(-1).values]
        if self._confidence == "neg_entropy":
            return [(log_shares.exp() * log_shares).sum(-1)]
        return []

    def _merged(self, best: Tensor, log_share: Tensor, total: Tensor, rest: list[Tensor], ids: Tensor) -> Scored:
        """Of a shard, [n, 1] each but ``rest`` and ``ids`` [n]: the largest logit that can be chosen, the logarithms of
        its share of the shard's softmax and of the softmax's denominator, what ``_rest`` gives, and its id."""
        if not self._has_choice:
            best = torch.full_like(best, -math.inf)
        numbers = [x.view(torch.int32).view(-1) for x in (best, log_share, total, *rest)]
        gathered = self._tp.all_gather(torch.stack([*numbers, ids]), PURPOSE)
        *bits, ids = gathered.unbind(1)  # [shards, n] each
        best, log_share, total, *rest = (x.view(torch.float32) for x in bits)
        winner = best.argmax(0).view(1, -1)
        log_weight = torch.log_softmax(total, 0)
        log_probs = log_weight + log_share
        probs = log_probs.gather(0, winner).exp().view(-1)
        ids = ids.gather(0, winner).view(-1)
        if self._confidence == "margin":
            elsewhere = torch.where(self._shards == winner, -math.inf, log_probs)
            other = torch.maximum(log_weight + rest[0], elsewhere).max(0).values
            return Scored(ids, probs, probs - other.exp())
        if self._confidence == "neg_entropy":
            return Scored(ids, probs, (log_weight.exp() * (rest[0] + log_weight)).sum(0))
        return Scored(ids, probs, probs)

    def traffic(self, rows: int) -> tuple[Traffic, ...]:
        """What this rank sends for ``rows`` logits."""
        return () if self._tp.size == 1 else (Traffic(PURPOSE, 1, 4 * (2 + self.told) * rows),)
