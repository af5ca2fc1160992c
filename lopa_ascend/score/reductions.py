"""Reductions over rows of logits that ``shards.py`` and ``merge.py`` share."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lopa_ascend.types import Scoring

_BLOCK = 256
"""Columns of a block of ``first_argmax``."""

_LEAST = -87.0
"""Its exponential changes no sum that has a 1 in it. Lower ones give subnormal numbers, ten times as slow on a CPU."""


def first_argmax(x: Tensor) -> Tensor:
    """The lowest index [R, 1] of each row's largest value of x [R, n]. The maxima of blocks are searched first: torch's
    own argmax is not vectorised on a CPU and takes six times as long."""
    size = x.shape[-1]
    if size <= _BLOCK:
        return x.argmax(-1, keepdim=True)
    whole = size - size % _BLOCK
    maxima: Tensor = x[:, :whole].unflatten(-1, (-1, _BLOCK)).amax(-1)
    if whole < size:
        maxima = torch.cat([maxima, x[:, whole:].amax(-1, keepdim=True)], -1)
    first = maxima.argmax(-1, keepdim=True) * _BLOCK
    inside = (first + torch.arange(_BLOCK, device=x.device)).clamp_(max=size - 1)
    return first + columns_of(x, inside).argmax(-1, keepdim=True)


def columns_of(x: Tensor, columns: Tensor) -> Tensor:
    """``gather`` of x [R, n] in columns int64 [R, k]. An NPU gathers from many long rows on its CPU (CANN ops-nn,
    ``gather_elements.cpp``), but runs ``index_select`` on its cores."""
    if x.is_cpu:
        return x.gather(-1, columns)
    starts = torch.arange(0, x.numel(), x.shape[1], device=x.device)[:, None]
    return x.reshape(-1).index_select(0, (starts + columns).view(-1)).view(columns.shape)


def finite_max(x: Tensor) -> Tensor:
    """[..., 1]: the largest value of each row; the lowest finite number if it holds only -inf."""
    return x.amax(-1, keepdim=True).clamp_(min=torch.finfo(x.dtype).min)


def scaled(x: Tensor, reference: Tensor, temperature: float, out: Tensor | None = None) -> Tensor:
    """(x - reference) / temperature, or x - reference at temperature 0."""
    difference = torch.sub(x, reference, out=out)
    if temperature:
        difference.div_(temperature)
    return difference


def softmax_sums(
    x: Tensor, high: Tensor, scoring: Scoring, emptied: Sequence[int] | NDArray[np.int64] = ()
) -> dict[str, Tensor]:
    """The columns "total" and, if the confidence needs it, "dot" [R, 1] of ``shards.columns``. Overwrites x [R, n].
    ``high``: the reference [R, 1]; ``emptied``: rows with many values far below the others."""
    scaled(x, high, scoring.temperature, out=x)
    if scoring.confidence != "neg_entropy":
        for row in emptied:
            x[row].clamp_(min=_LEAST)
        return {"total": x.exp_().sum(-1, keepdim=True)}
    weights = x.exp()
    if scoring.truncated:  # so that 0 * -inf counts as 0
        x.clamp_(min=torch.finfo(x.dtype).min)
    return {"total": weights.sum(-1, keepdim=True), "dot": x.mul_(weights).sum(-1, keepdim=True)}
