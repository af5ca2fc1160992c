"""A decoder layer up to attention, captured as the engine captures a step, and replayed with other inputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lopa_ascend.backend.interface import Entries, Ops
from lopa_ascend.kv.pages import PAGE_SIZE, pages_for
from scripts.selftest.captures import Captures, capture_lengths
from scripts.selftest.cases import (
    BLOCK,
    CAPTURED,
    CPU,
    DIM,
    EPS,
    HEADS,
    HIDDEN,
    KV_HEADS,
    QKV_ROWS,
    TOKENS,
    Case,
    entries_of,
    on_device,
    randn,
    rope_tables_by_head,
)

NUM_BLOCKS = TOKENS // BLOCK
"""Attention entries of a step, before they are divided."""
OTHER_LENGTHS = [513, 521, 529, 537]
LONG_LENGTHS = [545, 1100, 2050, 4500]
"""Beyond 1,024 keys, from which on a kernel may split them among cores, and beyond 4,096."""


class Layer:
    """The part of a decoder layer up to attention.

    Args:
        ops: the device's.
        norm: weight of the norm [HIDDEN].
        qkv: weight of the product for q, k and v [QKV_ROWS, HIDDEN].
        bias: of the same product [QKV_ROWS].
    """

    def __init__(self, ops: Ops, norm: Tensor, qkv: Tensor, bias: Tensor):
        self.ops = ops
        self.norm, self.bias = norm.to(ops.device), bias.to(ops.device)
        self.qkv = ops.stored(qkv.to(ops.device))
        self.tables = rope_tables_by_head(ops)

    def __call__(self, x: Tensor, caches: Tensor, slot_mapping: Tensor, entries: Entries) -> Tensor:
        qkv = self.ops.linear(self.ops.rms_norm(x, self.norm, EPS), self.qkv, self.bias)
        q, k, v = self.ops.rope(qkv.view(TOKENS, -1, DIM), *self.tables).split([HEADS, KV_HEADS, KV_HEADS], 1)
        self.ops.kv_write(k, v, caches[0], caches[1], slot_mapping)
        return self.ops.attention(q, caches[0], caches[1], entries)


def layer_weights() -> tuple[Tensor, Tensor, Tensor]:
    """Random weights of a ``Layer``."""
    return randn(HIDDEN), randn(QKV_ROWS, HIDDEN, scale=HIDDEN**-0.5), randn(QKV_ROWS)


@dataclass(frozen=True)
class LayerInputs:
    """The inputs of one run of a layer."""

    x: Tensor
    """Hidden states [TOKENS, HIDDEN]."""
    slot_mapping: Tensor
    """Cache position of each token [TOKENS]."""
    entries: Entries

    def on(self, ops: Ops) -> LayerInputs:
        """The same on a device."""
        return LayerInputs(self.x.to(ops.device), self.slot_mapping.to(ops.device), on_device(self.entries, ops))

    def copy_from(self, other: LayerInputs) -> None:
        """Puts the tensors of other inputs into the memory of these, whose KV lengths stay."""
        self.x.copy_(other.x)
        self.slot_mapping.copy_(other.slot_mapping)
        self.entries.page_tables.copy_(other.entries.page_tables)


def random_layer_inputs(
    kv_lengths: Sequence[int] | None, width: int, num_pages: int, max_queries: int | None
) -> LayerInputs:
    """Random inputs, with page tables of ``width`` pages.

    Args:
        kv_lengths: of each block; None for those of a capture.
        num_pages: pages of the cache.
        max_queries: see ``Ops.max_queries``.
    """
    entries = entries_of([BLOCK] * NUM_BLOCKS, kv_lengths or [1] * NUM_BLOCKS, num_pages, width).divided(max_queries)
    if kv_lengths is None:
        entries = replace(entries, kv_lengths=tuple(capture_lengths(len(entries.lengths))))
    return LayerInputs(randn(TOKENS, HIDDEN), torch.randperm(num_pages * PAGE_SIZE)[:TOKENS], entries)


def captured_cases(ops: Ops) -> Iterator[Case]:
    """Layers that are replayed twice.

    Lengths that stay as they were are not given to the kernel again: it must have kept them, whether it got them in the
    capture or since then.
    """
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
    """A layer that is captured and replayed as the engine does it.

    The host does not wait between the replays, whose inputs differ.

    Args:
        replays: the KV lengths of each block in each replay; None for those of the capture.
        num_kernels: launches of the attention kernel. The cache has no more pages than these need.
        in_thread: whether a thread gives replays their KV lengths.
    """
    width = 1 + max(pages_for(max(kv_lengths or [1])) for kv_lengths in replays)  # wider than needed, as the engine's
    num_entries = len(random_layer_inputs(None, 1, 1, ops.max_queries).entries.lengths)
    num_pages = width * num_entries // num_kernels
    weights, caches = layer_weights(), randn(2, num_pages, PAGE_SIZE, KV_HEADS, DIM)
    inputs = [random_layer_inputs(kv_lengths, width, num_pages, ops.max_queries) for kv_lengths in (None, *replays)]
    npu_inputs, npu_caches = [given.on(ops) for given in inputs], caches.to(ops.device)
    layer, (current, *later) = Layer(ops, *weights), npu_inputs

    def step(kv_lengths: Sequence[int]) -> list[Tensor]:
        entries = replace(current.entries, kv_lengths=tuple(kv_lengths))
        return [layer(current.x, npu_caches, current.slot_mapping, entries)]

    def run() -> list[Tensor]:
        replay, outputs = Captures().capture(step, name, num_entries, in_thread), []
        for given in later:
            current.copy_from(given)
            outputs += replay(given.entries.kv_lengths)
        return [*outputs, npu_caches]

    cpu_layer = Layer(CPU, *weights)
    _, *expected = [cpu_layer(given.x, caches, given.slot_mapping, given.entries) for given in inputs]
    return Case(name, run, [*expected, caches], timed=False)
