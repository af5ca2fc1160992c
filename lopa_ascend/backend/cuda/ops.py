"""The fused ops on an NVIDIA GPU: cuBLAS for float products, Triton kernels for the rest. KV lengths, page tables and
cache positions lie in device memory, where the kernels read them. So a captured step takes other KV lengths without
being changed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from lopa_ascend.backend.cuda import kernels
from lopa_ascend.backend.cuda.graphs import wait_for
from lopa_ascend.backend.interface import FP8, Entries, Experts, Int4Weight, RowStats

SWIGLU_COLUMNS = 1024
"""Of a program."""
QUANTIZED_COLUMNS = 2048
"""Columns that quantisation handles at a time."""
SCORED_COLUMNS = 4096
"""Columns of logits that are scored at a time."""
QUERY_ROWS = 128
"""Rows of a tile of attention. All entries have tiles of this size, so that the bits of a query do not depend on the
entries beside it."""
KEYS = 64
"""Keys of a tile of attention."""
EXPERT_ROWS = 64
"""Rows of a tile of experts, whatever the number of tokens: so the bits of a row do not depend on the others. In a
decoding step an expert has fewer, and its weights take longer to read than the tile to multiply."""
SUMMED_COLUMNS = 1024
"""Columns of a program that adds up experts."""
MOST_DIM = 128
"""Elements of a head, of 2 bytes, up to which a tile has so many rows and keys. For more, and in float32, it has half
of each: then it fits into the 99 KiB of an RTX, and into registers."""
PART_KEYS = 512
"""Keys that attention sums on their own before it merges them with those before, whoever merges."""
FEW_PROGRAMS = 128
"""Programs of attention too few for a GPU's multiprocessors, 108 to 148: then they share the parts."""
MOST_SHARED = 1024
"""Most programs and parts to share: a part takes 64 KiB in float32."""
MERGED_ROWS = 16
"""Rows of a program that merges parts."""
ROTATED_HEADS = 8
"""Heads of a program of rope."""
LEAST_DIM = 16
"""Smallest sides of a matrix product in Triton."""
ROW_COUNTS = (1, 8, 32, 64, 128, 256, 512)
"""Numbers of rows with which ``settle`` multiplies."""
MOST_ROWS = 1024
WARPS_OF_LONG_ROWS = 8


class _Plan(NamedTuple):
    """What attention reads of the entries of a step, on the device."""

    tables: Tensor
    """int32 [entries, pages]."""
    kv_lengths: Tensor
    """int32 [entries]."""
    starts: Tensor | None
    """See ``kernels.attend_tile``."""
    causal: Tensor | None
    """See ``kernels.attend_tile``."""
    all_causal: bool
    longest: int
    """Queries of the longest entry."""


class CudaOps:
    """``Ops`` on a GPU, or in Triton's interpreter on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.gathered_bytes = 0
        self.max_queries: int | None = None
        self.score_rows: int | None = None
        self._plan = lru_cache(maxsize=1)(self._make_plan)

    # ---- linear layers ---------------------------------------------------------------------------------------------

    def stored(self, weight: Tensor) -> Tensor:
        return weight.contiguous()

    def packed(self, weight: Tensor) -> Tensor:
        return weight

    def stored_int4(self, weight: Int4Weight) -> Int4Weight:
        raise NotImplementedError("int4 weights are refused before they are read")

    def int4_linear(
        self, codes: Tensor, scale: Tensor, weight: Int4Weight, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        raise NotImplementedError("int4 weights are refused before they are read")

    def stored_experts(self, experts: Experts) -> Experts:
        return replace(experts, gate_up=experts.gate_up.contiguous(), down=experts.down.contiguous())

    def moe(self, x: Tensor, experts: Experts, shared: Tensor | None = None) -> Tensor:
        e, count = experts, experts.sizes.per_token
        x = x.contiguous()
        ids, weights = _routed(F.linear(x.float(), e.router), e)
        chosen, order = ids.sort(stable=True)
        numbers = torch.arange(e.sizes.num_experts, dtype=torch.int32, device=x.device)
        pairs = order, torch.searchsorted(chosen, numbers, right=True, out_int32=True)
        wide = (x, None) if e.gate_up_scale is None else self.quantize(x)
        gate_up = _expert_products(wide, (e.gate_up, e.gate_up_scale), pairs, count, x.dtype)
        narrow = (self.swiglu(gate_up), None) if e.down_scale is None else self.swiglu_quant(gate_up)
        outputs = _expert_products(narrow, (e.down, e.down_scale), pairs, 1, x.dtype)
        shared = None if shared is None else shared.contiguous()
        out, (rows, size) = torch.empty_like(x), x.shape
        kernels.sum_experts[rows, triton.cdiv(size, SUMMED_COLUMNS)](
            outputs, weights, shared, out, size, COUNT=count, BLOCK=SUMMED_COLUMNS
        )
        return out

    def settle(self, weights: Iterable[Tensor]) -> str:
        """Tries whether the library rounds a row alike among different numbers of rows; it decides nothing."""
        kinds = {(weight.shape, weight.dtype): weight for weight in weights if weight.is_floating_point()}
        dependent = sorted(str(list(shape)) for (shape, _), weight in kinds.items() if not _rows_agree(weight))
        if dependent:
            return f"rows depend on one another in their last bits, with weights {', '.join(dependent)}"
        return "rows are independent"

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, weight, bias)

    def quantize(self, x: Tensor, codes: torch.dtype = torch.int8) -> tuple[Tensor, Tensor]:
        return self._quantize(x.contiguous(), codes, gates=False)

    def quant_linear(
        self,
        codes: Tensor,
        scale: Tensor,
        weight: Tensor,
        weight_scale: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
    ) -> Tensor:
        if codes.dtype == FP8:
            return _multiply_fp8(codes, scale, weight, weight_scale, bias, dtype)
        rows, inputs = codes.shape
        outputs = weight.shape[0]
        out = codes.new_empty(rows, outputs, dtype=dtype)
        tile = min(128, max(LEAST_DIM, triton.next_power_of_2(rows)))
        # Few outputs make few programs, each of which reads a whole row of the weight: narrower tiles make more.
        width = 32 if outputs <= 8192 and rows <= 256 else 128
        grid = triton.cdiv(rows, tile), triton.cdiv(outputs, width)
        blocks = {"BLOCK_ROWS": tile, "BLOCK_OUTPUTS": width, "BLOCK_INPUTS": 128}
        kernels.multiply_int8[grid](
            codes, scale, weight, weight_scale, bias, out, rows, outputs, inputs,
            **blocks, num_warps=8 if tile * width > 4096 else 4, num_stages=3,
        )  # fmt: skip
        return out

    # ---- norms and activations -------------------------------------------------------------------------------------

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._norm(x, None, weight, eps)[0]

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return self._norm(x, residual, weight, eps)[0], residual

    def rms_norm_quant(
        self, x: Tensor, weight: Tensor, eps: float, codes: torch.dtype = torch.int8
    ) -> tuple[Tensor, Tensor]:
        return self._norm(x, None, weight, eps, codes)

    def add_rms_norm_quant(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, codes: torch.dtype = torch.int8
    ) -> tuple[Tensor, Tensor, Tensor]:
        return *self._norm(x, residual, weight, eps, codes), residual

    def _norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, codes: torch.dtype | None = None
    ) -> tuple[Tensor, Tensor]:
        """(norm, nothing of meaning), or (codes, scales). The residual, which must be contiguous, becomes the sum."""
        x = x.contiguous()
        assert residual is None or residual.is_contiguous()
        size = x.shape[-1]
        rows = x.numel() // size
        out = torch.empty_like(x, dtype=codes or x.dtype)
        scales = x.new_empty(0 if codes is None else x.shape[:-1], dtype=torch.float32)
        kernels.norm_rows[(rows,)](
            x, residual, weight, out, scales, size, eps,
            ADDS=residual is not None, QUANTIZES=codes is not None, BLOCK=triton.next_power_of_2(size),
            num_warps=WARPS_OF_LONG_ROWS,
        )  # fmt: skip
        return out, scales

    def swiglu(self, gate_up: Tensor) -> Tensor:
        gate_up = gate_up.contiguous()
        rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(rows, size)
        grid = rows, triton.cdiv(size, SWIGLU_COLUMNS)
        kernels.swiglu_rows[grid](gate_up, out, size, BLOCK=SWIGLU_COLUMNS)
        return out

    def swiglu_quant(self, gate_up: Tensor, codes: torch.dtype = torch.int8) -> tuple[Tensor, Tensor]:
        return self._quantize(gate_up.contiguous(), codes, gates=True)

    def quant_swiglu(
        self, codes: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        return self.swiglu_quant(self.quant_linear(codes, scale, weight, weight_scale, None, dtype), codes.dtype)

    def _quantize(self, x: Tensor, dtype: torch.dtype, *, gates: bool) -> tuple[Tensor, Tensor]:
        rows, size = x.shape[0], x.shape[1] // (2 if gates else 1)
        codes = x.new_empty(rows, size, dtype=dtype)
        scales = x.new_empty(rows, dtype=torch.float32)
        kernels.quantize_rows[(rows,)](
            x, codes, scales, size, GATES=gates, BLOCK=QUANTIZED_COLUMNS, num_warps=WARPS_OF_LONG_ROWS
        )
        return codes, scales

    # ---- rotary embeddings -----------------------------------------------------------------------------------------

    def rope_tables(self, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Both [positions, 1, D / 2]: one factor for each pair of a head's elements."""
        return cos.to(dtype)[:, None], sin.to(dtype)[:, None]

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return self._rope(x, None, 0.0, cos, sin)

    def norm_rope(
        self, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        return self._rope(q, q_weight, eps, cos, sin), self._rope(k, k_weight, eps, cos, sin)

    def _rope(self, x: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
        """``rope`` of x, or of its norm."""
        x = _with_whole_rows(x)
        tokens, heads, dim = x.shape
        out = x.new_empty(x.shape)
        block = min(ROTATED_HEADS, triton.next_power_of_2(heads))
        kernels.rope_heads[(tokens, triton.cdiv(heads, block))](
            x, weight, cos.contiguous(), sin.contiguous(), out, x.stride(0), heads, cos.shape[1], eps,
            **_angles(cos, dim), BLOCK_HEADS=block, num_warps=2,
        )  # fmt: skip
        return out

    def rope_and_write(
        self,
        qkv: Tensor,
        norms: tuple[Tensor, Tensor] | None,
        eps: float,
        tables: tuple[Tensor, Tensor],
        caches: tuple[Tensor, Tensor],
        slot_mapping: Tensor,
        source: Tensor | None,
    ) -> Tensor:
        (cos, sin), (k_cache, v_cache) = tables, caches
        qkv = _with_whole_rows(qkv)
        tokens, heads, dim = qkv.shape
        kv_heads = k_cache.shape[2]
        out = qkv.new_empty(tokens, heads - 2 * kv_heads, dim)
        block = min(ROTATED_HEADS, triton.next_power_of_2(heads - 2 * kv_heads))
        blocks = triton.cdiv(heads - 2 * kv_heads, block) + 2 * triton.cdiv(kv_heads, block)
        q_weight, k_weight = norms or (None, None)
        kernels.rope_and_write[(max(tokens, len(slot_mapping)), blocks)](
            qkv, q_weight, k_weight, cos.contiguous(), sin.contiguous(), out, k_cache, v_cache, slot_mapping, source,
            qkv.stride(0), cos.shape[1], eps, tokens, len(slot_mapping), HEADS=heads - 2 * kv_heads, KV_HEADS=kv_heads,
            **_angles(cos, dim), BLOCK_HEADS=block, num_warps=2,
        )  # fmt: skip
        return out

    # ---- keys and values -------------------------------------------------------------------------------------------

    def kv_write(
        self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, source: Tensor | None = None
    ) -> None:
        k, v = _with_whole_rows(k), _with_whole_rows(v)
        size = k.shape[1] * k.shape[2]
        kernels.write_rows[(len(slot_mapping),)](
            k, v, k_cache, v_cache, slot_mapping, source, k.stride(0), v.stride(0),
            SIZE=size, BLOCK=triton.next_power_of_2(size),
        )  # fmt: skip

    def attention(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, entries: Entries) -> Tensor:
        q = _with_whole_rows(q)
        tokens, heads, dim = q.shape
        page_size, kv_heads = k_cache.shape[1:3]
        group = heads // kv_heads
        plan = self._plan(entries)
        out = q.new_empty(tokens, heads * dim)
        width = max(LEAST_DIM, triton.next_power_of_2(dim))
        halves = 2 if width > MOST_DIM or q.dtype == torch.float32 else 1
        tiles = triton.cdiv(plan.longest * group, QUERY_ROWS // halves)
        parts = triton.cdiv(plan.tables.shape[1] * page_size, PART_KEYS)
        programs = tiles * len(entries.lengths) * kv_heads
        shares = parts > 1 and programs < FEW_PROGRAMS and programs * parts <= MOST_SHARED
        mixes, stats = out, None
        if shares:
            mixes = q.new_empty(parts, tokens, heads, dim, dtype=torch.float32)
            stats = q.new_empty(parts, 2, tokens, heads, dtype=torch.float32)
        sizes = {"GROUP": group, "KV_HEADS": kv_heads, "DIM": dim, "PART": PART_KEYS, "BLOCK_DIM": width}
        kernels.attend_tile[(tiles * parts if shares else tiles, len(entries.lengths), kv_heads)](
            q, k_cache, v_cache, mixes, stats, plan.tables, plan.kv_lengths, plan.starts, plan.causal, q.stride(0),
            plan.tables.stride(0), plan.longest, tokens, parts if shares else 1, dim**-0.5 * math.log2(math.e),
            **sizes, PAGE=page_size, BLOCK_ROWS=QUERY_ROWS // halves, BLOCK_KEYS=KEYS // halves,
            ALL_CAUSAL=plan.all_causal, num_warps=8, num_stages=2,
        )  # fmt: skip
        if shares:
            grid = triton.cdiv(plan.longest * group, MERGED_ROWS), len(entries.lengths), kv_heads
            kernels.merge_rows[grid](
                mixes, stats, out, plan.kv_lengths, plan.starts, plan.longest, tokens, **sizes, BLOCK_ROWS=MERGED_ROWS
            )
        return out

    def _make_plan(self, entries: Entries) -> _Plan:
        """The first layer of a step makes it, and the others find it in the cache. With KV lengths on the device and
        entries of one length and kind it makes no tensor, so a captured step holds none but its own."""
        longest, starts = max(entries.lengths), None
        kv_lengths = entries.kv_lengths_on_device
        if kv_lengths is None:
            kv_lengths = self._uploaded(entries.kv_lengths)
        if min(entries.lengths) != longest:
            ends = torch.tensor(entries.lengths).cumsum(0).tolist()
            starts = self._uploaded((0, *ends))
        all_causal = bool(entries.causal) and all(entries.causal)
        causal = self._uploaded(entries.causal) if any(entries.causal) and not all_causal else None
        return _Plan(entries.page_tables.contiguous(), kv_lengths, starts, causal, all_causal, longest)

    def _uploaded(self, numbers: tuple[int, ...]) -> Tensor:
        """Numbers as int32 on the device, by a copy that runs while the host goes on."""
        on_host = self.host_memory(len(numbers)).copy_(torch.tensor(numbers))
        return on_host.to(self.device, non_blocking=True)

    # ---- scores and the memory of compiled steps -------------------------------------------------------------------

    shard_stats = None

    def row_stats(self, logits: Tensor, never_chosen: Tensor, confidence: str) -> RowStats:
        rows, size = logits.shape
        stats = logits.new_empty(4, rows, dtype=torch.float32)
        ids = logits.new_empty(rows, dtype=torch.int32)
        kernels.score_rows[(rows,)](
            logits, never_chosen, stats, ids, logits.stride(0), size, rows,
            MARGIN=confidence == "margin", ENTROPY=confidence == "neg_entropy", BLOCK=SCORED_COLUMNS,
            num_warps=WARPS_OF_LONG_ROWS,
        )  # fmt: skip
        best, log_share, log_total, rest = stats.unbind()
        return RowStats(best, log_share, log_total, () if confidence == "max_prob" else (rest,), ids)

    def put_rows(self, x: Tensor, rows: Tensor, values: Tensor) -> None:
        x.index_copy_(0, rows.long(), values)

    def host_memory(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.int32, pin_memory=self.device.type == "cuda")

    def read_later(self, x: Tensor, while_waiting: Callable[[float], None]) -> Callable[[], Tensor]:
        if self.device.type != "cuda":
            copied = x.clone()
            return lambda: copied
        copy = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
        copy.copy_(x, non_blocking=True)
        event = torch.cuda.Event()
        event.record()

        def read() -> Tensor:
            wait_for(event, while_waiting)
            return copy

        return read


def _routed(logits: Tensor, experts: Experts) -> tuple[Tensor, Tensor]:
    """The experts of tokens, int32 [T * per_token], and their weights, by the router's outputs [T, E]."""
    sizes, number = experts.sizes, logits.shape[0] * experts.sizes.per_token
    ids, weights = logits.new_empty(number, dtype=torch.int32), logits.new_empty(number)
    kernels.route_rows[(logits.shape[0],)](
        logits, experts.bias, ids, weights, sizes.scale,
        EXPERTS=sizes.num_experts, GROUPS=sizes.num_groups, KEPT=sizes.kept_groups, COUNT=sizes.per_token,
        BLOCK=triton.next_power_of_2(sizes.num_experts), num_warps=1,
    )  # fmt: skip
    return ids, weights


def _expert_products(
    x: tuple[Tensor, Tensor | None],
    weight: tuple[Tensor, Tensor | None],
    pairs: tuple[Tensor, Tensor],
    share: int,
    dtype: torch.dtype,
) -> Tensor:
    """A row for each pair of a token and an expert -> [pairs, outputs]. x: a row for ``share`` pairs that follow one
    another, and its scale if it is int8. weight: of all experts [E, outputs, inputs], and the scales of its outputs if
    it is int8. pairs: ``order`` and ``ends`` of ``kernels.multiply_experts``."""
    (rows, scales), (order, ends) = x, pairs
    number, outputs, inputs = weight[0].shape
    count = len(order)
    out = rows.new_empty(count, outputs, dtype=dtype)
    most_tiles = (count + min(number, count) * (EXPERT_ROWS - 1)) // EXPERT_ROWS
    blocks = {"BLOCK_ROWS": EXPERT_ROWS, "BLOCK_OUTPUTS": 128, "BLOCK_INPUTS": 128 // rows.element_size()}
    kernels.multiply_experts[most_tiles, triton.cdiv(outputs, 128)](
        rows, scales, *weight, out, order, ends, outputs, inputs,
        SHARE=share, EXPERTS=number, BLOCK_EXPERTS=triton.next_power_of_2(number), **blocks, num_warps=8, num_stages=3,
    )  # fmt: skip
    return out


def _with_whole_rows(x: Tensor) -> Tensor:
    """x [T, heads, D] such that the heads of a token follow one another, copied only if they do not."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


def _multiply_fp8(
    codes: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """``quant_linear`` of FP8 by the library. Sums are float32: the fast ones of a Hopper keep 14 bits."""
    return torch._scaled_mm(
        codes, weight.t(), scale[:, None], weight_scale[None], bias, out_dtype=dtype, use_fast_accum=False
    )


def _angles(cos: Tensor, dim: int) -> dict[str, int]:
    """What kernels are told of tables of cosines [T, 1 or heads, dim / 2]."""
    half = dim // 2
    return {"ANGLE_STRIDE": 0 if cos.shape[1] == 1 else half, "HALF": half, "BLOCK_HALF": triton.next_power_of_2(half)}


def _rows_agree(weight: Tensor) -> bool:
    """Whether the first rows of a product have the same bits for each of ROW_COUNTS."""
    generator = torch.Generator(weight.device).manual_seed(0)
    x = torch.randn(MOST_ROWS, weight.shape[1], generator=generator, device=weight.device).to(weight.dtype)
    ones = torch.ones(max(x.shape[0], weight.shape[0]), device=weight.device)

    def product(rows: Tensor) -> Tensor:
        if weight.dtype == FP8:
            return _multiply_fp8(rows, ones[: len(rows)], weight, ones[: len(weight)], None, torch.bfloat16)
        return F.linear(rows, weight)

    whole = product(x)
    return all(torch.equal(product(x[-count:]), whole[-count:]) for count in ROW_COUNTS)
