"""A decoder layer up to attention, captured as the engine captures a step, and replayed with other inputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lopa_ascend.backend.interface import Entries, Ops
from lopa_ascend.kv.pages import PAGE_SIZE, pages_for
from scripts.selftest.captures import Step, capture_lengths, replayed_case
from scripts.selftest.cases import (
    BLOCK,
    CAPTURED,
    DIM,
    EPS,
    HEADS,
    HIDDEN,
    KV_HEADS,
    QKV_ROWS,
    TOKENS,
    Case,
    entries_of,
    randn,
    rope_tables,
)

NUM_BLOCKS = TOKENS // BLOCK
"""Attention entries of a step, before they are divided."""
OTHER_LENGTHS = [513, 521, 529, 537]
LONG_LENGTHS = [545, 1100, 2050, 4500]
"""Beyond 1,024 keys, from which on a kernel may split them among cores, and beyond 4,096."""


class Layer:
    """The part of a decoder layer up to attention, with weights as ``layer_weights`` makes them."""

    def __init__(self, ops: Ops, norm: Tensor, qkv: Tensor, bias: Tensor):
        self.ops = ops
        self.norm, self.bias = norm.to(ops.device), bias.to(ops.device)
        self.qkv = ops.stored(qkv.to(ops.device))
        self.tables = rope_tables(ops)

    def __call__(self, kv_lengths: Sequence[int], inputs: Sequence[Tensor], caches: Tensor, entries: Entries) -> Tensor:
        """Attention of what ``random_layer_inputs`` gives, with these KV lengths in place of the entries'."""
        x, slot_mapping, page_tables = inputs
        entries = replace(entries, kv_lengths=tuple(kv_lengths), page_tables=page_tables)
        qkv = self.ops.linear(self.ops.rms_norm(x, self.norm, EPS), self.qkv, self.bias)
        q, k, v = self.ops.rope(qkv.view(TOKENS, -1, DIM), *self.tables).split([HEADS, KV_HEADS, KV_HEADS], 1)
        self.ops.kv_write(k, v, caches[0], caches[1], slot_mapping)
        return self.ops.attention(q, caches[0], caches[1], entries)


def layer_weights() -> tuple[Tensor, Tensor, Tensor]:
    """Of the norm [HIDDEN] and of the product for q, k and v [QKV_ROWS, HIDDEN], and its bias [QKV_ROWS]."""
    return randn(HIDDEN), randn(QKV_ROWS, HIDDEN, scale=HIDDEN**-0.5), randn(QKV_ROWS)


def random_layer_inputs(
    kv_lengths: Sequence[int] | None, width: int, num_pages: int, max_queries: int | None
) -> tuple[Entries, list[Tensor]]:
    """Attention entries with page tables of ``width`` pages, and what a layer reads: hidden states [TOKENS, HIDDEN],
    the cache position of each token, and the page tables. Without KV lengths of the blocks, those of a capture."""
    entries = entries_of([BLOCK] * NUM_BLOCKS, kv_lengths or [1] * NUM_BLOCKS, num_pages, width).divided(max_queries)
    if kv_lengths is None:
        entries = replace(entries, kv_lengths=tuple(capture_lengths(len(entries.lengths))))
    slot_mapping = torch.randperm(num_pages * PAGE_SIZE)[:TOKENS]
    return entries, [randn(TOKENS, HIDDEN), slot_mapping, entries.page_tables]


def captured_cases(ops: Ops) -> Iterator[Case]:
    """Layers that are replayed twice. Lengths that stay as they were are not given to the kernel again: it must have
    kept them, whether it got them in the capture or since then."""
    name = f"{CAPTURED} layer, replayed with"
    yield captured_case(ops, f"{name} other KV lengths", [OTHER_LENGTHS] * 2)
    yield captured_case(ops, f"{name} KV lengths that a thread changes", [OTHER_LENGTHS] * 2, in_thread=True)
    yield captured_case(ops, f"{name} the KV lengths of the capture", [None] * 2)
    yield captured_case(ops, f"{name} up to {max(LONG_LENGTHS)} keys", [LONG_LENGTHS] * 2)
    partly_changed = [*OTHER_LENGTHS[:2], *(length + BLOCK for length in OTHER_LENGTHS[2:])]
    yield captured_case(ops, f"{CAPTURED} layer of two attention kernels", [OTHER_LENGTHS, partly_changed], 2)


def captured_case(
    ops: Ops, name: str, replays: Sequence[list[int] | None], num_kernels: int = 1, in_thread: bool = False
) -> Case:
    """A layer that is captured and replayed as the engine does it, with its cache.

    Args:
        replays: the KV lengths of each block in each replay; None for those of the capture.
        num_kernels: launches of the attention kernel. The cache has no more pages than these need.
    """
    width = 1 + max(pages_for(max(kv_lengths or [1])) for kv_lengths in replays)  # wider than needed, as the engine's
    num_entries = len(random_layer_inputs(None, 1, 1, ops.max_queries)[0].lengths)
    num_pages = width * num_entries // num_kernels
    weights, filled = layer_weights(), randn(2, num_pages, PAGE_SIZE, KV_HEADS, DIM)
    given = [random_layer_inputs(kv_lengths, width, num_pages, ops.max_queries) for kv_lengths in (None, *replays)]
    entries = given[0][0]

    def layer_with_cache(there: Ops) -> Step:
        layer, caches = Layer(there, *weights), filled.to(there.device, copy=True)
        return lambda kv_lengths, *tensors: [layer(kv_lengths, tensors, caches, entries), caches]

    inputs, lengths = [tensors for _, tensors in given], [of_each.kv_lengths for of_each, _ in given]
    return replayed_case(ops, name, layer_with_cache, inputs, lengths, in_thread=in_thread)
