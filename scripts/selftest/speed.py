"""Which attention layout is faster? Replays of a captured graph that holds attention alone are timed in each.

An eager call would be timed with its launch, which takes the host longer than attention takes the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property, partial
from typing import TYPE_CHECKING

from torch import Tensor

from lopa_ascend.backend.interface import Entries, Ops
from lopa_ascend.kv.pages import PAGE_SIZE, pages_for
from scripts.selftest.cases import BLOCK, CPU, DIM, HEADS, KV_HEADS, Case, entries_of, on_device, randn

if TYPE_CHECKING:
    from lopa_ascend.backend.npu.captured import CapturedRun

SPEED = "replayed attention"
"""Beginning of the names of ``speed_cases``."""
TIMED_LAYOUTS = ("TND", "TND16")
"""The layouts of which the faster one is chosen."""
CALLS = 4
"""Calls of attention in a graph, one after the other."""
TP = 4
"""Ranks that share the heads."""
KV_LENGTHS = (544, 4096)
"""Keys that the entries of one or two sequences see, by case."""
FEW = tuple((4, num_keys) for num_keys in KV_LENGTHS)
"""Attention entries of BLOCK queries, before they are divided, and the keys that they see."""
MANY = ((8, 1024), (32, 1024))
"""The same of more sequences: the kernel has a faster path for few short entries alone (ops-transformer, the tiling of
flash_attention_infer)."""


class ReplayedAttention:
    """Calls of attention in a captured graph, which the first call captures and every call replays.

    Args:
        ops: the device's.
        q: queries [tokens, heads, DIM], on the device.
        k_cache: keys [pages, PAGE_SIZE, KV heads, DIM], on the device.
        v_cache: values, likewise.
        entries: on the device, as ``ops`` take them.
        name: of the graph, for messages.
        calls: of attention, one after the other.
    """

    def __init__(
        self, ops: Ops, q: Tensor, k_cache: Tensor, v_cache: Tensor, entries: Entries, name: str, calls: int = CALLS
    ) -> None:
        self._attend = partial(ops.attention, q, k_cache, v_cache, entries)
        self._kv_lengths, self._name, self._calls = list(entries.kv_lengths), name, calls

    def __call__(self) -> Tensor:
        return self.captured(self._kv_lengths)

    @cached_property
    def captured(self) -> CapturedRun:
        """Replays the graph with other KV lengths."""
        from lopa_ascend.backend.npu.captured import CapturedRun, capturing

        self._attend()  # what a first call needs, such as loading the kernel, may not happen in a capture
        with capturing(auto_dispatch_capture=True) as graph:
            outputs = [self._attend() for _ in range(self._calls)]
        return CapturedRun(graph, lambda: outputs, outputs[-1], self._name, self._kv_lengths)


def speed_cases(by_layout: Mapping[str, Ops]) -> Iterator[tuple[str, Case]]:
    """Attention of the same blocks in every timed layout, with the heads of a rank of TP 4: layouts and cases."""
    heads, kv_heads = HEADS // TP, KV_HEADS // TP
    for blocks, num_keys in (*FEW, *MANY):
        # Twice the pages, since the layout with shorter entries counts each of them twice.
        num_pages = 2 * blocks * pages_for(num_keys)
        q, caches = randn(blocks * BLOCK, heads, DIM), randn(2, num_pages, PAGE_SIZE, kv_heads, DIM)
        entries = entries_of([BLOCK] * blocks, [num_keys] * blocks, num_pages)
        expected = CPU.attention(q, caches[0], caches[1], entries)
        for layout in TIMED_LAYOUTS:
            ops, name = by_layout[layout], speed_name(layout, blocks, num_keys)
            k_cache, v_cache = caches.to(ops.device)
            run = ReplayedAttention(ops, q.to(ops.device), k_cache, v_cache, on_device(entries, ops), name)
            yield layout, Case(name, run, expected)


def speed_name(layout: str, blocks: int, num_keys: int) -> str:
    """The name of a speed case."""
    return f"{SPEED} {layout}, {CALLS} calls of {blocks} blocks, {num_keys} keys"
