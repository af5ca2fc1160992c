"""Ops that read the positions of every write and the page ids of every attention back, and check them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import Tensor

from lopa_ascend.backend.interface import Entries
from lopa_ascend.backend.npu.ops import NpuOps


class StrictOps(NpuOps):
    """For eager mode, since the host waits for the device."""

    def kv_write(
        self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, source: Tensor | None = None
    ) -> None:
        check_slot_mapping(slot_mapping.tolist(), k_cache.shape[0] * k_cache.shape[1])
        super().kv_write(k, v, k_cache, v_cache, slot_mapping, source)

    def attention(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, entries: Entries) -> Tensor:
        check_pages(entries, k_cache.shape[0], k_cache.shape[1])
        return super().attention(q, k_cache, v_cache, entries)


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
    """Refuses page ids outside the cache, and entries that attend to more positions than they have pages for.

    Args:
        entries: the entries of a step.
        num_pages: pages of the cache.
        page_size: positions of a page.
    """
    tables = entries.page_tables.tolist()
    for index, (table, kv_length) in enumerate(zip(tables, entries.kv_lengths, strict=True)):
        if kv_length > len(table) * page_size:
            raise ValueError(f"entry {index} sees {kv_length} positions and has {len(table)} pages")
        outside = sorted({page for page in table if not 0 <= page < num_pages})
        if outside:
            raise ValueError(f"pages {outside[:8]} of entry {index} lie outside the cache, which has {num_pages}")
