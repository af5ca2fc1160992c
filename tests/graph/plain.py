"""Parts of models as they are usually written, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from examples.plain_dream.plain_dream import rotate as rope

__all__ = ["rms_norm", "rope"]


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Normed in float32, rounded, and scaled."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
