"""Mixtures of experts on a CPU: the experts of each token, the pairs of tokens and experts sorted by expert, and the
weighted sum of the experts' outputs. Every step has a fixed order within a row, so no row depends on the others."""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor

from lopa_ascend.backend.cpu.attention_op import registered
from lopa_ascend.backend.interface import Experts
from lopa_ascend.config import ExpertsConfig


def route(logits: Tensor, bias: Tensor, sizes: ExpertsConfig) -> tuple[Tensor, Tensor]:
    """The experts of each token int64 [T, per_token], and their weights float32 of the same shape, from the router's
    ``logits``, float32 [T, E], and ``bias``, float32 [E]."""
    scores = logits.neg().exp_().add_(1).reciprocal_()
    ranking = scores + bias
    if sizes.kept_groups < sizes.num_groups:
        groups = ranking.unflatten(1, (sizes.num_groups, -1))
        best = groups.topk(2).values
        dropped = _ranked(best[..., 0] + best[..., 1])[:, sizes.kept_groups :]
        is_dropped = torch.zeros(groups.shape[:2], dtype=torch.bool).scatter_(1, dropped, value=True)
        ranking = groups.masked_fill(is_dropped[..., None], -torch.inf).flatten(1)
    ids = _ranked(ranking)[:, : sizes.per_token]
    weights = scores.gather(1, ids)
    if sizes.per_token > 1:
        weights = weights / (reduce(torch.add, weights.unbind(1)) + 1e-20)[:, None]
    return ids, weights * sizes.scale


def _ranked(scores: Tensor) -> Tensor:
    """The indices of each row, the highest score first, the lower index among equals."""
    return scores.sort(dim=1, descending=True, stable=True).indices


def by_expert(ids: Tensor, num_experts: int) -> tuple[Tensor, list[int]]:
    """The pairs of tokens and experts, as indices into ``ids.flatten()``, sorted by expert; and how many each has."""
    flat = ids.flatten()
    return flat.sort(stable=True).indices, flat.bincount(minlength=num_experts).tolist()


def combined(outputs: Tensor, pairs: Tensor, weights: Tensor) -> Tensor:
    """The weighted sums [T, hidden] of the experts' outputs, in float32, rounded once. ``outputs``
    [T * per_token, hidden] are sorted by expert; ``pairs`` are from ``by_expert``; ``weights`` are [T, per_token]."""
    places = pairs.argsort().view(weights.shape)
    total = torch.zeros(len(weights), outputs.shape[1])
    for place, weight in zip(places.unbind(1), weights.unbind(1), strict=True):
        total += outputs[place].float() * weight[:, None]
    return total.to(outputs.dtype)


# ---- in a compiled step ----------------------------------------------------------------------------------------------


def call_moe(ops_number: int, x: Tensor, experts: Experts) -> Tensor:
    """``moe`` as one op of the traced graph, which does not look into it: how many tokens an expert has differs from
    step to step."""
    e, s = experts, experts.sizes
    scales = (e.gate_up_scale, e.down_scale)
    sizes = [s.num_experts, s.per_token, s.num_groups, s.kept_groups, s.inner, s.shared_inner, s.first_layer]
    found: Tensor = moe(x, e.router, e.bias, e.gate_up, e.down, *scales, sizes, s.scale, ops_number)
    return found


@torch.library.custom_op("lopa_ascend::moe", mutates_args=())
def moe(  # noqa: PLR0913
    x: Tensor,
    router: Tensor,
    bias: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_scale: Tensor | None,
    down_scale: Tensor | None,
    sizes: list[int],
    scale: float,
    ops_number: int,
) -> Tensor:
    names = ("num_experts", "per_token", "num_groups", "kept_groups", "inner", "shared_inner", "first_layer")
    config = ExpertsConfig(**dict(zip(names, sizes, strict=True)), scale=scale)
    experts = Experts(config, router, bias, gate_up, down, gate_up_scale, down_scale)
    return registered(ops_number).moe(x, experts)


@moe.register_fake
def _(x: Tensor, *_args: object) -> Tensor:
    return torch.empty_like(x)
