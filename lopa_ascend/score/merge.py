"""Statistics of all shards of the vocabulary to predictions; every rank computes the same ones."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lopa_ascend.score.noise import gumbel_noise
from lopa_ascend.score.reductions import columns_of, finite_max, first_argmax, scaled, softmax_sums
from lopa_ascend.score.shards import columns
from lopa_ascend.types import Scoring

Stats = dict[str, Tensor]
"""The statistics of the shards by name, [shards, R] each; ``shards.columns`` explains the names."""


def merge_scores(stats: Tensor, scoring: Scoring, positions: Tensor, round_: int) -> tuple[Tensor, ...]:
    """The predictions of R rows, from ``shards.shard_scores`` float32 [shards, R, C] in the order of the shards' ids,
    and ``positions`` int64 [R]. Each is a function of its own row's statistics.

    A logit of NaN or +inf makes the confidence NaN, and the rest meaningless; for -inf see ``prediction.py``. If top_p
    would keep tokens that their shard did not offer, the next offered ones take their place.

    Returns:
        Token ids int64, probabilities float32 and confidences float32, [R] each; with ``runner_up`` then ids and
        probabilities of what would be chosen without these, the probability 0 if there is nothing.
    """
    names = columns(scoring)
    by_name: Stats = dict(zip(names, stats[..., : len(names)].unbind(-1), strict=True))
    logits, ids = stats[..., len(names) :].transpose(0, 1).chunk(2, -1)  # the offered tokens [R, shards, K]
    if scoring.truncated:
        logits, ids, kept = _truncate(logits, ids, by_name.get("mass"), scoring)
        for name, column in kept.items():  # the kept tokens count as one more shard
            by_name[name] = torch.cat([by_name[name], column.t()])
    logits, ids = logits.flatten(1), ids.flatten(1).long()
    high, total = _softmax(by_name, scoring.temperature)
    keys = logits
    if scoring.temperature:
        keys = scaled(logits, high[:, None], scoring.temperature) + gumbel_noise(scoring.seed, positions, round_, ids)
    chosen = first_argmax(keys)
    probs = scaled(columns_of(logits, chosen)[:, 0], high, scoring.temperature).exp() / total
    confidences = _confidences(chosen, probs, logits, by_name, scoring)
    found = columns_of(ids, chosen)[:, 0], probs, confidences
    if not scoring.runner_up:
        return found
    others = logits.scatter(-1, chosen, -math.inf)
    second = first_argmax(keys.scatter(-1, chosen, -math.inf))
    second_probs = scaled(columns_of(others, second)[:, 0], high, scoring.temperature).exp() / total
    return *found, columns_of(ids, second)[:, 0], second_probs


def _softmax(stats: Stats, temperature: float) -> tuple[Tensor, Tensor]:
    """The largest logit of each row, and the sum of exp((logit - largest) / temperature), [R] each."""
    high = stats["high"].amax(0)
    weights = scaled(stats["high"], high, temperature).exp()
    return high, _sum_over_shards(weights * stats["total"])


def _confidences(chosen: Tensor, probs: Tensor, logits: Tensor, stats: Stats, scoring: Scoring) -> Tensor:
    """[R]; "margin" is the chosen token's probability minus the largest other one, "neg_entropy" the sum of p log p.
    ``chosen``: columns int64 [R, 1] of the offered ``logits`` [R, n]."""
    if scoring.confidence == "max_prob":
        return probs
    high, total = _softmax(stats, scoring.temperature)
    if scoring.confidence == "margin":
        others = logits.scatter(-1, chosen, -math.inf)
        other = torch.maximum(stats["other"].amax(0), others.amax(-1))
        return probs - scaled(other, high, scoring.temperature).exp() / total
    # A shard's "dot" measures logits from the shard's largest one; with ``shift`` from the largest of all shards.
    shift = scaled(stats["high"], high, scoring.temperature)
    dot = _sum_over_shards(shift.exp() * (stats["dot"] + stats["total"] * shift))
    return dot / total - total.log()


def _sum_over_shards(x: Tensor) -> Tensor:
    """[R] of x [shards, R], in the order of the shards."""
    total, *others = x.unbind(0)
    for other in others:
        total = total + other
    return total


def _truncate(
    values: Tensor, ids: Tensor, mass: Tensor | None, scoring: Scoring
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Applies top_k, then min_p, then top_p to offered tokens [R, shards, K]. ``mass`` is the statistic [shards, R]
    that top_p is a share of; None if top_k or min_p limit the choice first. Returns logits and ids [R, kept], best
    first, ties by lowest id, -inf behind the last kept one; and the statistics of the kept tokens by name [R, 1]."""
    ranked, order = values.flatten(1).sort(dim=-1, descending=True, stable=True)
    best = ranked[:, :1]
    if scoring.top_k is not None:
        ranked[:, scoring.top_k :] = -math.inf
    if scoring.min_p:
        threshold = best + scoring.temperature * math.log(scoring.min_p)
        ranked.masked_fill_(ranked < threshold, -math.inf)
    if scoring.top_p is not None:
        weights = scaled(ranked, best, scoring.temperature).exp_()
        if mass is None:
            whole = weights.sum(-1)
        else:
            shard_best = finite_max(values)[..., 0].t()
            whole = _sum_over_shards(mass * scaled(shard_best, best[:, 0], scoring.temperature).exp_())
        mass_before = weights.cumsum(-1) - weights
        is_beyond = mass_before >= scoring.top_p * whole[:, None]
        is_beyond[:, 0] = False  # the best token stays, even if float32 has no number as small as top_p
        ranked.masked_fill_(is_beyond, -math.inf)
    kept = {"high": best, **softmax_sums(ranked.clone(), best, scoring)}
    width = max(1, int((ranked != -math.inf).sum(-1).amax()))  # so that noise is drawn for these alone
    return ranked[:, :width], columns_of(ids.flatten(1), order[:, :width]), kept
