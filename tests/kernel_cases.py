"""Calls of a device's kernels, with what they must compute. pytest runs them on what stands in for the device, the
self-test on the device itself, at a model's sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

BLOCK = 32
"""Positions of a block."""
EPS = 1e-6


@dataclass(frozen=True)
class Sizes:
    """A model, and the work that its kernels get."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    dim: int
    vocabulary: int
    tokens: int
    """Of a step."""
    keys: int
    """Of a long prompt, whole pages."""
    sequences: int


DREAM_7B = Sizes(3584, 18944, 28, 4, 128, 152064, tokens=512, keys=4096, sequences=32)
RAGGED = Sizes(136, 72, 10, 2, 40, 1001, tokens=37, keys=128, sequences=3)
"""Sizes that fill no tile."""


@dataclass(frozen=True)
class Case:
    """A call of a kernel, or of some."""

    name: str
    run: Callable[[], Any]
    expected: Callable[[], Tensor | Sequence[Tensor]]
    """What ``read`` must give, from the definition of the op or in float64."""
    read: Callable[[Any], Tensor | Sequence[Tensor]] = lambda found: found
    """What is compared of that which ``run`` gives."""
    num_bytes: float = 0.0
    """That it must read and write."""
    operations: float = 0.0
    rate: str = "bf16"
    """What ``operations`` are counted in."""
    most: float | None = None
    """Largest error that is right; None for what the dtype allows."""
    timed: bool = True
    """Whether ``run`` may be called again and timed."""


def error_of(case: Case, found: Any) -> float:
    """The largest error as a share of the largest value; infinite where a value is not finite."""
    pairs = zip(listed(case.read(found)), listed(case.expected()), strict=True)
    return max(_share(result.to(expected.device).double(), expected.double()) for result, expected in pairs)


def _share(result: Tensor, expected: Tensor) -> float:
    error = (result - expected).abs().max() / expected.abs().max().clamp_min(1e-30)
    return float(error.nan_to_num(nan=torch.inf))


def listed(found: Tensor | Sequence[Tensor]) -> list[Tensor]:
    return [found] if isinstance(found, Tensor) else list(found)
