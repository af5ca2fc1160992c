"""The fused ops on a CPU: the living definition of every op."""

from __future__ import annotations

import ctypes
import platform

import torch
import torch.nn.functional as F
from torch import Tensor

from lopa_ascend.backend.base import Entries

MIN_ROWS = 16  # below this MKL takes kernels that sum in another order, and a row would depend on how many there are
WIDENED_ROWS = 1024


def keep_freed_memory() -> None:
    """Lets glibc keep what a step frees for the next one, instead of giving it back to the system and taking page
    faults for it again: the tensors of a step are just above the size from which it does that."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mmap_threshold, trim_threshold = -3, -1
        mallopt(mmap_threshold, 32 << 20)  # the largest that it accepts
        mallopt(trim_threshold, 2**31 - 1)


def emulated_dtypes() -> frozenset[torch.dtype]:
    """Dtypes that this processor has no multiplication for; torch's own GEMM in them runs at a fifth of float32's."""
    bfloat16 = platform.machine() not in ("x86_64", "AMD64") or torch.cpu._is_avx512_bf16_supported()
    return frozenset({torch.float16} if bfloat16 else {torch.float16, torch.bfloat16})


def widened_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The linear layer in float32, rounded once at the end. The weight is widened in pieces that stay in the cache."""
    wide, out = x.float(), x.new_empty(x.shape[0], weight.shape[0])
    for begin in range(0, weight.shape[0], WIDENED_ROWS):
        rows = slice(begin, begin + WIDENED_ROWS)
        out[:, rows] = F.linear(wide, weight[rows].float(), None if bias is None else bias[rows].float())
    return out


class CpuOps:
    def __init__(self) -> None:
        keep_freed_memory()
        self._emulated = emulated_dtypes()

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        rows = x.shape[0]
        if rows < MIN_ROWS:
            x = F.pad(x, (0, 0, 0, MIN_ROWS - rows))
        if weight.dtype in self._emulated:
            return widened_linear(x, weight, bias)[:rows]
        return F.linear(x, weight, bias)[:rows]

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = residual.add_(x)
        return self.rms_norm(total, weight, eps), total

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        left, right = x[..., :half], x[..., half:]
        out = torch.empty_like(x)
        torch.mul(left, cos, out=out[..., :half]).addcmul_(right, sin, value=-1)
        torch.mul(right, cos, out=out[..., half:]).addcmul_(left, sin)
        return out

    def swiglu(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def kv_write(
        self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, source: Tensor | None = None
    ) -> None:
        for new, cache in ((k, k_cache), (v, v_cache)):
            cache.view(-1, *cache.shape[-2:]).index_copy_(0, slots, new if source is None else new[source])

    def kv_copy(self, caches: Tensor, source: Tensor, target: Tensor) -> None:
        flat = caches.flatten(-4, -3)
        flat.index_copy_(-3, target, flat.index_select(-3, source))

    def attention(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, entries: Entries) -> Tensor:
        tokens, heads, dim = q.shape
        kv_heads = k_cache.shape[-2]
        out = torch.empty_like(q)
        token = first = 0
        while first < len(entries.lengths):
            shape = entries.lengths[first], entries.kv_lengths[first]
            last = first
            while last < len(entries.lengths) and (entries.lengths[last], entries.kv_lengths[last]) == shape:
                last += 1
            n, (length, kv_length) = last - first, shape
            span = slice(token, token + n * length)
            pages = entries.page_tables[first:last, : -(-kv_length // k_cache.shape[1])]
            # Without a mask, the query heads that share a KV head are one long query.
            query = q[span].view(n, length, kv_heads, -1, dim).permute(0, 2, 3, 1, 4).flatten(2, 3)
            key, value = (c[pages].flatten(1, 2)[:, :kv_length].transpose(1, 2) for c in (k_cache, v_cache))
            result = F.scaled_dot_product_attention(query, key, value)
            grouped = result.view(n, kv_heads, heads // kv_heads, length, dim).permute(0, 3, 1, 2, 4)
            out[span].view(n, length, kv_heads, heads // kv_heads, dim).copy_(grouped)
            token, first = span.stop, last
        return out.view(tokens, heads * dim)
