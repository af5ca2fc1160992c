"""silu whose rows do not depend on how many rows or threads there are.

torch's own kernel takes one pass where its definition takes five. It computes whole vectors; the rest of a row, or of a
thread's share, it computes one by one, with another exponential that rounds differently. So the kernel is called only
if both end with a vector: rows are multiples of a vector, and shares are whole rows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

VECTOR = 64
"""Elements that every kernel of torch computes at once, or a multiple: two vectors of 512 bits of bfloat16."""
SHARE = 32768
"""Elements up to which torch uses one thread (``at::internal::GRAIN_SIZE``)."""


def silu(x: Tensor) -> Tensor:
    """x / (1 + exp(-x)) of [..., C], computed in float32 and rounded once."""
    size = x.shape[-1]
    if torch.compiler.is_compiling() or size % VECTOR or size > SHARE or x.stride(-1) != 1:
        return plain_silu(x)
    return _silu_of_rows(x.flatten(0, -2)).view(x.shape)


def _silu_of_rows(x: Tensor) -> Tensor:
    rows, size = x.shape
    threads = torch.get_num_threads()
    if threads == 1 or rows * size <= SHARE:
        return F.silu(x)
    # With so many rows torch gives each thread the same number of elements, which are whole rows.
    num_shared = rows - rows % threads if rows * size >= threads * (SHARE + size) else 0
    if num_shared == rows:
        return F.silu(x)
    few = x[num_shared:].split(SHARE // size)  # one thread computes each of these
    parts = [x[:num_shared], *few] if num_shared else few
    return torch.cat([F.silu(part) for part in parts])


def plain_silu(x: Tensor) -> Tensor:
    """``silu`` op by op. Each op rounds once, and exp does not depend on an element's place."""
    wide = x.float()
    return wide.div(wide.neg().exp_().add_(1)).to(x.dtype)
