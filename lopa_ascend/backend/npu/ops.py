"""The fused ops on an NPU, by the kernels of ``torch.ops.npu``.

Three things that the kernels need:

- A compiled step copies nothing if weights are laid out as ``stored`` returns them, and if the cache of a layer is
  passed in as it is, [N, 128, K, D] and contiguous: a view between an input of the graph and the write costs a copy of
  the cache.
- The positions of a write must be distinct and inside the cache: the kernel does not check them, and writes to wherever
  they point. Padding rows of a bucket are written too, so the caller gives each another position in pages that belong
  to no sequence. (vllm-ascend's tests have -1 skipped, which the documents exclude.)
- By its documents, the attention kernel needs a cache with at least as many pages as the page tables of its entries
  have places. If all page tables together have more, several kernels take the entries one group after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
import torch_npu
from torch import Tensor

from lopa_ascend.backend.interface import Entries, Experts, Int4Weight
from lopa_ascend.config import ATTENTION_LAYOUTS

npu = torch.ops.npu
MAX_ENTRIES = 4096
"""Most entries of the attention kernel in the layout TND."""
MAX_QUERIES = {"TND16": 16}
"""Most queries of an attention entry, by layout; any number in the others."""
MASK_SIZE = 2048
"""Sides of the mask of a causal entry. The kernel knows by ``sparse_mode`` what it means for other sizes."""
RIGHT_DOWN_CAUSAL = 3
"""The ``sparse_mode`` in which the last query sees all keys, and each one before it one less."""
FRACTAL_NZ = 29
"""The number of the format in which the int8 product reads its weights fastest: tiles of 16 x 32."""
JOINT_ROPE_DIMS = (64, 128)
"""Head dimensions of the kernel that rotates queries and keys at once."""
FUSED_SWIGLU_BYTES = 192 << 10
"""Memory of a vector core, which limits the rows of the kernel of SwiGLU with quantisation."""
FUSED_SWIGLU_MULTIPLE = 64
"""The same kernel's rows must have a multiple of this length."""
INT32_SWIGLU_LENGTH = 24576
"""Its longest row of integer products in CANN's recipes for a 910C (Qwen3-8B)."""
GROUPED_SWIGLU_LENGTH = 7232
"""Its longest row in groups of experts, by its documents."""


class NpuOps:
    """``Ops`` on the current NPU, on which all tensors of a call lie. ``attention_layout`` TND takes entries of any
    lengths at once. TND16 is TND, but divides entries so that none has more than 16 queries. BSH is for devices and
    versions that refuse TND: it takes entries of equal length that follow one another. ``kernel_layout`` is the
    kernel's name of it, "TND" or "BSH"."""

    row_stats = None
    rope_and_write = None
    shard_stats = None

    def __init__(self, *, attention_layout: str = "TND"):
        if attention_layout not in ATTENTION_LAYOUTS:
            choices = ", ".join(ATTENTION_LAYOUTS)
            raise ValueError(f"attention layout: unknown value {attention_layout!r}; choose one of {choices}")
        self.device = torch.device("npu", torch_npu.npu.current_device())
        self.gathered_bytes = 0
        self.max_queries = MAX_QUERIES.get(attention_layout)
        self.score_rows: int | None = None  # fewer rows at a time are more launches
        self.attention_layout = attention_layout
        self.kernel_layout = "BSH" if attention_layout == "BSH" else "TND"
        # True behind a query, as the documents of the kernel want it.
        self.causal_mask = torch.ones(MASK_SIZE, MASK_SIZE, dtype=torch.bool).triu(1).to(self.device)

    def stored(self, weight: Tensor) -> Tensor:
        transposed = weight.mT.contiguous()
        return as_fractal_nz(transposed) if weight.dtype == torch.int8 else transposed

    def packed(self, weight: Tensor) -> Tensor:
        return weight

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)

    def quantize(self, x: Tensor, codes: torch.dtype = torch.int8) -> tuple[Tensor, Tensor]:
        """For x in float16 or bfloat16. fp8 is refused before weights are read."""
        integers, scale = npu.npu_dynamic_quant(x)
        return integers, scale

    def quant_linear(
        self,
        codes: Tensor,
        scale: Tensor,
        weight: Tensor,
        weight_scale: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
    ) -> Tensor:
        product: Tensor = npu.npu_quant_matmul(
            codes, weight, weight_scale, pertoken_scale=scale, bias=bias, output_dtype=dtype
        )
        return product

    def stored_int4(self, weight: Int4Weight) -> Int4Weight:
        raise NotImplementedError("int4 weights are refused before they are read")

    def int4_linear(
        self, codes: Tensor, scale: Tensor, weight: Int4Weight, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        raise NotImplementedError("int4 weights are refused before they are read")

    def stored_experts(self, experts: Experts) -> Experts:
        """Weights [E, in, out], and a router in bfloat16 if that rounds nothing: its products are float32 all the same.
        A grouped product in bfloat16 takes scales of outputs in bfloat16 alone. Those of gate_up stay in float32 if
        another kernel takes them."""
        e, router, inner = experts, experts.router.bfloat16(), experts.down.shape[2]
        scales = [e.gate_up_scale, e.down_scale]
        fits = inner % FUSED_SWIGLU_MULTIPLE == 0 and 2 * inner <= GROUPED_SWIGLU_LENGTH
        is_fused = fits and all(scale is not None for scale in scales)
        up_scale, down_scale = (None if scale is None else scale.bfloat16() for scale in scales)
        return replace(
            e,
            router=router if torch.equal(router.float(), e.router) else e.router,
            gate_up=self.stored(e.gate_up),
            down=self.stored(e.down),
            gate_up_scale=e.gate_up_scale if is_fused else up_scale,
            down_scale=down_scale,
        )

    def moe(self, x: Tensor, experts: Experts, shared: Tensor | None = None) -> Tensor:
        """For experts in groups of more than two, and int8 ones with x in bfloat16."""
        e, sizes = experts, experts.sizes
        weights, ids, _ = npu.npu_moe_gating_top_k(
            self._routed(x, e.router),
            sizes.per_token,
            bias=e.bias,
            k_group=sizes.kept_groups,
            group_count=sizes.num_groups,
            group_select_mode=1,  # by the sum of a group's two best
            norm_type=1,  # sigmoid
            routed_scaling_factor=sizes.scale,
        )
        rows, places, counts, scale = npu.npu_moe_init_routing_v2(
            x,
            ids,
            active_num=ids.numel(),
            expert_num=sizes.num_experts,
            expert_tokens_num_type=1,
            expert_tokens_num_flag=True,
            quant_mode=-1 if e.gate_up_scale is None else 1,  # 1: by token
            active_expert_range=[0, sizes.num_experts],
        )
        outputs = self._mlps(e, rows, scale, counts, x.dtype)
        # Mode 2: ``places`` has the experts of a token side by side.
        total: Tensor = npu.npu_moe_finalize_routing(
            outputs, shared, None, None, weights, places, None, drop_pad_mode=2
        )
        return total

    def _mlps(self, e: Experts, rows: Tensor, scale: Tensor, counts: Tensor, dtype: torch.dtype) -> Tensor:
        """The experts' MLPs of rows, which lie expert after expert, and with ``scale`` if they are int8."""
        if e.gate_up_scale is not None and e.gate_up_scale.dtype == torch.float32:
            gated = npu.npu_dequant_swiglu_quant(
                _grouped(rows, e.gate_up, counts, output_dtype=torch.int32),
                weight_scale=e.gate_up_scale,
                activation_scale=scale,
                group_index=counts,
                activate_left=True,
                quant_mode=1,
            )
        else:
            gate_up = _grouped_as(dtype, (rows, scale), e.gate_up, e.gate_up_scale, counts)
            gated = self.swiglu(gate_up), None
            gated = gated if e.down_scale is None else npu.npu_dynamic_quant(gated[0])
        return _grouped_as(dtype, gated, e.down, e.down_scale, counts)

    def _routed(self, x: Tensor, router: Tensor) -> Tensor:
        """The router's scores, float32 [T, E]."""
        if x.dtype == router.dtype == torch.bfloat16:
            return torch.mm(x, router.t(), out_dtype=torch.float32)
        return torch.mm(x.float(), router.t().float())

    def settle(self, weights: Iterable[Tensor]) -> str:
        return "whether rows are independent is not known of NPUs"

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        normed: Tensor = npu.npu_rms_norm(x, weight, eps)[0]
        return normed

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        normed, _, total = npu.npu_add_rms_norm(x, residual, weight, eps)
        return normed, total

    def rms_norm_quant(
        self, x: Tensor, weight: Tensor, eps: float, codes: torch.dtype = torch.int8
    ) -> tuple[Tensor, Tensor]:
        """For x in float16 or bfloat16."""
        integers, scale = npu.npu_dynamic_quant(self.rms_norm(x, weight, eps))
        return integers, scale

    def add_rms_norm_quant(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, codes: torch.dtype = torch.int8
    ) -> tuple[Tensor, Tensor, Tensor]:
        """For x in float16 or bfloat16."""
        integers, _, total, scale, _ = npu.npu_add_rms_norm_dynamic_quant(
            x, residual, weight, epsilon=eps, output_mask=[True, False]
        )
        return integers, scale, total

    def rope_tables(self, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Both [positions, 1, D]: the kernel takes one factor for each element of a head."""
        whole = [torch.cat([half, half], -1).to(dtype)[:, None] for half in (cos, sin)]
        return whole[0], whole[1]

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rotated: Tensor = npu.npu_rotary_mul(x[None], cos[None], sin[None])  # [1, T, heads, D] and [1, T, 1, D]
        return rotated.view(x.shape)

    def norm_rope(
        self, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        q, k = self.rms_norm(q.contiguous(), q_weight, eps), self.rms_norm(k.contiguous(), k_weight, eps)
        if q.shape[-1] not in JOINT_ROPE_DIMS:
            return self.rope(q, cos, sin), self.rope(k, cos, sin)
        # It writes into q and k, which the norms have made, though its schema does not say so.
        rotated: tuple[Tensor, Tensor] = npu.npu_apply_rotary_pos_emb(q, k, cos, sin, layout="TND")
        return rotated

    def swiglu(self, gate_up: Tensor) -> Tensor:
        gated: Tensor = npu.npu_swiglu(gate_up)
        return gated

    def swiglu_quant(self, gate_up: Tensor, codes: torch.dtype = torch.int8) -> tuple[Tensor, Tensor]:
        """For gate_up in float16 or bfloat16."""
        if one_kernel_takes(gate_up):
            integers, scale = npu.npu_dequant_swiglu_quant(gate_up, activate_left=True, quant_mode=1)
        else:
            integers, scale = npu.npu_dynamic_quant(self.swiglu(gate_up))
        return integers, scale

    def quant_swiglu(
        self, codes: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        length = weight.shape[1]
        if length % FUSED_SWIGLU_MULTIPLE or length > INT32_SWIGLU_LENGTH:
            return self.swiglu_quant(self.quant_linear(codes, scale, weight, weight_scale, None, dtype))
        product = npu.npu_quant_matmul(codes, weight, weight_scale, output_dtype=torch.int32)
        gated: tuple[Tensor, Tensor] = npu.npu_dequant_swiglu_quant(
            product, weight_scale=weight_scale, activation_scale=scale, activate_left=True, quant_mode=1
        )
        return gated

    def kv_write(
        self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, source: Tensor | None = None
    ) -> None:
        k, v = (x.contiguous() if source is None else x.index_select(0, source) for x in (k, v))
        npu.npu_scatter_pa_kv_cache(k, v, k_cache, v_cache, slot_mapping, cache_mode="Norm")

    def put_rows(self, x: Tensor, rows: Tensor, values: Tensor) -> None:
        npu.npu_scatter_nd_update_(x, rows[:, None], values)

    def host_memory(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.int32, pin_memory=True)

    def read_later(self, x: Tensor, while_waiting: Callable[[float], None]) -> Callable[[], Tensor]:
        copy = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
        copy.copy_(x, non_blocking=True)
        event = torch_npu.npu.Event()
        event.record()

        def read() -> Tensor:
            event.synchronize()  # HCCL itself gives up a rank that does not come
            return copy

        return read

    def attention(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, entries: Entries) -> Tensor:
        assert self.max_queries is None or max(entries.lengths) <= self.max_queries, "see Ops.max_queries"
        q = q.contiguous()
        outputs, begin = [], 0
        for group, is_causal in self._kernel_groups(entries, k_cache.shape[0]):
            lengths, kv_lengths = entries.lengths[group], entries.kv_lengths[group]
            end = begin + sum(lengths)
            outputs.append(
                attend(
                    self.kernel_layout,
                    q[begin:end],
                    k_cache,
                    v_cache,
                    lengths,
                    kv_lengths,
                    entries.page_tables[group],
                    self.causal_mask if is_causal else None,
                )
            )
            begin = end
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _kernel_groups(self, entries: Entries, num_pages: int) -> list[tuple[slice, bool]]:
        """Ranges of entries that one kernel can take, of a cache with so many pages, and whether it needs the mask of
        causal entries. They depend on shapes only, not on KV lengths, so that a captured graph holds for all KV
        lengths. An entry of one query is the same with the mask and without it."""
        pages_per_entry = entries.page_tables.shape[1]
        most = min(MAX_ENTRIES, max(1, num_pages // pages_per_entry))
        causal = entries.causal or (False,) * len(entries.lengths)
        groups: list[tuple[slice, bool]] = []
        first, kind = 0, None
        for index, (length, is_causal) in enumerate(zip(entries.lengths, causal, strict=True)):
            own = is_causal if length > 1 else None
            is_other = kind is not None and own is not None and own != kind
            is_other |= self.kernel_layout == "BSH" and length != entries.lengths[first]
            if is_other or index - first == most:
                groups.append((slice(first, index), kind is True))
                first, kind = index, None
            kind = own if kind is None else kind
        return [*groups, (slice(first, len(entries.lengths)), kind is True)]


def _grouped(rows: Tensor, weights: Tensor, counts: Tensor, **options: Any) -> Tensor:
    """The products of rows [n, in], which lie expert after expert, with weights [E, in, out] -> [n, out]. ``counts``:
    rows of each expert, int64 [E]; ``options``: of the op, which quantised products need."""
    product: Tensor
    (product,) = npu.npu_grouped_matmul(
        [rows], [weights], group_list=counts, split_item=3, group_type=0, group_list_type=1, **options
    )
    return product


def _grouped_as(
    dtype: torch.dtype, rows: tuple[Tensor, Tensor | None], weights: Tensor, scale: Tensor | None, counts: Tensor
) -> Tensor:
    """``_grouped`` of rows and their scales, with results of a dtype. ``scale``: of each output, bfloat16 [E, out];
    None if the weights are not int8."""
    if scale is None:
        return _grouped(rows[0], weights, counts)
    return _grouped(rows[0], weights, counts, scale=[scale], per_token_scale=[rows[1]], output_dtype=dtype)


def as_fractal_nz(weight: Tensor) -> Tensor:
    """A copy of an int8 weight [in, out], or of one for each expert, in the format FRACTAL_NZ, which only the products
    ``npu_quant_matmul`` and ``npu_grouped_matmul`` take."""
    config = torch_npu.npu.config
    config.allow_internal_format = True  # otherwise the copy would keep the format ND
    try:
        converted: Tensor = torch_npu.npu_format_cast(weight, FRACTAL_NZ)
    finally:
        config.allow_internal_format = False
    return converted


def one_kernel_takes(gate_up: Tensor) -> bool:
    """Whether the kernel of SwiGLU with quantisation takes gate_up [T, 2 * I] in float16 or bfloat16. By its documents
    it needs memory for ten rows, and a fortieth of the scales that it returns."""
    rows, length = gate_up.shape
    scale_bytes = 4 * rows
    needed = 10 * length * gate_up.element_size() + scale_bytes // 40
    return length % FUSED_SWIGLU_MULTIPLE == 0 and needed < FUSED_SWIGLU_BYTES


def attend(
    layout: str,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Sequence[int],
    kv_lengths: Sequence[int],
    page_tables: Tensor,
    causal_mask: Tensor | None = None,
) -> Tensor:
    """Attention of contiguous queries [T, H, D] by one kernel, in the layout "TND" or "BSH". What the kernel cannot
    take is not checked. ``lengths``: queries of each entry, all equal in BSH; ``page_tables``: int32 [entries, pages];
    ``causal_mask``: bool [MASK_SIZE, MASK_SIZE] if all entries are causal."""
    tokens, heads, dim = q.shape
    page_size, kv_heads = k_cache.shape[1:3]
    out: Tensor = npu.npu_fused_infer_attention_score(
        q if layout == "TND" else q.view(len(lengths), -1, heads * dim),
        k_cache.flatten(2),
        v_cache.flatten(2),
        actual_seq_lengths=list(accumulate(lengths) if layout == "TND" else lengths),
        actual_seq_lengths_kv=list(kv_lengths),
        block_table=page_tables,
        num_heads=heads,
        num_key_value_heads=kv_heads,
        scale=dim**-0.5,
        input_layout=layout,
        block_size=page_size,
        **({} if causal_mask is None else {"atten_mask": causal_mask, "sparse_mode": RIGHT_DOWN_CAUSAL}),
    )[0]
    return out.view(tokens, heads * dim)
