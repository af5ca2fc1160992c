"""Logits to (token, probability, confidence), without a softmax over the vocabulary (SPEC section 3).

Confidences are float32 whatever the model's dtype. The mask id and ids behind the tokenizer are never chosen, but keep
their share of the softmax's denominator, so that confidences stay comparable with the published code. Ties go to the
lowest token id. At a temperature the token is drawn by Gumbel-max with noise that is a function of (seed, position,
round, token id) alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Scoring:
    """How one request's logits become tokens. ``num_tokens``: ids from here on do not exist in the tokenizer.

    ``eos`` may not be chosen at positions before ``min_position``.
    """

    confidence: str
    mask: int
    num_tokens: int
    eos: tuple[int, ...] = ()
    min_position: int = 0
    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    seed: int = 0

    @property
    def truncated(self) -> bool:
        return self.top_p is not None or self.top_k is not None


def score(logits: Tensor, scoring: Scoring, positions: Tensor, round_: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(tokens int64, probabilities float32, confidences float32, finite bool), each [R], of logits [R, vocab] for the
    absolute ``positions`` [R] in forward pass ``round_``. ``logits`` is overwritten.

    "margin" is the chosen token's probability less the largest other one, "neg_entropy" the sum of p log p. Where a
    logit or the confidence is not finite, nothing may be made of the rest.
    """
    x = logits.float()
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    finite = low.isfinite() & high.isfinite()
    x.sub_(high)
    if scoring.temperature:
        x.div_(scoring.temperature)
        _truncate(x, scoring, positions)
    weights = x.exp()
    total = weights.sum(-1, keepdim=True)
    entropy = _neg_entropy(x, weights, total, scoring.truncated) if scoring.confidence == "neg_entropy" else None
    banned = _ban(x, scoring, positions)
    if scoring.temperature:
        noise = gumbel_noise(scoring.seed, positions, round_, x.shape[-1])
        chosen = first_argmax(x + noise)
    else:
        chosen = first_argmax(x)
    prob = x.gather(-1, chosen).exp_() / total
    if scoring.confidence == "max_prob":
        conf = prob
    elif scoring.confidence == "margin":
        other = x.scatter_(-1, chosen, -math.inf).amax(-1, keepdim=True)
        conf = prob - torch.maximum(other, banned).exp_() / total
    else:
        assert entropy is not None
        conf = entropy
    return chosen[:, 0], prob[:, 0], conf[:, 0], (finite & conf.isfinite())[:, 0]


def _neg_entropy(x: Tensor, weights: Tensor, total: Tensor, truncated: bool) -> Tensor:
    """sum p log p [R, 1] with p = weights / total and log p = x - log total."""
    product = weights * x
    if truncated:  # 0 * -inf where sampling cut an id off: it counts nothing
        product.nan_to_num_(0.0)
    dot = product.sum(-1, keepdim=True)
    return dot / total - total.log()


def first_argmax(x: Tensor) -> Tensor:
    """The lowest index [R, 1] of each row's largest value of x [R, n].

    By way of the maxima of short blocks: torch's own argmax is not vectorised on a CPU and takes six times as long.
    """
    width, size = 64, x.shape[-1]
    whole = size - size % width
    maxima = x[:, :whole].unflatten(-1, (-1, width)).amax(-1) if whole else x[:, :0]
    if whole < size:
        maxima = torch.cat([maxima, x[:, whole:].amax(-1, keepdim=True)], -1)
    first = maxima.argmax(-1, keepdim=True) * width
    inside = (first + torch.arange(width, device=x.device)).clamp_(max=size - 1)
    return first + x.gather(-1, inside).argmax(-1, keepdim=True)


def _never(x: Tensor, scoring: Scoring, positions: Tensor) -> list[tuple[Tensor | slice, Tensor | slice | int]]:
    """Index pairs into x [R, vocab] of what may not be chosen."""
    everywhere = slice(None)
    out: list[tuple[Tensor | slice, Tensor | slice | int]] = [(everywhere, scoring.mask)]
    if scoring.num_tokens < x.shape[-1]:
        out.append((everywhere, slice(scoring.num_tokens, None)))
    early = positions < scoring.min_position
    if scoring.eos and bool(early.any()):
        rows = early.nonzero()
        out.append((rows, torch.tensor(scoring.eos, device=x.device)))
    return out


def _ban(x: Tensor, scoring: Scoring, positions: Tensor) -> Tensor:
    """Sets what may not be chosen to -inf and returns the largest value [R, 1] that was there."""
    largest = torch.full_like(x[:, :1], -math.inf)
    for rows, columns in _never(x, scoring, positions):
        here = x[rows, columns]
        values = here.reshape(here.shape[0], -1).amax(-1, keepdim=True)
        if isinstance(rows, Tensor):
            largest[rows[:, 0]] = torch.maximum(largest[rows[:, 0]], values)
        else:
            largest = torch.maximum(largest, values)
        x[rows, columns] = -math.inf
    return largest


def _truncate(x: Tensor, scoring: Scoring, positions: Tensor) -> None:
    """Sets to -inf what top_k and top_p cut off. Only ids that may be chosen are ranked, ties by lowest id."""
    if not scoring.truncated:
        return
    allowed = x.clone()
    _ban(allowed, scoring, positions)
    ranked, order = allowed.sort(dim=-1, descending=True, stable=True)
    cut = torch.zeros_like(ranked, dtype=torch.bool)
    if scoring.top_k is not None:
        cut[:, scoring.top_k :] = True
    if scoring.top_p is not None:
        kept = ranked.masked_fill(cut, -math.inf).softmax(-1)
        cut |= kept.cumsum(-1) - kept >= scoring.top_p
    cut &= ranked != -math.inf  # what may not be chosen keeps its share of the denominator
    x.masked_fill_(torch.zeros_like(cut).scatter_(-1, order, cut), -math.inf)


# ---- counter-based noise -------------------------------------------------------------------------------------------


def _mix(z: Tensor) -> Tensor:
    """The finaliser of splitmix64 on int64 (wrapping) with logical shifts."""
    z = (z ^ ((z >> 30) & (2**34 - 1))) * -4658895280553007687
    z = (z ^ ((z >> 27) & (2**37 - 1))) * -7723592293110705685
    return z ^ ((z >> 31) & (2**33 - 1))


def gumbel_noise(seed: int, positions: Tensor, round_: int, vocab: int) -> Tensor:
    """Standard Gumbel noise float32 [R, vocab], a function of (seed, position, round, token id) alone."""
    gamma = -7046029254386353131  # 2^64 / golden ratio, as a signed integer
    key = _mix(torch.tensor(seed, dtype=torch.int64, device=positions.device) + gamma)
    key = _mix(key + (positions + 1) * gamma)
    key = _mix(key + (round_ + 1) * gamma % 2**63)
    bits = _mix(key[:, None] + (torch.arange(vocab, device=positions.device) + 1) * gamma)
    uniform = (((bits >> 41) & (2**23 - 1)).float() + 0.5) * 2.0**-23  # exact, in (0, 1): both logarithms are finite
    return uniform.log_().neg_().log_().neg_()
