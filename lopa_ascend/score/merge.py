"""Statistics of all shards of the vocabulary to predictions; every rank computes the same ones."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lopa_ascend.score.noise import gumbel_noise
from lopa_ascend.score.reductions import finite_max, first_argmax, scaled, softmax_sums
from lopa_ascend.score.shards import columns
from lopa_ascend.types import Scoring


def merge_scores(stats: Tensor, scoring: Scoring, positions: Tensor, round_: int) -> tuple[Tensor, ...]:
    """The predictions of R rows. Each row's result is a function of that row's statistics.

    The confidence "margin" is the chosen token's probability minus the largest other one, "neg_entropy" the sum of
    p log p. Where a logit is NaN or +inf the confidence is NaN, and the rest has no meaning; for -inf see the head of
    ``prediction.py``. If top_p would keep tokens that their shard did not offer, the next offered ones take their
    place.

    Args:
        stats: what ``shards.shard_scores`` gave, float32 [shards, R, C], in the order of the shards' ids.
        positions: the predicted positions int64 [R].
        round_: number of the forward pass.

    Returns:
        Token ids int64, probabilities float32 and confidences float32, [R] each. With ``num_candidates`` then the
        most probable tokens, best first, the lowest ids first among equals: token ids int64 and probabilities float32,
        [R, candidates] each. The probability is 0 where there are fewer tokens.
    """
    names, temperature = columns(scoring), scoring.temperature
    by_name = dict(zip(names, stats[..., : len(names)].unbind(-1), strict=True))  # [shards, R] each
    values, ids = stats[..., len(names) :].transpose(0, 1).chunk(2, -1)  # [R, shards, K] each
    if scoring.truncated:
        values, ids, kept = _truncate(values, ids, by_name.get("mass"), scoring)
        for name, column in kept.items():  # the kept tokens count as one more shard
            by_name[name] = torch.cat([by_name[name], column.t()])
    values, ids = values.flatten(1), ids.flatten(1).long()
    high = by_name["high"].amax(0)
    shift = scaled(by_name["high"], high, temperature)
    weight = shift.exp()
    total = _sum_over_shards(weight * by_name["total"])
    x = scaled(values, high[:, None], temperature)
    chosen = first_argmax(x + gumbel_noise(scoring.seed, positions, round_, ids) if temperature else values)
    prob = x.gather(-1, chosen)[:, 0].exp() / total
    if scoring.confidence == "max_prob":
        confidence = prob
    elif scoring.confidence == "margin":
        other = torch.maximum(by_name["other"].amax(0), values.scatter(-1, chosen, -math.inf).amax(-1))
        confidence = prob - scaled(other, high, temperature).exp() / total
    else:
        # A shard's "dot" measures logits from the shard's largest one; with ``shift`` from the largest of all shards.
        dot = _sum_over_shards(weight * (by_name["dot"] + by_name["total"] * shift))
        confidence = dot / total - total.log()
    predicted = ids.gather(-1, chosen)[:, 0], prob, confidence
    if not scoring.num_candidates:
        return predicted
    best, order = values.sort(dim=-1, descending=True, stable=True)
    best, order = best[:, : scoring.num_candidates], order[:, : scoring.num_candidates]
    return *predicted, ids.gather(-1, order), scaled(best, high[:, None], temperature).exp() / total[:, None]


def _sum_over_shards(x: Tensor) -> Tensor:
    """The sum [R] of x [shards, R], in the order of the shards."""
    total, *others = x.unbind(0)
    for other in others:
        total = total + other
    return total


def _truncate(
    values: Tensor, ids: Tensor, mass: Tensor | None, scoring: Scoring
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Applies top_k, then min_p, then top_p to the offered tokens.

    Args:
        values: offered logits [R, shards, K].
        ids: their token ids.
        mass: the statistic [shards, R] that top_p is a share of; None if top_k or min_p limit the choice first.

    Returns:
        Logits and token ids [R, kept], best first and ties by lowest id, -inf after the last kept one; and the
        statistics of the kept tokens by name [R, 1].
    """
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
    return ranked[:, :width], ids.flatten(1).gather(-1, order[:, :width]), kept
