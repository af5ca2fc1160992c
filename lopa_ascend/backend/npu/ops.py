"""The fused ops on torch.ops.npu: one kernel where ``backend/cpu.py`` spells it out.

What must hold so that a compiled step copies nothing: weights as ``stored`` gives them, and a layer's cache passed in
as it is, [N, 128, K, D] and contiguous, for a view between an input and the write costs a copy of the cache.

Slots of a write must be distinct and lie inside the cache: the kernel does not look, and writes somewhere. A row that
only fills up a bucket is written too; its slots are positions of pages that belong to no sequence, one for each such
row, and the caller gives them like all others.

By its documents, attention wants a cache of no fewer pages than its entries have together, a page counted once for
each entry that has it. Where page tables have more places than the cache has pages, several kernels take the entries in
turn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
import torch_npu
from torch import Tensor

from lopa_ascend.backend.base import Entries
from lopa_ascend.config import ATTENTION_LAYOUTS

npu = torch.ops.npu
MAX_ENTRIES = 4096
"""That one attention takes in TND."""


class NpuOps:
    """``backend/base.py`` on an NPU.

    Everything is on the NPU that was current when the ops were made, ``device``. ``attention_layout``: TND takes
    entries of any lengths at once; BSH, where a device or a version refuses TND, takes neighbours of one length.
    ``debug`` reads every write's slots and every attention's page ids back and checks them: in eager mode alone, for
    the host waits for it.

    Slots are int32 or int64, page tables int32, all on the device.

    Raises:
        ValueError: the layout is unknown; with ``debug``, slots or page ids are not valid.
    """

    def __init__(self, *, attention_layout: str = "TND", debug: bool = False):
        if attention_layout not in ATTENTION_LAYOUTS:
            choices = ", ".join(ATTENTION_LAYOUTS)
            raise ValueError(f"attention layout: unknown value {attention_layout!r}; choose one of {choices}")
        self.device = torch.device("npu", torch_npu.npu.current_device())
        self.gathered_bytes = 0
        self._attention_layout = attention_layout
        self._debug = debug

    def stored(self, weight: Tensor) -> Tensor:
        return weight.t().contiguous()

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        normed: Tensor = npu.npu_rms_norm(x, weight, eps)[0]
        return normed

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        normed, _, total = npu.npu_add_rms_norm(x, residual, weight, eps)
        return normed, total

    def rms_norm_quant(self, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """x in float16 or bfloat16."""
        codes, scale = npu.npu_dynamic_quant(self.rms_norm(x, weight, eps))
        return codes, scale

    def add_rms_norm_quant(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x in float16 or bfloat16."""
        codes, _, total, scale, _ = npu.npu_add_rms_norm_dynamic_quant(
            x, residual, weight, epsilon=eps, output_mask=[True, False]
        )
        return codes, scale, total

    def rope_tables(self, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """[positions, 1, D]: the kernel takes a factor for every element of a head."""
        whole = [torch.cat([table, table], -1).to(dtype)[:, None] for table in (cos, sin)]
        return whole[0], whole[1]

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        turned: Tensor = npu.npu_rotary_mul(x[None], cos[None], sin[None])  # [1, T, heads, D] and [1, T, 1, D]
        return turned.view(x.shape)

    def swiglu(self, gate_up: Tensor) -> Tensor:
        gated: Tensor = npu.npu_swiglu(gate_up)
        return gated

    def kv_write(
        self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, source: Tensor | None = None
    ) -> None:
        if self._debug:
            check_slot_mapping(slot_mapping.tolist(), k_cache.shape[0] * k_cache.shape[1])
        k, v = (x.contiguous() if source is None else x.index_select(0, source) for x in (k, v))
        npu.npu_scatter_pa_kv_cache(k, v, k_cache, v_cache, slot_mapping, cache_mode="Norm")

    def put_rows(self, x: Tensor, rows: Tensor, values: Tensor) -> None:
        npu.npu_scatter_nd_update_(x, rows[:, None], values)

    def host_memory(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.int32, pin_memory=True)

    def read_later(self, x: Tensor) -> Callable[[], Tensor]:
        copy = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
        copy.copy_(x, non_blocking=True)
        event = torch_npu.npu.Event()
        event.record()

        def read() -> Tensor:
            event.synchronize()
            return copy

        return read

    def attention(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, entries: Entries) -> Tensor:
        if self._debug:
            check_pages(entries, k_cache.shape[0], k_cache.shape[1])
        q, outputs, tokens = q.contiguous(), [], 0
        for first, last in self._batches(entries, k_cache.shape[0]):
            part = slice(first, last)
            lengths, kv_lengths, tables = entries.lengths[part], entries.kv_lengths[part], entries.page_tables[part]
            span = q[tokens : tokens + sum(lengths)]
            outputs.append(attend(self._attention_layout, span, k_cache, v_cache, lengths, kv_lengths, tables))
            tokens += sum(lengths)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _batches(self, entries: Entries, num_pages: int) -> list[tuple[int, int]]:
        """Ranges [first, last) of entries that one kernel can take. They depend on shapes alone, not on KV lengths, so
        that a graph holds for all of these."""
        most = min(MAX_ENTRIES, max(1, num_pages // entries.page_tables.shape[1]))
        batches, first = [], 0
        for index, length in enumerate(entries.lengths):
            differs = self._attention_layout == "BSH" and length != entries.lengths[first]
            if differs or index - first == most:
                batches.append((first, index))
                first = index
        return [*batches, (first, len(entries.lengths))]


def attend(
    layout: str,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Sequence[int],
    kv_lengths: Sequence[int],
    page_tables: Tensor,
) -> Tensor:
    """One kernel for contiguous queries [T, H, D] of entries with these lengths, which are equal in BSH -> [T, H * D].
    It looks at nothing that ``NpuOps`` takes care of."""
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
    )[0]
    return out.view(tokens, heads * dim)


def check_slot_mapping(slot_mapping: Sequence[int], num_positions: int) -> None:
    """Refuses positions of a write that lie outside the cache or come more than once.

    Args:
        slot_mapping: flat cache positions.
        num_positions: positions of the cache.
    """
    outside = sorted({position for position in slot_mapping if not 0 <= position < num_positions})
    if outside:
        raise ValueError(f"slot_mapping: {outside[:8]} lie outside the cache, which has {num_positions} positions")
    repeated = sorted(position for position, count in Counter(slot_mapping).items() if count > 1)
    if repeated:
        raise ValueError(f"slot_mapping: {repeated[:8]} are written more than once in a step")


def check_pages(entries: Entries, num_pages: int, page_size: int) -> None:
    """Refuses page ids outside a cache of ``num_pages``, and entries that see more positions than they have pages
    for."""
    tables = entries.page_tables.tolist()
    for index, (table, kv_length) in enumerate(zip(tables, entries.kv_lengths, strict=True)):
        if kv_length > len(table) * page_size:
            raise ValueError(f"entry {index} sees {kv_length} positions and has {len(table)} pages")
        outside = sorted({page for page in table if not 0 <= page < num_pages})
        if outside:
            raise ValueError(f"pages {outside[:8]} of entry {index} lie outside the cache, which has {num_pages}")
