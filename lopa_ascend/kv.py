"""The KV pool on the device: keys and values of all layers, cut into pages of 128 positions."""

from __future__ import annotations

import torch

from lopa_ascend.config import ModelConfig
from lopa_ascend.pages import PAGE_SIZE, PageAllocator


class KVPool:
    """``k`` and ``v`` of each layer [pages, 128, kv_heads, head_dim], all of them in ``caches`` [2, layers, ...], and
    the allocator of the first ``num_pages``; ``spare`` pages behind them are nobody's. ``kv_heads`` are those of one of
    ``tp_size`` ranks."""

    def __init__(
        self, config: ModelConfig, num_pages: int, dtype: torch.dtype, device: str, tp_size: int = 1, spare: int = 0
    ):
        pages = num_pages + spare
        shape = (2, config.num_layers, pages, PAGE_SIZE, config.local_kv_heads(tp_size), config.head_dim)
        # Written once now, so that the memory is really there and does not run out under load.
        self.caches = torch.empty(shape, dtype=dtype, device=device).zero_()
        self.k, self.v = (half.unbind() for half in self.caches)
        self.allocator = PageAllocator(num_pages)

    @staticmethod
    def page_bytes(config: ModelConfig, dtype: torch.dtype, tp_size: int = 1) -> int:
        """Bytes of one page in all layers, keys and values, on one of ``tp_size`` ranks."""
        return 2 * config.num_layers * PAGE_SIZE * config.local_kv_heads(tp_size) * config.head_dim * dtype.itemsize

    @property
    def num_pages(self) -> int:
        return self.allocator.num_pages
