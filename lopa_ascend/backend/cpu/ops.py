"""The fused ops on a CPU: the functions of ``definition.py``, computed fast.

No op depends on how many rows share its batch: a row has the same bits alone and among others, with any number of
threads. Kernels that round differently at the end of a tensor, or of a thread's share of it, are therefore avoided.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from lopa_ascend.backend.cpu import attention_op
from lopa_ascend.backend.cpu.activation import silu
from lopa_ascend.backend.cpu.attention import plan_attention, planned_attention
from lopa_ascend.backend.cpu.experts import by_expert, call_moe, combined, route
from lopa_ascend.backend.cpu.int8 import multiply_codes, multiply_int4, pack_int8, packs_exactly
from lopa_ascend.backend.cpu.processor import emulated_dtypes, packed_dtypes
from lopa_ascend.backend.cpu.products import Multiply, Products, divides_into_blocks, in_blocks, pack
from lopa_ascend.backend.interface import FP8, Entries, Experts, Int4Weight, ShardStatsKernel


def keep_freed_memory() -> None:
    """Makes glibc keep the memory that a step frees for the next step: a step's tensors are just above the size from
    which glibc returns memory to the system, and every step would take page faults to get it back."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mmap_threshold, trim_threshold = -3, -1
        mallopt(mmap_threshold, 32 << 20)  # the largest value that glibc accepts
        mallopt(trim_threshold, 2**31 - 1)


def quantize_float32_(x: Tensor, codes: torch.dtype = torch.int8) -> tuple[Tensor, Tensor]:
    """``quantize`` for x in float32, which is overwritten."""
    largest = 127.0 if codes == torch.int8 else 448.0
    scale = x.abs().amax(-1) / largest
    # With a scale too small for full precision, a quotient may lie beyond the largest.
    quotient = x.div_(scale.masked_fill(scale == 0, 1)[..., None]).clamp_(-largest, largest)
    return (quotient.round_() if codes == torch.int8 else quotient).to(codes), scale


class CpuOps:
    """``Ops`` on a CPU. ``packs_weights``: ``packed`` packs weights if that is faster, but compiled steps cannot read
    them. ``multiply_blocks``: a linear layer with weights in blocks, with independent rows; None: weights are not
    packed so."""

    row_stats = None
    rope_and_write = None

    def __init__(self, *, packs_weights: bool = False, multiply_blocks: Multiply | None = None) -> None:
        keep_freed_memory()
        self.gathered_bytes = 0
        self.max_queries: int | None = None
        self.score_rows: int | None = 16  # few enough to stay in the cache
        self.device = torch.device("cpu")
        self._packs_weights = packs_weights
        self._packed_dtypes = packed_dtypes()
        self._multiply_blocks = multiply_blocks
        self._products = Products(emulated_dtypes(), F.linear)
        self._packs_exactly = functools.cache(packs_exactly)
        self._number = attention_op.register(self)

    def stored(self, weight: Tensor) -> Tensor:
        return weight

    def packed(self, weight: Tensor) -> Tensor:
        if not self._packs_weights:
            return weight
        if weight.dtype == torch.int8:
            return pack_int8(weight) if self._packs_exactly(weight.shape) else weight
        if self._has_blocks(weight):
            return in_blocks(weight)
        return pack(weight) if weight.dtype in self._packed_dtypes else weight

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if weight.dim() == 2:
            return self._products(x, weight, bias)
        assert self._multiply_blocks is not None
        return self._multiply_blocks(x, weight, bias)

    def _has_blocks(self, weight: Tensor) -> bool:
        return self._packs_weights and self._multiply_blocks is not None and divides_into_blocks(weight)

    def settle(self, weights: Iterable[Tensor]) -> str:
        matrices = list(weights)
        found = self._products.settle(w for w in matrices if w.dtype.itemsize > 1 and w.dim() == 2)
        ways = {self._exact_way(weight) for weight in matrices if weight.dtype.itemsize == 1}
        if ways:
            kind = "fp8" if any(weight.dtype == FP8 for weight in matrices) else "integer"
            found += f"; {kind} weights are multiplied exactly, by {' and '.join(sorted(ways))} products"
        return found

    def _exact_way(self, weight: Tensor) -> str:
        if weight.dtype == FP8:
            return "float64"
        return "packed int8" if weight.is_mkldnn else "float32"

    def quantize(self, x: Tensor, codes: torch.dtype = torch.int8) -> tuple[Tensor, Tensor]:
        # a copy also where x is float32, since the next function overwrites its argument
        return quantize_float32_(x.to(torch.float32, copy=True), codes)

    def quant_linear(
        self,
        codes: Tensor,
        scale: Tensor,
        weight: Tensor,
        weight_scale: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
    ) -> Tensor:
        # Each operation rounds once, as in `rope`.
        out = multiply_codes(codes, weight).mul_(weight_scale).mul_(scale[:, None])
        return (out if bias is None else out.add_(bias.float())).to(dtype)

    def stored_int4(self, weight: Int4Weight) -> Int4Weight:
        return weight

    def int4_linear(
        self, codes: Tensor, scale: Tensor, weight: Int4Weight, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        out = multiply_int4(codes, weight).mul_(scale[:, None])
        return (out if bias is None else out.add_(bias.float())).to(dtype)

    def stored_experts(self, experts: Experts) -> Experts:
        gate_up, down = (in_blocks(w) if self._has_blocks(w) else w for w in (experts.gate_up, experts.down))
        return replace(experts, gate_up=gate_up, down=down)

    def moe(self, x: Tensor, experts: Experts, shared: Tensor | None = None) -> Tensor:
        if shared is not None:
            return self.moe(x, experts) + shared
        if torch.compiler.is_compiling():
            return call_moe(self._number, x, experts)
        ids, weights = route(self.linear(x.float(), experts.router), experts.bias, experts.sizes)
        pairs, counts = by_expert(ids, experts.sizes.num_experts)
        tokens = pairs // experts.sizes.per_token
        parts = x[tokens].split(counts)
        outputs = [self._expert(part, experts, number) for number, part in enumerate(parts) if len(part)]
        return combined(torch.cat(outputs), pairs, weights)

    def _expert(self, x: Tensor, experts: Experts, number: int) -> Tensor:
        gate_up, down = experts.gate_up[number], experts.down[number]
        if experts.gate_up_scale is not None:
            products = self.quant_linear(*self.quantize(x), gate_up, experts.gate_up_scale[number], None, x.dtype)
        else:
            products = self.linear(x, gate_up)
        if experts.down_scale is not None:
            return self.quant_linear(*self.swiglu_quant(products), down, experts.down_scale[number], None, x.dtype)
        return self.linear(self.swiglu(products), down)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = residual.add_(x)
        return self.rms_norm(total, weight, eps), total

    def rms_norm_quant(
        self, x: Tensor, weight: Tensor, eps: float, codes: torch.dtype = torch.int8
    ) -> tuple[Tensor, Tensor]:
        return quantize_float32_(self.rms_norm(x.float(), weight.float(), eps), codes)

    def add_rms_norm_quant(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, codes: torch.dtype = torch.int8
    ) -> tuple[Tensor, Tensor, Tensor]:
        total = residual.add_(x)
        return *self.rms_norm_quant(total, weight, eps, codes), total

    def rope_tables(self, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Both [positions, 1, D / 2]: one factor for each pair of a head's elements."""
        return cos.to(dtype)[:, None], sin.to(dtype)[:, None]

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        left, right = x[..., :half], x[..., half:]
        if torch.compiler.is_compiling():  # compiled code cannot write into parts of a tensor
            return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)
        out = torch.empty_like(x)
        # Each operation rounds once: a fused one rounds differently where a thread's share does not fill a vector.
        torch.mul(left, cos, out=out[..., :half]).sub_(right * sin)
        torch.mul(right, cos, out=out[..., half:]).add_(left * sin)
        return out

    def norm_rope(
        self, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        normed_q, normed_k = self.rms_norm(q, q_weight, eps), self.rms_norm(k, k_weight, eps)
        return self.rope(normed_q, cos, sin), self.rope(normed_k, cos, sin)

    def swiglu(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return silu(gate).mul_(up)

    def swiglu_quant(self, gate_up: Tensor, codes: torch.dtype = torch.int8) -> tuple[Tensor, Tensor]:
        return self.quantize(self.swiglu(gate_up), codes)

    def quant_swiglu(
        self, codes: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        return self.swiglu_quant(self.quant_linear(codes, scale, weight, weight_scale, None, dtype), codes.dtype)

    def kv_write(
        self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, source: Tensor | None = None
    ) -> None:
        for new, cache in ((k, k_cache), (v, v_cache)):
            written = new if source is None else new[source]
            cache.view(-1, *cache.shape[-2:]).index_copy_(0, slot_mapping.long(), written)

    @property
    def shard_stats(self) -> ShardStatsKernel | None:
        return None

    def put_rows(self, x: Tensor, rows: Tensor, values: Tensor) -> None:
        x.index_copy_(0, rows.long(), values)

    def host_memory(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.int32)

    def read_later(self, x: Tensor, while_waiting: Callable[[float], None]) -> Callable[[], Tensor]:
        copy = x.clone()
        return lambda: copy

    def attention(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, entries: Entries) -> Tensor:
        if torch.compiler.is_compiling():
            return attention_op.call_attention(self._number, q, k_cache, v_cache, entries)
        page_size, kv_heads, dim = k_cache.shape[1:]
        plan = plan_attention(entries, kv_heads, page_size)
        self.gathered_bytes += plan.num_gathered * 2 * kv_heads * dim * k_cache.itemsize
        return planned_attention(q, k_cache, v_cache, plan)
