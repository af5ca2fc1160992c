"""The ops as models are usually written, for comparison with the fused ops."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lopa_ascend.backend.interface import Entries
from lopa_ascend.backend.npu.ops import NpuOps


class PlainOps(NpuOps):
    """``Ops`` in plain torch, for steps whose entries all have one length and one KV length."""

    def stored(self, weight: Tensor) -> Tensor:
        return weight

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, weight, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = x + residual
        return self.rms_norm(total, weight, eps), total

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        left, right = x.chunk(2, -1)
        rotated = torch.cat((-right, left), -1)
        return x * cos + rotated * sin

    def swiglu(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate) * up

    def kv_write(
        self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, source: Tensor | None = None
    ) -> None:
        for new, cache in ((k, k_cache), (v, v_cache)):
            flat = cache.view(-1, cache.shape[2] * cache.shape[3])
            written = new if source is None else new[source]
            # Of torch's ways to write rows, only scatter has a converter to GE.
            flat.scatter_(0, slot_mapping[:, None].expand(-1, flat.shape[1]), written.flatten(1))

    def attention(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, entries: Entries) -> Tensor:
        num_entries, (heads, dim), kv_heads = len(entries.lengths), q.shape[1:], k_cache.shape[2]
        group = heads // kv_heads
        seen = []
        for cache in (k_cache, v_cache):
            positions = cache[entries.page_tables.long()].view(num_entries, -1, kv_heads, dim)
            seen.append(positions[:, : entries.kv_lengths[0]].transpose(1, 2))
        key, value = seen  # [entries, K, keys, D]
        # The query heads that share a KV head are handled as further queries.
        q = q.view(num_entries, -1, kv_heads, group, dim).permute(0, 2, 3, 1, 4).flatten(2, 3)
        weights = torch.softmax((q @ key.transpose(-1, -2)).float() * dim**-0.5, -1).to(q.dtype)
        out = (weights @ value).view(num_entries, kv_heads, group, -1, dim).permute(0, 3, 1, 2, 4)
        return out.reshape(-1, heads * dim)
