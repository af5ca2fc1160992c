"""Calls of the NPU backend at the shapes of Dream-7B in bfloat16, and what the CPU computes for them: attention, and
what a step computes around the model. ``op_cases.py`` has the other kernels, ``captured_cases.py`` what is captured.
pytest runs them on the laboratory, the self-test on an NPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from lopa_ascend.backend.cpu.ops import CpuOps
from lopa_ascend.backend.interface import Entries, Ops
from lopa_ascend.kv.pages import PAGE_SIZE, pages_for
from lopa_ascend.kv.pool import KVPool
from lopa_ascend.score.merge import merge_scores
from lopa_ascend.score.shards import shard_scores
from lopa_ascend.types import KVShape, Scoring
from tests.kernel_cases import BLOCK, DREAM_7B, Case

S = replace(DREAM_7B, tokens=128)
HEADS = S.heads, S.kv_heads
MASK, EOS = 151666, 151643
"""Of Dream-7B."""
NUM_LAYERS = 28
"""Of Dream-7B."""
CPU = CpuOps()
LARGE = 2**31
"""Elements of a pool that int32 cannot number."""
SHARE_FOR_POOL = 0.25
"""The most of the free memory that a large pool may take."""
CAPTURED = "captured"
"""Beginning of the names of the cases that only graph modes need."""
QWEN3 = "Qwen3"
"""Beginning of the name of the case that only SDAR and DreamReasoner need."""
INT8, EXPERTS = "W8A8", "experts"
"""Beginnings of the names of the cases that only these need."""
ASKED = "attention, pool smaller than the entries' pages, at once"
"""Name of ``asked_case``."""


def randn(*shape: int, scale: float = 1.0) -> Tensor:
    """Random values of mean 0, bfloat16."""
    return (torch.randn(shape) * scale).bfloat16()


# ---- attention -----------------------------------------------------------------------------------------------------


def paged_entries(
    lengths: Sequence[int], kv_lengths: Sequence[int], num_pages: int | None = None, width: int | None = None
) -> tuple[Entries, int]:
    """Attention entries of so many queries that see so many positions, each of a sequence of its own, and the number of
    pages that they are taken of at random: by default as many as the entries need together. Page tables have ``width``
    pages, or as many as the longest entry needs."""
    needed = [pages_for(length) for length in kv_lengths]
    num_pages, width = num_pages or sum(needed), width or max(needed)
    tables = torch.stack([torch.randperm(num_pages)[:width] for _ in lengths]).int()
    sequences, prefixes = tuple(range(len(needed))), (0,) * len(needed)
    return Entries(tuple(lengths), tuple(kv_lengths), tables, sequences, prefixes), num_pages


@dataclass(frozen=True)
class AttentionSample:
    """Random queries, keys and values."""

    q: Tensor
    """[queries, H, D]."""
    caches: Tensor
    """Keys and values [2, pages, PAGE_SIZE, K, D]."""
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
    lengths: Sequence[int],
    kv_lengths: Sequence[int],
    num_pages: int | None = None,
    heads: tuple[int, int] = HEADS,
    dim: int = S.dim,
    dtype: torch.dtype = torch.bfloat16,
) -> AttentionSample:
    """A sample with so many query heads and KV heads; the others as for ``paged_entries``."""
    entries, num_pages = paged_entries(lengths, kv_lengths, num_pages)
    q, caches = torch.randn(sum(lengths), heads[0], dim), torch.randn(2, num_pages, PAGE_SIZE, heads[1], dim)
    return AttentionSample(q.to(dtype), caches.to(dtype), entries)


BLOCKS = [BLOCK] * 8, [160, 192, 224, 256, 512, 545, 577, 640]
SMALL_POOL = 9
"""Pages of a pool that has fewer pages than these entries together."""
ATTENTION: dict[str, tuple[list[int], list[int], int]] = {
    "32 queries each": (*BLOCKS, 40),
    "a prompt, blocks, one query": ([150, BLOCK, BLOCK, 1], [150, 545, 33, 300], 20),
    "pool smaller than the entries' pages": (*BLOCKS, SMALL_POOL),
}
"""By name of a case: queries of each entry, positions that each entry sees, and pages of the pool."""


def attention_cases(ops: Ops, layout: str) -> Iterator[Case]:
    """Attention in one layout, as the engine calls it."""
    for name, arguments in ATTENTION.items():
        sample = attention_sample(*arguments)
        yield Case(f"attention {layout}, {name}", partial(sample.on(ops).attend, ops), partial(sample.attend, CPU))


def asked_case(ops: Ops) -> Case:
    """Asks whether the kernel minds entries that together have more pages than the pool. NpuOps avoids such calls by
    further launches, so the engine does not depend on the answer."""
    from lopa_ascend.backend.npu.ops import NpuOps, attend

    assert isinstance(ops, NpuOps)
    sample = attention_sample(*BLOCKS, SMALL_POOL)
    there = sample.on(ops)
    (k_cache, v_cache), entries = there.caches, there.entries
    lengths = entries.lengths, entries.kv_lengths
    run = partial(attend, ops.kernel_layout, there.q, k_cache, v_cache, *lengths, entries.page_tables)
    return Case(ASKED, run, partial(sample.attend, CPU))


# ---- around the model ----------------------------------------------------------------------------------------------


def step_cases(ops: Ops) -> Iterator[Case]:
    """What a step computes around the model in every graph mode."""
    yield copy_case(ops)
    yield score_case(ops)
    yield from large_pool_cases(ops)


def copy_case(ops: Ops) -> Case:
    """The copy of a winner's keys and values from its slot's pages to those of another slot."""
    values = randn(2, 2, 4, PAGE_SIZE, S.kv_heads, S.dim)

    def pool_on(device: torch.device) -> KVPool:
        pool = KVPool(KVShape(num_layers=2, num_kv_heads=S.kv_heads, head_dim=S.dim), 4, values.dtype, str(device))
        pool.caches.copy_(values)
        return pool

    def copied(pool: KVPool) -> Tensor:
        pool.copy([0, 1], [2, 3], PAGE_SIZE - BLOCK, PAGE_SIZE + BLOCK // 2)  # parts of two pages
        return pool.caches

    return Case("copy between pages", partial(copied, pool_on(ops.device)), partial(copied, pool_on(CPU.device)))


def score_case(ops: Ops) -> Case:
    """The predictions of an eager step: the probabilities of the most probable tokens, and the logits of these.

    Their ids are not compared: between equal logits a device may choose another one.
    """
    logits, positions = randn(BLOCK, S.vocabulary), torch.arange(BLOCK)
    scoring = Scoring("max_prob", MASK, S.vocabulary)

    def predicted(logits: Tensor, positions: Tensor) -> list[Tensor]:
        stats = shard_scores(logits, scoring, positions, round_=0)
        ids, probs, _ = merge_scores(stats[None], scoring, positions, round_=0)
        return [probs, logits.gather(1, ids[:, None])]

    run = partial(predicted, logits.to(ops.device), positions.to(ops.device))
    return Case("predictions", run, partial(predicted, logits, positions))


def large_pool_cases(ops: Ops) -> Iterator[Case]:
    """The last pages of a pool that is larger than int32 can number, as the engine's are: a write of keys and values in
    the last layer, and a copy in all layers. No case where the pool would take too much of the free memory."""
    shape = KVShape(num_layers=NUM_LAYERS, num_kv_heads=S.kv_heads, head_dim=S.dim)
    page_bytes = KVPool.page_bytes(shape, torch.bfloat16)
    num_pages = LARGE // (page_bytes // 2) + 3
    if num_pages * page_bytes > SHARE_FOR_POOL * torch.get_device_module("npu").mem_get_info()[0]:
        return
    values = randn(2, NUM_LAYERS, PAGE_SIZE, S.kv_heads, S.dim)
    npu_values, slot_mapping = values.to(ops.device), torch.arange(PAGE_SIZE, device=ops.device)

    def run() -> Tensor:
        pool, source = KVPool(shape, num_pages, torch.bfloat16, str(ops.device)), num_pages - 2
        pool.caches[:, :-1, source] = npu_values[:, :-1]
        k, v = npu_values[:, -1]
        ops.kv_write(k, v, pool.k[-1], pool.v[-1], slot_mapping + source * PAGE_SIZE)
        pool.copy([source], [source + 1], 0, PAGE_SIZE)
        return pool.caches[:, :, source + 1]

    yield Case("last pages of a large pool", run, lambda: values, timed=False)
