"""Noise for sampling: a hash of (seed, position, round, token id), so that a draw does not depend on the batch."""

from __future__ import annotations

import torch
from torch import Tensor

_GAMMA = -7046029254386353131
"""2^64 divided by the golden ratio, as a signed integer."""


def gumbel_noise(seed: int, positions: Tensor, round_: int, ids: Tensor) -> Tensor:
    """Standard Gumbel noise float32 [R, n]. ``positions``: int64 [R]; ``round_``: number of the forward pass; ``ids``:
    int64 [n] or [R, n]."""
    key = _mix(torch.tensor(seed, dtype=torch.int64, device=positions.device) + _GAMMA)
    key = _mix(key + (positions + 1) * _GAMMA)
    key = _mix(key + (round_ + 1) * _GAMMA % 2**63)
    bits = _mix(key[:, None] + (ids + 1) * _GAMMA)
    # 23 random bits and a half: exact in float32 and strictly between 0 and 1, so both logarithms are finite.
    uniform = (((bits >> 41) & (2**23 - 1)).float() + 0.5) * 2.0**-23
    return uniform.log_().neg_().log_().neg_()


def _mix(z: Tensor) -> Tensor:
    """The finaliser of splitmix64 on int64: wrapping products, logical shifts."""
    z = (z ^ ((z >> 30) & (2**34 - 1))) * -4658895280553007687
    z = (z ^ ((z >> 27) & (2**37 - 1))) * -7723592293110705685
    return z ^ ((z >> 31) & (2**33 - 1))
