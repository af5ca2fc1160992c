"""Logits to (token, probability, confidence), without a softmax over the vocabulary (SPEC section 3).

The vocabulary may be split between ranks: ``shard_scores`` makes a few statistics of one shard's logits, and
``merge_scores`` turns those of all shards into results, so that nobody ever holds a whole row of logits.

Confidences are float32 whatever the model's dtype. The mask id and ids behind the tokenizer are never chosen, but keep
their share of the softmax's denominator, so that confidences stay comparable with the published code. Ties go to the
lowest token id. At a temperature the token is drawn by Gumbel-max with noise that is a function of (seed, position,
round, token id) alone.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from lopa_ascend.types import Scoring

CANDIDATES = 256
"""How many tokens each of several shards offers to top_p and top_k."""

Where = tuple[Tensor | slice, Tensor | slice]


def columns(scoring: Scoring) -> tuple[str, ...]:
    """What a shard tells besides the tokens it offers, in order.

    "high" is its largest logit, not finite if any is not. With x = (logit - high) / temperature over all its ids,
    or if ``truncated`` over those that are never chosen, "total" is the sum of exp x and "dot" that of x exp x;
    "other" is the largest logit but the offered one, or if ``truncated`` of those that are never chosen. "mass" is
    the sum of exp x over the ids that may be chosen, with x taken from the largest of them.
    """
    names = ["high", "total"]
    if scoring.confidence == "neg_entropy":
        names.append("dot")
    elif scoring.confidence == "margin":
        names.append("other")
    if scoring.top_p is not None and scoring.top_k is None:
        names.append("mass")
    return tuple(names)


def shard_scores(
    logits: Tensor, scoring: Scoring, positions: Tensor, round_: int, first: int = 0, limit: int | None = None
) -> Tensor:
    """What ``merge_scores`` has to know of one shard: float32 [R, C] of its logits [R, n], n >= 1, for the token ids
    from ``first`` on and the absolute ``positions`` [R], in forward pass ``round_``. ``logits`` may be overwritten.

    A shard offers one token, or for top_p and top_k its ``limit`` best, never more than top_k; None, where there is no
    other shard: all. With a ``limit``, C does not depend on n.
    """
    x = logits.float()
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    high = high.masked_fill(~low.isfinite(), math.nan)  # NaN and +inf would do by themselves, -inf would pass
    if scoring.truncated:
        head, values, ids = _offer_best(x, high, scoring, positions, first, limit)
    else:
        head, values, ids = _offer_one(x, high, scoring, positions, round_, first)
    head["high"] = high
    # Ids are numbers rather than bits: float32 is exact up to 2^24, and devices may flush what looks denormal.
    return torch.cat([*(head[name] for name in columns(scoring)), values, ids.float()], -1)


def merge_scores(stats: Tensor, scoring: Scoring, positions: Tensor, round_: int) -> tuple[Tensor, Tensor, Tensor]:
    """(tokens int64, probabilities float32, confidences float32), each [R], of the shards' statistics [shards, R, C] in
    the order of their ids. Each row's result is a function of that row's statistics.

    "margin" is the chosen token's probability less the largest other one, "neg_entropy" the sum of p log p. Where a
    logit is not finite, the confidence is not finite, and nothing may be made of the rest. If top_p would keep tokens
    that their shard did not offer, others that follow them take their place.
    """
    names, temperature = columns(scoring), scoring.temperature
    head = dict(zip(names, stats[..., : len(names)].unbind(-1), strict=True))  # [shards, R] each
    values, ids = stats[..., len(names) :].transpose(0, 1).chunk(2, -1)  # [R, shards, K] each
    if scoring.truncated:
        values, ids, kept = _truncate(values, ids, head.get("mass"), scoring)
        for name, column in kept.items():  # what is kept counts as one more shard
            head[name] = torch.cat([head[name], column.t()])
    values, ids = values.flatten(1), ids.flatten(1).long()
    high = head["high"].amax(0)
    shift = _scaled(head["high"], high, temperature)
    share = shift.exp()
    total = _over_shards(share * head["total"])
    x = _scaled(values, high[:, None], temperature)
    chosen = first_argmax(x + gumbel_noise(scoring.seed, positions, round_, ids) if temperature else values)
    prob = x.gather(-1, chosen)[:, 0].exp() / total
    if scoring.confidence == "max_prob":
        conf = prob
    elif scoring.confidence == "margin":
        other = torch.maximum(head["other"].amax(0), values.scatter(-1, chosen, -math.inf).amax(-1))
        conf = prob - _scaled(other, high, temperature).exp() / total
    else:
        dot = _over_shards(share * (head["dot"] + head["total"] * shift))
        conf = dot / total - total.log()
    return ids.gather(-1, chosen)[:, 0], prob, conf


# ---- one shard -----------------------------------------------------------------------------------------------------


def _offer_one(
    x: Tensor, high: Tensor, scoring: Scoring, positions: Tensor, round_: int, first: int
) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """(head, logit [R, 1], id [R, 1]) with the best token, or at a temperature the drawn one."""
    banned = _ban(x, scoring, positions, first)
    if scoring.temperature:
        noise = gumbel_noise(scoring.seed, positions, round_, torch.arange(first, first + x.shape[-1], device=x.device))
        chosen = first_argmax(noise.add_(_scaled(x, high, scoring.temperature)))
    else:
        chosen = first_argmax(x)
    values = x.gather(-1, chosen)
    x.scatter_(-1, chosen, -math.inf)
    for where, logits in banned:
        x[where] = logits
    head = {"other": x.amax(-1, keepdim=True)} if scoring.confidence == "margin" else {}
    x.scatter_reduce_(-1, chosen, values, "amax")  # leaves a banned id its logit where none but such could be chosen
    return head | _sums(x, high, scoring), values, chosen + first


def _offer_best(
    x: Tensor, high: Tensor, scoring: Scoring, positions: Tensor, first: int, limit: int | None
) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """(head, logits [R, K], ids [R, K]) with the best tokens, ties by lowest id; -inf where there are fewer than K."""
    allowed = x.clone()
    _ban(allowed, scoring, positions, first)
    x.masked_fill_(allowed != -math.inf, -math.inf)
    head = {"other": x.amax(-1, keepdim=True)} if scoring.confidence == "margin" else {}
    head |= _sums(x, high, scoring)
    if "mass" in columns(scoring):
        head["mass"] = _scaled(allowed, _best(allowed), scoring.temperature).exp_().sum(-1, keepdim=True)
    size = x.shape[-1]
    count = size if limit is None else limit
    if scoring.top_k is not None:
        count = min(count, scoring.top_k)
    ids = torch.arange(size, device=x.device).expand_as(x)
    if count < size:
        allowed, ids = (part[:, :count] for part in allowed.sort(dim=-1, descending=True, stable=True))
    missing = (0, max(count - size, 0))
    return head, pad(allowed, missing, value=-math.inf), pad(ids + first, missing)


def _scaled(x: Tensor, reference: Tensor, temperature: float, out: Tensor | None = None) -> Tensor:
    scaled = torch.sub(x, reference, out=out)
    if temperature:
        scaled.div_(temperature)
    return scaled


def _best(x: Tensor) -> Tensor:
    """The largest of each row [..., 1], finite where the row is nothing but -inf."""
    return x.amax(-1, keepdim=True).clamp_(min=torch.finfo(x.dtype).min)


def _sums(x: Tensor, high: Tensor, scoring: Scoring) -> dict[str, Tensor]:
    """ "total" and, if the confidence wants it, "dot" [R, 1] of logits x [R, n], which are overwritten."""
    _scaled(x, high, scoring.temperature, out=x)
    if scoring.confidence != "neg_entropy":
        return {"total": x.exp_().sum(-1, keepdim=True)}
    weights = x.exp()
    if scoring.truncated:  # 0 * -inf counts nothing
        x.clamp_(min=torch.finfo(x.dtype).min)
    return {"total": weights.sum(-1, keepdim=True), "dot": x.mul_(weights).sum(-1, keepdim=True)}


def first_argmax(x: Tensor) -> Tensor:
    """The lowest index [R, 1] of each row's largest value of x [R, n].

    By way of the maxima of blocks: torch's own argmax is not vectorised on a CPU and takes six times as long.
    """
    width, size = 256, x.shape[-1]
    if size <= width:
        return x.argmax(-1, keepdim=True)
    whole = size - size % width
    maxima: Tensor = x[:, :whole].unflatten(-1, (-1, width)).amax(-1)
    if whole < size:
        maxima = torch.cat([maxima, x[:, whole:].amax(-1, keepdim=True)], -1)
    first = maxima.argmax(-1, keepdim=True) * width
    inside = (first + torch.arange(width, device=x.device)).clamp_(max=size - 1)
    return first + x.gather(-1, inside).argmax(-1, keepdim=True)


def _ban(x: Tensor, scoring: Scoring, positions: Tensor, first: int) -> list[tuple[Where, Tensor]]:
    """Sets what may not be chosen to -inf; what was where, to be put back."""
    size, everywhere = x.shape[-1], slice(None)
    never: list[Where] = []
    if 0 <= scoring.mask - first < size:
        never.append((everywhere, slice(scoring.mask - first, scoring.mask - first + 1)))
    if scoring.num_token_ids < first + size:
        never.append((everywhere, slice(max(scoring.num_token_ids - first, 0), None)))
    eos = [token - first for token in scoring.eos if 0 <= token - first < size]
    early = positions < scoring.min_position
    if eos and bool(early.any()):
        never.append((early.nonzero(), torch.tensor(eos, device=x.device)))
    banned = [(where, x[where].clone()) for where in never]
    for where in never:
        x[where] = -math.inf
    return banned


# ---- all shards ----------------------------------------------------------------------------------------------------


def _over_shards(x: Tensor) -> Tensor:
    """The sum [R] of x [shards, R], in rank order."""
    total, *others = x.unbind(0)
    for other in others:
        total = total + other
    return total


def _truncate(
    values: Tensor, ids: Tensor, mass: Tensor | None, scoring: Scoring
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """(logits, ids) [R, kept] of the offers [R, shards, K] that top_k and top_p keep, best first and ties by lowest id,
    -inf behind the last one; and their head. ``mass`` [shards, R] is what top_p is a share of, unless top_k limits it.
    """
    ranked, order = values.flatten(1).sort(dim=-1, descending=True, stable=True)
    best = ranked[:, :1]
    if scoring.top_k is not None:
        ranked[:, scoring.top_k :] = -math.inf
    if scoring.top_p is not None:
        weights = _scaled(ranked, best, scoring.temperature).exp_()
        if mass is None:
            whole = weights.sum(-1)
        else:
            whole = _over_shards(mass * _scaled(_best(values)[..., 0].t(), best[:, 0], scoring.temperature).exp_())
        ranked.masked_fill_(weights.cumsum(-1) - weights >= scoring.top_p * whole[:, None], -math.inf)
    kept = {"high": best, **_sums(ranked.clone(), best, scoring)}
    width = max(1, int((ranked != -math.inf).sum(-1).amax()))  # noise for these alone
    return ranked[:, :width], ids.flatten(1).gather(-1, order[:, :width]), kept


# ---- counter-based noise -------------------------------------------------------------------------------------------


def _mix(z: Tensor) -> Tensor:
    """The finaliser of splitmix64 on int64 (wrapping) with logical shifts."""
    z = (z ^ ((z >> 30) & (2**34 - 1))) * -4658895280553007687
    z = (z ^ ((z >> 27) & (2**37 - 1))) * -7723592293110705685
    return z ^ ((z >> 31) & (2**33 - 1))


def gumbel_noise(seed: int, positions: Tensor, round_: int, ids: Tensor) -> Tensor:
    """Standard Gumbel noise float32 [R, n] for the token ids [n] or [R, n], a function of (seed, position, round, token
    id) alone."""
    gamma = -7046029254386353131  # 2^64 / golden ratio, as a signed integer
    key = _mix(torch.tensor(seed, dtype=torch.int64, device=positions.device) + gamma)
    key = _mix(key + (positions + 1) * gamma)
    key = _mix(key + (round_ + 1) * gamma % 2**63)
    bits = _mix(key[:, None] + (ids + 1) * gamma)
    uniform = (((bits >> 41) & (2**23 - 1)).float() + 0.5) * 2.0**-23  # exact, in (0, 1): both logarithms are finite
    return uniform.log_().neg_().log_().neg_()
