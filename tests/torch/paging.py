"""Attention entries over pages for tests, where everything that an entry must not see is NaN."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from lopa_ascend.backend.interface import Entries
from lopa_ascend.kv.pages import PAGE_SIZE


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def paged_step(
    shapes: Sequence[tuple[int, int, int]], prefixes: tuple[int, ...], kv_heads: int, dim: int, dtype: torch.dtype
) -> tuple[Entries, Tensor, Tensor]:
    """Entries with random keys and values.

    The entries of a sequence share the pages that its prefix fills, and have other pages of their own. Positions that
    an entry does not see are NaN, and so is the last page, which fills up the page tables of short entries.

    Args:
        shapes: (index of the sequence, number of queries, number of keys after the prefix) of each entry.
        prefixes: the prefix of each sequence.
        kv_heads: KV heads K.
        dim: head dimension D.
        dtype: dtype of the caches.

    Returns:
        The entries, the cache of the keys and that of the values, [N, 128, K, D].
    """
    caches = torch.empty((2, 0, PAGE_SIZE, kv_heads, dim), dtype=dtype)
    tables: list[list[int]] = []
    shared: dict[int, list[int]] = {}
    for index, (sequence, _, own) in enumerate(shapes):
        prefix = prefixes[sequence]
        content = torch.full((2, -(-(prefix + own) // PAGE_SIZE) * PAGE_SIZE, kv_heads, dim), torch.nan)
        content[:, :prefix] = randn(2, prefix, kv_heads, dim, seed=1000 + sequence)
        content[:, prefix : prefix + own] = randn(2, own, kv_heads, dim, seed=2000 + index)
        pages = content.view(2, -1, PAGE_SIZE, kv_heads, dim).to(dtype)
        table = list(shared.get(sequence, []))
        new_pages = pages[:, len(table) :]
        table += range(caches.shape[1], caches.shape[1] + new_pages.shape[1])
        caches = torch.cat([caches, new_pages], 1)
        shared[sequence] = table[: prefix // PAGE_SIZE]
        tables.append(table)
    padding_page, width = caches.shape[1], max(map(len, tables))
    caches = torch.cat([caches, torch.full_like(caches[:, :1], torch.nan)], 1)
    padded = [table + [padding_page] * (width - len(table)) for table in tables]
    page_tables = torch.tensor(padded, dtype=torch.int32)
    sequences, lengths = tuple(shape[0] for shape in shapes), tuple(shape[1] for shape in shapes)
    kv_lengths = tuple(prefixes[sequence] + own for sequence, _, own in shapes)
    return Entries(lengths, kv_lengths, page_tables, sequences, prefixes), caches[0], caches[1]


def causal_pieces(begin: int, end: int, cuts: Sequence[int], table: Tensor) -> Entries:
    """The positions [begin, end) of one sequence as causal entries, cut at the pages' ends and at ``cuts``."""
    pages = range(begin // PAGE_SIZE * PAGE_SIZE, end, PAGE_SIZE)
    ends = sorted({begin, end, *(cut for cut in (*cuts, *pages) if begin < cut < end)})
    spans = list(pairwise(ends))
    prefixes = tuple(first // PAGE_SIZE * PAGE_SIZE for first, _ in spans)
    return Entries(
        lengths=tuple(last - first for first, last in spans),
        kv_lengths=tuple(last for _, last in spans),
        page_tables=table.expand(len(spans), -1),
        prefix_groups=tuple(range(len(spans))),
        prefixes=prefixes,
        causal=(True,) * len(spans),
    )
