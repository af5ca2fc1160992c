"""The cases of the self-test: every op at the shapes of Dream-7B in bfloat16, and what the CPU computes for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from lopa_ascend.backend.cpu.ops import CpuOps
from lopa_ascend.backend.interface import Entries, Ops
from lopa_ascend.kv.pages import PAGE_SIZE, pages_for

# Dream-7B.
HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, DIM, EPS = 3584, 18944, 28, 4, 128, 1e-6
QKV_ROWS = (HEADS + 2 * KV_HEADS) * DIM
ROPE_THETA = 1e6
BLOCK = 32
"""Queries of a block."""
TOKENS = 128
"""Tokens of a step."""
CAPTURED = "captured"
"""Beginning of the names of the cases that only graph modes need."""
QWEN3 = "Qwen3"
"""Beginning of the name of the case that only SDAR and DreamReasoner need."""
INT8, EXPERTS = "W8A8", "experts"
"""Beginnings of the names of the cases that only these need."""
ASKED = "attention, pool smaller than the entries' pages, at once"
"""Name of ``asked_case``."""
ASKED_SUMS = "all-reduces on the vector cores alone"
"""Name of the question whether a communicator may keep large sums there, too."""
CPU = CpuOps()


@dataclass(frozen=True)
class Case:
    """One computation on the device, with its result on the CPU."""

    name: str
    run: Callable[[], Tensor | Sequence[Tensor]]
    """Computes a tensor on the device, or several."""
    expected: Tensor | Sequence[Tensor]
    """What ``run`` must return; within rounding, unless it is ``exact``."""
    timed: bool = True
    """Whether ``run`` may be called again and timed."""
    exact: bool = False
    """Whether no value may differ at all."""


def randn(*shape: int, scale: float = 1.0) -> Tensor:
    """Random values of mean 0, bfloat16."""
    return (torch.randn(shape) * scale).bfloat16()


def rope_tables(ops: Ops) -> tuple[Tensor, Tensor]:
    """The tables of ``ops.rope`` for TOKENS positions, for each head of q, k and v, as Dream has them: v is not
    rotated."""
    angles = torch.outer(torch.arange(TOKENS) * 17.0, ROPE_THETA ** -(torch.arange(0, DIM, 2) / DIM))
    is_rotated = (torch.arange(HEADS + 2 * KV_HEADS) < HEADS + KV_HEADS)[:, None].to(ops.device)
    cos, sin = ops.rope_tables(angles.cos().to(ops.device), angles.sin().to(ops.device), torch.bfloat16)
    return torch.where(is_rotated, cos, torch.ones_like(cos)), torch.where(is_rotated, sin, torch.zeros_like(sin))


def entries_of(lengths: Sequence[int], kv_lengths: Sequence[int], num_pages: int, width: int | None = None) -> Entries:
    """Attention entries of so many queries that see so many positions, each of a sequence of its own with random pages
    of a pool. Page tables have ``width`` pages, or as many as the longest entry needs."""
    width = width or pages_for(max(kv_lengths))
    page_tables = torch.stack([torch.randperm(num_pages)[:width] for _ in lengths]).int()
    return Entries(tuple(lengths), tuple(kv_lengths), page_tables, tuple(range(len(lengths))), (0,) * len(lengths))


@dataclass(frozen=True)
class AttentionSample:
    """Random queries, keys and values."""

    q: Tensor
    """[queries, heads, DIM]."""
    caches: Tensor
    """Keys and values [2, pages, PAGE_SIZE, KV heads, DIM]."""
    entries: Entries

    def on(self, ops: Ops) -> AttentionSample:
        """The same on the device of ``ops``, with entries as these take them."""
        entries = self.entries.divided(ops.max_queries)
        entries = replace(entries, page_tables=entries.page_tables.to(ops.device))
        return AttentionSample(self.q.to(ops.device), self.caches.to(ops.device), entries)

    def attend(self, ops: Ops) -> Tensor:
        """Attention on the device where the sample is."""
        return ops.attention(self.q, self.caches[0], self.caches[1], self.entries)


def attention_sample(
    lengths: Sequence[int], kv_lengths: Sequence[int], num_pages: int, ranks: int = 1
) -> AttentionSample:
    """A sample with the heads of one of so many tensor parallel ranks; the others as for ``entries_of``."""
    q = randn(sum(lengths), HEADS // ranks, DIM)
    caches = randn(2, num_pages, PAGE_SIZE, KV_HEADS // ranks, DIM)
    return AttentionSample(q, caches, entries_of(lengths, kv_lengths, num_pages))


BLOCK_LENGTHS = [BLOCK] * 8
BLOCK_KV_LENGTHS = [160, 192, 224, 256, 512, 545, 577, 640]
SMALL_POOL = 9
"""Pages of a pool that has fewer pages than these entries together."""
ATTENTION: dict[str, tuple[list[int], list[int], int]] = {
    "32 queries each": (BLOCK_LENGTHS, BLOCK_KV_LENGTHS, 40),
    "a prompt, blocks, one query": ([150, BLOCK, BLOCK, 1], [150, 545, 33, 300], 20),
    "pool smaller than the entries' pages": (BLOCK_LENGTHS, BLOCK_KV_LENGTHS, SMALL_POOL),
}
"""By name of a case: queries of each entry, positions that each entry sees, and pages of the pool."""


def attention_cases(ops: Ops, layout: str) -> Iterator[Case]:
    """Attention in one layout, as the engine calls it."""
    for name, arguments in ATTENTION.items():
        sample = attention_sample(*arguments)
        yield Case(f"attention {layout}, {name}", partial(sample.on(ops).attend, ops), sample.attend(CPU))


def asked_case(ops: Ops) -> Case:
    """Asks whether the kernel minds entries that together have more pages than the pool. NpuOps avoids such calls by
    further launches, so the engine does not depend on the answer."""
    from lopa_ascend.backend.npu.ops import NpuOps, attend

    assert isinstance(ops, NpuOps)
    sample = attention_sample(BLOCK_LENGTHS, BLOCK_KV_LENGTHS, SMALL_POOL)
    there = sample.on(ops)
    (k_cache, v_cache), entries = there.caches, there.entries
    lengths = entries.lengths, entries.kv_lengths
    run = partial(attend, ops.kernel_layout, there.q, k_cache, v_cache, *lengths, entries.page_tables)
    return Case(ASKED, run, sample.attend(CPU))
