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
    """The tables of ``ops.rope`` for TOKENS positions, in the form that the device wants."""
    frequencies = ROPE_THETA ** -(torch.arange(0, DIM, 2) / DIM)
    angles = torch.outer(torch.arange(TOKENS) * 17.0, frequencies)
    return ops.rope_tables(angles.cos().to(ops.device), angles.sin().to(ops.device), torch.bfloat16)


def rope_tables_by_head(ops: Ops) -> tuple[Tensor, Tensor]:
    """The same tables with a row for each head of q, k and v, as Dream has them: v is not rotated."""
    is_rotated = (torch.arange(HEADS + 2 * KV_HEADS) < HEADS + KV_HEADS)[:, None].to(ops.device)
    cos, sin = rope_tables(ops)
    return torch.where(is_rotated, cos, torch.ones_like(cos)), torch.where(is_rotated, sin, torch.zeros_like(sin))


def entries_of(lengths: Sequence[int], kv_lengths: Sequence[int], num_pages: int, width: int | None = None) -> Entries:
    """Attention entries over random pages, each of a sequence of its own.

    Args:
        lengths: queries of each entry.
        kv_lengths: positions that each entry sees.
        num_pages: pages of the pool.
        width: pages of each page table; None for as many as the longest entry needs.
    """
    width = width or pages_for(max(kv_lengths))
    page_tables = torch.stack([torch.randperm(num_pages)[:width] for _ in lengths]).int()
    return Entries(tuple(lengths), tuple(kv_lengths), page_tables, tuple(range(len(lengths))), (0,) * len(lengths))


def on_device(entries: Entries, ops: Ops) -> Entries:
    """The entries as ``ops`` take them, with their page tables on its device."""
    entries = entries.divided(ops.max_queries)
    return replace(entries, page_tables=entries.page_tables.to(ops.device))


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
    for name, (lengths, kv_lengths, num_pages) in ATTENTION.items():
        q, caches = randn(sum(lengths), HEADS, DIM), randn(2, num_pages, PAGE_SIZE, KV_HEADS, DIM)
        entries = entries_of(lengths, kv_lengths, num_pages)
        k_cache, v_cache = caches.to(ops.device)
        run = partial(ops.attention, q.to(ops.device), k_cache, v_cache, on_device(entries, ops))
        yield Case(f"attention {layout}, {name}", run, CPU.attention(q, caches[0], caches[1], entries))


def asked_case(ops: Ops) -> Case:
    """Asks whether the kernel minds entries that together have more pages than the pool.

    NpuOps avoids such calls by further launches when the pool is nearly full, so the engine does not depend on the
    answer.
    """
    from lopa_ascend.backend.npu.ops import NpuOps, attend

    assert isinstance(ops, NpuOps)
    q, caches = randn(sum(BLOCK_LENGTHS), HEADS, DIM), randn(2, SMALL_POOL, PAGE_SIZE, KV_HEADS, DIM)
    entries = entries_of(BLOCK_LENGTHS, BLOCK_KV_LENGTHS, SMALL_POOL)
    k_cache, v_cache = caches.to(ops.device)
    given = on_device(entries, ops)
    lengths = given.lengths, given.kv_lengths
    run = partial(attend, ops.kernel_layout, q.to(ops.device), k_cache, v_cache, *lengths, given.page_tables)
    return Case(ASKED, run, CPU.attention(q, caches[0], caches[1], entries))
