"""The most probable tokens of some positions, for requests that ask for them beside the filled ones."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from lopa_ascend.parallel.collectives import Group
from lopa_ascend.score.reductions import columns_of, first_argmax
from lopa_ascend.types import Scoring


class MostProbable(NamedTuple):
    """The most probable tokens of R positions, best first, ties by lowest id: int64 and float32 [R, count]."""

    ids: Tensor
    probs: Tensor
    """0 if there are fewer tokens."""


def most_probable(logits: Tensor, scoring: Scoring, count: int, first: int, tp: Group) -> MostProbable:
    """The most probable tokens of all shards of the vocabulary, on every rank of ``tp``. Probabilities are at the
    request's temperature, before top_k, top_p and min_p. The mask and ids that do not exist are not listed, but keep
    their share. ``logits``: this rank's shard [R, n], from token id ``first`` on."""
    x = logits.float()
    if scoring.temperature:
        x = x / scoring.temperature
    log_total = x.logsumexp(-1, keepdim=True)
    ids = torch.arange(first, first + x.shape[1], device=x.device)
    is_listed = (ids != scoring.mask) & (ids < scoring.num_token_ids)
    best, columns = _largest(x.masked_fill(~is_listed, -math.inf), count)
    # Token ids are exact in float32 up to 2^24.
    message = torch.cat([log_total, best, (columns + first).float()], -1)
    gathered = tp.all_gather(message, "vocabulary")  # [shards, R, 1 + 2 count]
    log_totals, values, all_ids = gathered.transpose(0, 1).split([1, count, count], -1)  # [R, shards, ...] each
    ranked, order = values.flatten(1).sort(dim=-1, descending=True, stable=True)
    probs = (ranked[:, :count] - log_totals[..., 0].logsumexp(-1, keepdim=True)).exp()
    return MostProbable(columns_of(all_ids.flatten(1), order[:, :count]).long(), probs)


def _largest(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Values and columns [R, count] of the largest in each row of x [R, n], which is overwritten: the largest first,
    the lowest columns among equals; -inf for missing ones. As many maxima cost less than sorting a vocabulary, and topk
    may take any of equal values."""
    values, columns = [], []
    for _ in range(count):
        column = first_argmax(x)
        values.append(columns_of(x, column))
        columns.append(column)
        x.scatter_(-1, column, -math.inf)
    return torch.cat(values, -1), torch.cat(columns, -1)
