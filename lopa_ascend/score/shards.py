"""Logits to statistics of one shard of the vocabulary, without a softmax over the whole vocabulary.

Ranks may split the vocabulary. Each makes a few statistics of its own logits, and ``merge.py`` turns those of all ranks
into predictions, so no rank ever holds a whole row of logits (SPEC section 3). Statistics are float32 whatever the
model's dtype is. The mask and ids that are not in the tokenizer are never chosen, but keep their share of the softmax's
denominator, so that confidences compare with the published code's. Ties go to the lowest id. At a temperature the token
is drawn by Gumbel-max.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from lopa_ascend.score.noise import gumbel_noise
from lopa_ascend.score.reductions import columns_of, finite_max, first_argmax, scaled, softmax_sums
from lopa_ascend.types import Scoring

MAX_OFFERED = 256
"""Tokens that each of several shards offers to top_p, top_k and min_p."""

Place = tuple[Tensor | slice, Tensor | slice]
"""(rows, columns) of logits."""
Offer = tuple[dict[str, Tensor], Tensor, Tensor]
"""(statistics by name [R, 1], offered logits [R, K], their token ids [R, K])."""


EXCLUDED = -1e30
"""The logit of a token with probability 0. Finite, also after division by a temperature, so that a shard without
another one has a sum and an entropy."""


Key = TypeVar("Key", bound=Hashable)


class PerRow(NamedTuple):
    """For each of R rows one of a few tensors, or none."""

    tensors: tuple[Tensor, ...]
    of_row: NDArray[np.int64]
    """Index into ``tensors`` [R]; -1 for none."""

    @classmethod
    def of(cls, keys: Sequence[Key], make: Callable[[Key], Tensor]) -> PerRow:
        """One tensor for each distinct key that is not empty."""
        numbers = {key: number for number, key in enumerate(dict.fromkeys(filter(None, keys)))}
        return cls(tuple(map(make, numbers)), np.array([numbers.get(key, -1) for key in keys], dtype=np.int64))

    @classmethod
    def joined(cls, parts: Sequence[PerRow]) -> PerRow:
        tensors, indices = list[Tensor](), []
        for part in parts:
            indices.append(np.where(part.of_row < 0, -1, part.of_row + len(tensors)))
            tensors += part.tensors
        return cls(tuple(tensors), np.concatenate(indices))

    @property
    def rows(self) -> NDArray[np.int64]:
        return np.flatnonzero(self.of_row >= 0)

    def within(self, first_row: int, num_rows: int) -> PerRow:
        return self.at(slice(first_row, first_row + num_rows))

    def at(self, rows: slice | NDArray[np.int64]) -> PerRow:
        return self._replace(of_row=self.of_row[rows])


class Bans(NamedTuple):
    """Tokens that may not be chosen in single rows."""

    lists: PerRow
    """Token ids int64 [n], which keep their share of the softmax."""
    sets: PerRow
    """float32 [vocabulary], 1 for members, else 0. They have probability 0, and the others share theirs."""

    def within(self, first_row: int, num_rows: int) -> Bans:
        return Bans(*(kind.within(first_row, num_rows) for kind in self))

    @property
    def rows(self) -> NDArray[np.int64]:
        return np.union1d(self.lists.rows, self.sets.rows)

    def at(self, rows: NDArray[np.int64]) -> Bans:
        return Bans(*(kind.at(rows) for kind in self))

    def exclude(self, x: Tensor, first: int) -> None:
        """Sets logits [R, n] of members of ``sets`` to ``EXCLUDED``. ``first``: token id of the first column."""
        for row in self.sets.rows:
            banned = self.sets.tensors[self.sets.of_row[row]][first : first + x.shape[-1]]
            x[row, : len(banned)].add_(banned, alpha=EXCLUDED)  # many times as fast as a masked fill
            x[row, len(banned) :] = EXCLUDED  # rows of the embedding beyond the vocabulary


def join_bans(parts: Sequence[tuple[Bans | None, int]]) -> Bans | None:
    """``parts``: the bans of each run of rows, and how many rows it has."""
    if not any(bans for bans, _ in parts):
        return None
    nothing = [PerRow((), np.full(num_rows, -1)) for _, num_rows in parts]
    given = [bans or Bans(none, none) for (bans, _), none in zip(parts, nothing, strict=True)]
    return Bans(*map(PerRow.joined, zip(*given, strict=True)))


def columns(scoring: Scoring) -> tuple[str, ...]:
    """The names of a shard's statistics, in order. The offered logits and their token ids follow them.

    - "high": the largest logit; not finite if any logit is NaN or +inf.
    - "total": the sum of exp x, with x = (logit - high) / temperature.
    - "dot", for "neg_entropy": the sum of x exp x.
    - "other", for "margin": the largest logit that is not offered.
    - "mass", for top_p without top_k and min_p: the sum of exp x over the ids that may be chosen, x measured from their
      largest.

    With top_p, top_k or min_p, "total", "dot" and "other" count only ids that are never chosen; ``merge.py`` adds the
    kept ones.
    """
    names = ["high", "total"]
    if scoring.confidence == "neg_entropy":
        names.append("dot")
    elif scoring.confidence == "margin":
        names.append("other")
    if scoring.top_p is not None and scoring.top_k is None and not scoring.min_p:
        names.append("mass")
    return tuple(names)


def is_plain(scoring: Scoring) -> bool:
    """Whether ``Ops.shard_stats`` gives the statistics."""
    is_greedy = not (scoring.temperature or scoring.truncated)
    return is_greedy and scoring.confidence != "margin"


def shard_scores(
    logits: Tensor,
    scoring: Scoring,
    positions: Tensor,
    round_: int,
    first: int = 0,
    limit: int | None = None,
    bans: Bans | None = None,
) -> Tensor:
    """The statistics of one shard, float32 [R, C], for ``positions`` int64 [R]. It offers one token, with ``runner_up``
    two, for top_p, top_k and min_p several: at most ``limit``, so that C does not depend on n; None for the only shard,
    which may offer all. ``logits`` [R, n], n >= 1, may be overwritten; their first column is the id ``first``."""
    x = logits.float()
    if bans is not None:
        bans.exclude(x, first)
    high = x.amax(-1, keepdim=True)  # NaN and +inf show in it, and make all statistics NaN
    if scoring.truncated:
        stats, values, ids = _offer_best(x, high, scoring, first, limit, bans)
    else:
        stats, values, ids = _offer_one(x, high, scoring, positions, round_, first, bans)
    stats["high"] = high
    # Ids travel as numbers, not as bits: float32 is exact up to 2^24, and devices may flush bits that look denormal.
    return torch.cat([*(stats[name] for name in columns(scoring)), values, ids.float()], -1)


def _offer_one(
    x: Tensor, high: Tensor, scoring: Scoring, positions: Tensor, round_: int, first: int, bans: Bans | None
) -> Offer:
    """Offers the most probable token or, at a temperature, the drawn one: K is 1; with ``runner_up`` 2."""
    banned = _ban(x, scoring, first, bans)
    keys = x
    if scoring.temperature:
        ids = torch.arange(first, first + x.shape[-1], device=x.device)
        noise = gumbel_noise(scoring.seed, positions, round_, ids)
        keys = noise.add_(scaled(x, high, scoring.temperature))
    chosen = first_argmax(keys)
    values = columns_of(x, chosen)
    offered, offers = chosen, values
    if scoring.runner_up:
        second = first_argmax(keys.scatter(-1, chosen, -math.inf))
        offered = torch.cat([chosen, second], -1)
        offers = torch.cat([values, columns_of(x, second).masked_fill_(second == chosen, -math.inf)], -1)
    # "other" is the largest logit of all ids but the chosen one; ids that may not be chosen count too.
    x.scatter_(-1, chosen, -math.inf)
    for place, logits in banned:
        x[place] = logits
    stats = {"other": x.amax(-1, keepdim=True)} if scoring.confidence == "margin" else {}
    # A row without an allowed token offers -inf for the column of a banned one, whose logit must stay.
    x.scatter_(-1, chosen, torch.maximum(columns_of(x, chosen), values))
    emptied = () if bans is None else bans.sets.rows
    return stats | softmax_sums(x, high, scoring, emptied), offers, offered + first


def _offer_best(x: Tensor, high: Tensor, scoring: Scoring, first: int, limit: int | None, bans: Bans | None) -> Offer:
    """Offers the K most probable tokens, the lowest ids first among equals; -inf stands for tokens that are missing."""
    allowed = x.clone()
    _ban(allowed, scoring, first, bans)
    x.masked_fill_(allowed != -math.inf, -math.inf)  # leaves the ids that are never chosen
    stats = {"other": x.amax(-1, keepdim=True)} if scoring.confidence == "margin" else {}
    stats |= softmax_sums(x, high, scoring)
    if "mass" in columns(scoring):
        weights = scaled(allowed, finite_max(allowed), scoring.temperature).exp_()
        stats["mass"] = weights.sum(-1, keepdim=True)
    size = x.shape[-1]
    count = size if limit is None else limit
    if scoring.top_k is not None:
        count = min(count, scoring.top_k)
    ids = torch.arange(size, device=x.device).expand_as(x)
    if count < size:
        best, order = allowed.sort(dim=-1, descending=True, stable=True)
        allowed, ids = best[:, :count], order[:, :count]
    missing = (0, max(count - size, 0))
    return stats, pad(allowed, missing, value=-math.inf), pad(ids + first, missing)


def _ban(x: Tensor, scoring: Scoring, first: int, bans: Bans | None) -> list[tuple[Place, Tensor]]:
    """Sets ids that may not be chosen to -inf. Returns the places and what stood there, for the caller to put back."""
    size, every_row = x.shape[-1], slice(None)
    places: list[Place] = []
    mask_column = scoring.mask - first
    if 0 <= mask_column < size:
        places.append((every_row, slice(mask_column, mask_column + 1)))
    if scoring.num_token_ids < first + size:
        places.append((every_row, slice(max(scoring.num_token_ids - first, 0), None)))
    if bans is not None:
        tensors, of_row = bans.lists
        for number in set(of_row[bans.lists.rows].tolist()):
            rows, ids = np.flatnonzero(of_row == number), tensors[number]
            is_here = (ids >= first) & (ids < first + size)
            places.append((torch.from_numpy(rows)[:, None].to(x.device), ids[is_here] - first))
    banned = [(place, x[place].clone()) for place in places]
    for place in places:
        x[place] = -math.inf
    return banned
