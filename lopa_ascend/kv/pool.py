"""The memory for keys and values on one device: the pages of all layers as one tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lopa_ascend.kv.pages import PAGE_SIZE, PageAllocator, page_bytes, pages_for
from lopa_ascend.types import KVShape, PageCopy


class KVPool:
    """Keys and values of all layers: ``caches`` [2, layers, pages, 128, kv_heads, head_dim], keys first; ``k`` and
    ``v`` have a view [pages, 128, kv_heads, head_dim] of it for each layer. Behind the ``num_pages`` for requests lie
    ``num_padding_pages``: padding rows of compiled steps write there, and no row reads them."""

    def __init__(
        self, shape: KVShape, num_pages: int, dtype: torch.dtype, device: str, num_padding_pages: int = 0
    ) -> None:
        size = (2, shape.num_layers, num_pages + num_padding_pages, PAGE_SIZE, shape.num_kv_heads, shape.head_dim)
        # Written once now, so that the system commits the memory and does not run out of it under load.
        self.caches = torch.empty(size, dtype=dtype, device=device).zero_()
        self.k, self.v = (half.unbind() for half in self.caches)
        self.allocator = PageAllocator(num_pages)
        self.copied_positions = 0

    @staticmethod
    def page_bytes(shape: KVShape, dtype: torch.dtype) -> int:
        return page_bytes(shape, dtype.itemsize)

    @property
    def num_pages(self) -> int:
        """Without padding pages."""
        return self.allocator.num_pages

    def read(self, page_table: Sequence[int], begin: int, end: int) -> Tensor:
        """Keys and values [2, layers, end - begin, kv_heads, head_dim] of the sequence positions [begin, end)."""
        pages = _inside_pages(begin, end)
        return torch.cat([self.caches[:, :, page_table[index], inside] for index, inside in pages], 2)

    def write(self, page_table: Sequence[int], begin: int, end: int, values: Tensor) -> None:
        """Writes what ``read`` returned, on this rank or another, to the sequence positions [begin, end)."""
        first = 0
        for index, inside in _inside_pages(begin, end):
            last = first + inside.stop - inside.start
            self.caches[:, :, page_table[index], inside] = values[:, :, first:last]
            first = last

    def copy(self, source: Sequence[int], target: Sequence[int], begin: int, end: int) -> None:
        """Copies the sequence positions [begin, end) between the pages of two page tables."""
        if source != target and begin < end:
            self.copied_positions += end - begin
            for index, inside in _inside_pages(begin, end):
                self.caches[:, :, target[index], inside] = self.caches[:, :, source[index], inside]

    def copy_page(self, copy: PageCopy) -> None:
        self.copy([copy.source], [copy.target], 0, copy.num_positions)

    def copy_to_slots(self, page_tables: Sequence[Sequence[int]], slot: int, begin: int, end: int) -> None:
        """Copies the sequence positions [begin, end) from one slot to all others. From now on all share the pages of
        slot 0 that these positions fill, so the others get only the positions after those pages."""
        self.copy(page_tables[slot], page_tables[0], begin, end)
        first_private = max(begin, end // PAGE_SIZE * PAGE_SIZE)
        for table in page_tables[1:]:
            self.copy(page_tables[0], table, first_private, end)


def _inside_pages(begin: int, end: int) -> Iterator[tuple[int, slice]]:
    """(index in the page table, part of that page), page by page, of the sequence positions [begin, end). Slices rather
    than index_copy_, which on an NPU transposes the whole pool along any dimension but the first."""
    for index in range(begin // PAGE_SIZE, pages_for(end)):
        first = index * PAGE_SIZE
        yield index, slice(max(begin - first, 0), min(end - first, PAGE_SIZE))
