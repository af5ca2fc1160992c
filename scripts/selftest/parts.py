"""What the parts of a step take in a captured graph, for ``python -m scripts.bench plan --device report.json``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from lopa_ascend.backend.interface import Ops
from lopa_ascend.kv.pages import PAGE_SIZE, pages_for
from lopa_ascend.parallel.collectives import CapturedGroup, Group
from scripts.selftest.cases import BLOCK, DIM, HEADS, HIDDEN, INTERMEDIATE, KV_HEADS, entries_of, on_device, randn
from scripts.selftest.findings import SIZES, SUMS, median_micros
from scripts.selftest.speed import KV_LENGTHS, TP, ReplayedAttention

BLOCKS = 2
TOKENS = BLOCKS * BLOCK
PRODUCTS = (
    ((HEADS + 2 * KV_HEADS) * DIM // TP, HIDDEN),
    (HIDDEN, HEADS * DIM // TP),
    (2 * INTERMEDIATE // TP, HIDDEN),
    (HIDDEN, INTERMEDIATE // TP),
)
"""(outputs, inputs) of a layer's products."""
LAYERS = 2
"""Their weights together are larger than the cache of a die."""
CALLS = 16
"""Calls of attention, and of a small kernel, in the smaller graph."""


def added_micros(timed: Callable[[int], float], calls: int) -> float:
    """Microseconds of a call in a graph, without what a replay itself costs: those that twice as many more calls add.

    Args:
        timed: microseconds of a replay with so many calls.
    """
    return max(0.0, timed(3 * calls) - timed(calls)) / (2 * calls)


def replayed_micros(call: Callable[[int], object], repeats: int, number: int) -> float:
    """Median microseconds of a replay of a captured graph.

    Args:
        call: is given its number.
        repeats: timed replays.
        number: of calls in the graph.
    """
    from lopa_ascend.backend.npu.captured import capturing

    call(0)  # what a first call needs, such as connecting ranks, may not happen in a capture
    with torch.no_grad(), capturing() as graph:
        results = [call(index) for index in range(number)]
    graph.replay()
    micros = median_micros(graph.replay, repeats)
    del results  # the memory that the graph writes
    return micros


def part_times(ops: Ops, repeats: int) -> dict[str, float]:
    """Microseconds of a layer's products, of an attention and of a small kernel on a rank of TP 4 with TOKENS tokens,
    and the bytes that products and attention move."""
    heads, kv_heads = HEADS // TP, KV_HEADS // TP
    weights = [[ops.stored(randn(*shape).to(ops.device)) for shape in PRODUCTS] for _ in range(LAYERS)]
    inputs = [randn(TOKENS, columns).to(ops.device) for _, columns in PRODUCTS]

    def layer(index: int) -> object:
        return [ops.linear(x, weight) for x, weight in zip(inputs, weights[index % LAYERS], strict=True)]

    num_keys = KV_LENGTHS[0]
    num_pages = 2 * BLOCKS * pages_for(num_keys)
    entries = on_device(entries_of([BLOCK] * BLOCKS, [num_keys] * BLOCKS, num_pages), ops)
    k_cache, v_cache = randn(2, num_pages, PAGE_SIZE, kv_heads, DIM).to(ops.device)
    q, small = randn(TOKENS, heads, DIM).to(ops.device), torch.zeros(TOKENS, dtype=torch.int32, device=ops.device)

    def attention(calls: int) -> float:
        run = ReplayedAttention(ops, q, k_cache, v_cache, entries, "parts", calls)
        run()
        return median_micros(run, repeats)

    return {
        "products_bytes": 2.0 * sum(rows * columns for rows, columns in PRODUCTS),
        "products_us": added_micros(partial(replayed_micros, layer, repeats), LAYERS),
        "attention_bytes": 2.0 * DIM * (2 * TOKENS * heads + 2 * num_keys * kv_heads),
        "attention_us": added_micros(attention, CALLS),
        "small_us": added_micros(partial(replayed_micros, lambda _: small + small, repeats), CALLS),
    }


def captured_latencies(group: Group, device: torch.device, repeats: int) -> dict[int, float]:
    """Microseconds of an all-reduce in a replayed graph, by its bytes. Every rank of the group must call it."""
    summing = CapturedGroup(group.rank, group.size, group.process_group)
    found = {}
    for size in SIZES:
        x = torch.zeros(size // 2, dtype=torch.bfloat16, device=device)

        def summed(_: int, x: Tensor = x) -> Tensor:
            return summing.all_reduce(x, "self-test")

        found[size] = added_micros(partial(replayed_micros, summed, repeats), SUMS)
    return found
