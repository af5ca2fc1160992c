"""The fused ops on a CPU, some of them by the kernels in C++."""

from __future__ import annotations

import math
from ctypes import Array, c_int64
from functools import lru_cache
from itertools import accumulate
from operator import mul
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from lopa_ascend.backend.cpu.int8 import multiply_codes
from lopa_ascend.backend.cpu.native.integers import IntegerOps
from lopa_ascend.backend.cpu.native.kernels import Kernels, numbers
from lopa_ascend.backend.cpu.processor import Bfloat16Instructions
from lopa_ascend.backend.cpu.products import BLOCK, Multiply
from lopa_ascend.backend.interface import Entries, ShardStatsKernel

LANES = 16
"""Elements of a vector; the kernels compute whole vectors."""
MAX_DIM = 256
"""The largest head dimension of the attention kernel (``attention.cpp``)."""
PAGE = 128
"""Positions of a page in the attention kernel."""
LONGEST_ROW = 65536
"""Of ``lopa_swiglu_quant`` (``rows.cpp``)."""
FEW_QUERIES = 16
"""Queries of heads with one key/value head, up to which the attention kernel is faster than torch with AMX."""
DTYPES = (torch.bfloat16, torch.float32)


def is_traced(x: Tensor) -> bool:
    """Whether x has no data for the kernels: torch.compile or a graph's fusion traces, and torch's ops are recorded."""
    return torch.compiler.is_compiling() or isinstance(x, FakeTensor)


def is_whole(x: Tensor, size: int) -> bool:
    """Whether the kernels compute rows of ``size`` elements of x: bfloat16 or float32, whole vectors without gaps."""
    has_whole_vectors = size % LANES == 0 and 0 < size <= LONGEST_ROW
    return x.dtype in DTYPES and has_whole_vectors and x.is_contiguous() and not is_traced(x)


def is_narrow(x: Tensor, size: int) -> bool:
    """Whether the kernels quantise rows of ``size`` elements of x."""
    return x.dtype == torch.bfloat16 and is_whole(x, size)


def is_wide(x: Tensor) -> int:
    """The kernels' number for a dtype."""
    return int(x.dtype == torch.float32)


class SomeEntries(NamedTuple):
    """Some of a step's entries, and the indices of their tokens, int64 [n]."""

    entries: Entries
    tokens: Tensor


@lru_cache(maxsize=1)
def divide_entries(entries: Entries, few: int) -> tuple[SomeEntries | None, SomeEntries | None]:
    """The entries of up to ``few`` queries, and the others; None: there are none. Causal entries count as long: a
    token's result must not depend on which others are computed in the same pass."""
    causal = entries.causal or (False,) * len(entries.lengths)
    starts = list(accumulate(entries.lengths, initial=0))
    divided: list[SomeEntries | None] = []
    for is_long in (False, True):
        chosen = [i for i, size in enumerate(entries.lengths) if (size > few or causal[i]) == is_long]
        own = Entries(
            lengths=tuple(entries.lengths[i] for i in chosen),
            kv_lengths=tuple(entries.kv_lengths[i] for i in chosen),
            page_tables=entries.page_tables[chosen],
            prefix_groups=tuple(entries.prefix_groups[i] for i in chosen),
            prefixes=entries.prefixes,
            causal=tuple(causal[i] for i in chosen) if is_long else (),
        )
        tokens = torch.tensor([token for i in chosen for token in range(starts[i], starts[i + 1])])
        divided.append(SomeEntries(own, tokens) if chosen else None)
    return divided[0], divided[1]


@lru_cache(maxsize=2)
def entry_arguments(entries: Entries) -> tuple[Array[c_int64], Array[c_int64], Array[c_int64] | None, Tensor, int]:
    """Lengths, KV lengths, causal entries and page tables for the kernel, and the pairs of queries and keys."""
    causal = numbers(*entries.causal) if entries.causal else None
    pairs = sum(map(mul, entries.lengths, entries.kv_lengths))
    return numbers(*entries.lengths), numbers(*entries.kv_lengths), causal, entries.page_tables.contiguous(), pairs


def multiply_blocks(
    kernels: Kernels, instructions: Bfloat16Instructions, x: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """``linear(x, weight, bias)`` in bfloat16 with a weight from ``in_blocks``, by instructions that this processor
    has."""
    rows, inputs, outputs = x.shape[0], weight.shape[1] * BLOCK, weight.shape[0] * BLOCK
    assert x.shape[1] == inputs
    assert x.dtype == torch.bfloat16
    out = x.new_empty(rows, outputs)
    offset = None if bias is None else bias.to(x.dtype).contiguous()
    arguments = x.contiguous(), weight, offset, rows, inputs, outputs, out, instructions
    kernels.call("lopa_bf16_linear", *arguments, work=rows * inputs * outputs // LANES)
    return out


class NativeOps(IntegerOps):
    """``IntegerOps`` whose other ops in bfloat16 and float32 the kernels compute too. ``has_attention``: attention in
    bfloat16 by the kernels, also of many queries."""

    def __init__(
        self,
        kernels: Kernels,
        *,
        packs_weights: bool = False,
        multiply_blocks: Multiply | None = None,
        instructions: str | None = None,
        has_attention: bool = True,
    ):
        super().__init__(
            kernels, packs_weights=packs_weights, multiply_blocks=multiply_blocks, instructions=instructions
        )
        self._has_attention = has_attention

    def attention(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, entries: Entries) -> Tensor:
        heads, dim = q.shape[1:]
        has_whole_rows = q.stride()[1:] == (dim, 1) and is_whole(q[:1], dim)
        if not has_whole_rows or dim > MAX_DIM:
            return super().attention(q, k_cache, v_cache, entries)
        if self._has_attention or q.dtype == torch.float32:
            return self._attend(q, k_cache, v_cache, entries)
        few, many = divide_entries(entries, FEW_QUERIES * k_cache.shape[2] // heads)
        if few is None or many is None:
            attend = super().attention if few is None else self._attend
            return attend(q, k_cache, v_cache, entries)
        out = q.new_empty(len(q), heads * dim)
        out[few.tokens] = self._attend(q[few.tokens], k_cache, v_cache, few.entries)
        out[many.tokens] = super().attention(q[many.tokens], k_cache, v_cache, many.entries)
        return out

    def _attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, entries: Entries) -> Tensor:
        tokens, heads, dim = q.shape
        assert k_cache.shape[1] == PAGE
        out, (lengths, kv_lengths, causal, tables, pairs) = q.new_empty(tokens, heads * dim), entry_arguments(entries)
        self._kernels.call(
            "lopa_attention",
            *(q, q.stride(0), k_cache, v_cache, out),
            *(lengths, kv_lengths, causal, len(lengths), tables, tables.shape[1]),
            *(numbers(*k_cache.stride()[:3], *v_cache.stride()[:3]), heads, k_cache.shape[2], dim),
            *(1 / math.sqrt(dim), is_wide(q)),
            work=pairs * heads * dim // LANES,
        )
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._norm(x, None, weight, eps) if is_whole(x, x.shape[-1]) else super().rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        if not (is_whole(x, x.shape[-1]) and residual.is_contiguous()):
            return super().add_rms_norm(x, residual, weight, eps)
        return self._norm(x, residual, weight, eps), residual

    def rms_norm_quant(
        self, x: Tensor, weight: Tensor, eps: float, codes: torch.dtype = torch.int8
    ) -> tuple[Tensor, Tensor]:
        if codes != torch.int8 or not is_narrow(x, x.shape[-1]):
            return super().rms_norm_quant(x, weight, eps, codes)
        return self._norm_quant(x, None, weight, eps)

    def add_rms_norm_quant(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, codes: torch.dtype = torch.int8
    ) -> tuple[Tensor, Tensor, Tensor]:
        if codes != torch.int8 or not (is_narrow(x, x.shape[-1]) and residual.is_contiguous()):
            return super().add_rms_norm_quant(x, residual, weight, eps, codes)
        return *self._norm_quant(x, residual, weight, eps), residual

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rows, heads, dim = x.shape
        if not (_has_whole_heads(x, cos) and sin.is_contiguous()):
            return super().rope(x, cos, sin)
        out = x.new_empty(x.shape)
        arguments = x, x.stride(0), cos, sin, cos.shape[1], rows, heads, dim // 2, out, is_wide(x)
        self._kernels.call("lopa_rope", *arguments, work=x.numel())
        return out

    def norm_rope(
        self, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        dim = q.shape[-1]
        if not (_has_whole_heads(q, cos) and _has_whole_heads(k, cos) and sin.is_contiguous()):
            return super().norm_rope(q, k, q_weight, k_weight, eps, cos, sin)
        rotated = q.new_empty(q.shape), k.new_empty(k.shape)
        for x, weight, out in zip((q, k), (q_weight, k_weight), rotated, strict=True):
            arguments = x, x.stride(0), weight, cos, sin, *x.shape[:2], dim // 2, eps, out, is_wide(x)
            self._kernels.call("lopa_norm_rope", *arguments, work=x.numel())
        return rotated

    def swiglu(self, gate_up: Tensor) -> Tensor:
        size = gate_up.shape[-1] // 2
        if not is_whole(gate_up, size):
            return super().swiglu(gate_up)
        out = gate_up.new_empty(*gate_up.shape[:-1], size)
        self._kernels.call("lopa_swiglu", gate_up, out.numel() // size, size, out, is_wide(out), work=out.numel())
        return out

    def swiglu_quant(self, gate_up: Tensor, codes: torch.dtype = torch.int8) -> tuple[Tensor, Tensor]:
        size = gate_up.shape[-1] // 2
        if codes != torch.int8 or not is_narrow(gate_up, size):
            return super().swiglu_quant(gate_up, codes)
        out, scale = _empty_codes(gate_up, size)
        self._kernels.call("lopa_swiglu_quant", gate_up, scale.numel(), size, out, scale, work=out.numel())
        return out, scale

    def quant_linear(
        self,
        codes: Tensor,
        scale: Tensor,
        weight: Tensor,
        weight_scale: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
    ) -> Tensor:
        size = len(weight_scale)
        is_packed = weight.dim() == 3
        if dtype != torch.bfloat16 or size % LANES or is_traced(codes) or is_packed:
            return super().quant_linear(codes, scale, weight, weight_scale, bias, dtype)
        product = multiply_codes(codes, weight)
        out = product.new_empty(product.shape, dtype=dtype)
        rows, factors = len(out), weight_scale.contiguous()
        offset = None if bias is None else bias.to(dtype).contiguous()
        arguments = product, scale.contiguous(), factors, offset, rows, size, out
        self._kernels.call("lopa_dequantize", *arguments, work=out.numel())
        return out

    @property
    def shard_stats(self) -> ShardStatsKernel:
        return self._shard_stats

    def _shard_stats(self, logits: Tensor, mask: int, limit: int, has_dot: bool) -> Tensor:
        if logits.dtype not in DTYPES or logits.stride(1) != 1:
            logits = logits.float().contiguous()
        rows, size = logits.shape
        out = torch.empty(rows, 4 + has_dot)
        arguments = logits, logits.stride(0), rows, size, mask, limit, int(has_dot), out, is_wide(logits)
        self._kernels.call("lopa_row_stats", *arguments, work=logits.numel())
        return out

    def _norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """RMSNorm of x [..., hidden], or of x + residual, which receives the sum."""
        out, size = torch.empty_like(x), x.shape[-1]
        arguments = x, residual, weight, x.numel() // size, size, eps, out, is_wide(x)
        self._kernels.call("lopa_norm", *arguments, work=x.numel())
        return out

    def _norm_quant(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """``_norm`` as int8 [..., hidden], and a scale for each row, float32 [...]."""
        size = x.shape[-1]
        codes, scale = _empty_codes(x, size)
        arguments = x, residual, weight, scale.numel(), size, eps, codes, scale
        self._kernels.call("lopa_norm_quant", *arguments, work=x.numel())
        return codes, scale


def _has_whole_heads(x: Tensor, cos: Tensor) -> bool:
    """Whether the kernels rotate the heads of x [T, heads, D] by angles with these cosines."""
    has_whole_rows = x.dtype == cos.dtype and x.stride()[1:] == (x.shape[-1], 1)
    return has_whole_rows and cos.is_contiguous() and is_whole(x[:1], x.shape[-1])


def _empty_codes(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Memory for int8 [..., size] and a scale for each row [...] of x [..., any size]."""
    rows = x.shape[:-1]
    return x.new_empty(*rows, size, dtype=torch.int8), x.new_empty(rows, dtype=torch.float32)
