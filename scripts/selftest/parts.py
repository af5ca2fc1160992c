"""What the parts of a step take in a captured graph, for ``python -m scripts.bench plan --device report.json``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from lopa_ascend.backend.interface import Ops
from lopa_ascend.kv.pages import pages_for
from lopa_ascend.parallel.collectives import CapturedGroup, Group
from scripts.selftest.findings import SIZES, SUMS, median_micros
from scripts.selftest.speed import KV_LENGTHS, RANK_HEADS, TP, replayed_attention
from tests.kernel_cases import BLOCK
from tests.npu.captures import Replayed
from tests.npu.cases import S, attention_sample, randn

BLOCKS = 2
TOKENS = BLOCKS * BLOCK
PRODUCTS = (
    ((S.heads + 2 * S.kv_heads) * S.dim // TP, S.hidden),
    (S.hidden, S.heads * S.dim // TP),
    (2 * S.inner // TP, S.hidden),
    (S.hidden, S.inner // TP),
)
"""(outputs, inputs) of a layer's products."""
LAYERS = 2
"""Their weights together are larger than the cache of a die."""
CALLS = 16
"""Calls of attention, and of a small kernel, in the smaller graph."""


def added_micros(graph: Callable[[int], Replayed], calls: int, repeats: int) -> float:
    """Microseconds of a call in a graph, without what a replay itself costs: those that twice as many more calls add.
    ``graph`` makes one with so many calls."""
    micros = []
    for number in (calls, 3 * calls):
        replay = graph(number)
        replay()
        micros.append(median_micros(replay, repeats))
    return max(0.0, micros[1] - micros[0]) / (2 * calls)


def graph_of(call: Callable[[int], Tensor], calls: int) -> Replayed:
    """A graph of calls, each of which is given its number."""
    return Replayed(lambda _: [call(index) for index in range(calls)], "parts")


def part_times(ops: Ops, repeats: int) -> dict[str, float]:
    """Microseconds of a layer's products, of an attention and of a small kernel on a rank of TP 4 with TOKENS tokens,
    and the bytes that products and attention move."""
    weights = [[ops.stored(randn(*shape).to(ops.device)) for shape in PRODUCTS] for _ in range(LAYERS)]
    inputs = [randn(TOKENS, columns).to(ops.device) for _, columns in PRODUCTS]

    def layer(index: int) -> Tensor:
        return [ops.linear(x, weight) for x, weight in zip(inputs, weights[index % LAYERS], strict=True)][-1]

    num_keys = KV_LENGTHS[0]
    sample = attention_sample([BLOCK] * BLOCKS, [num_keys] * BLOCKS, 2 * BLOCKS * pages_for(num_keys), RANK_HEADS).on(
        ops
    )
    small = torch.zeros(TOKENS, dtype=torch.int32, device=ops.device)

    attention = partial(replayed_attention, ops, sample, "parts")
    return {
        "products_bytes": 2.0 * sum(rows * columns for rows, columns in PRODUCTS),
        "products_us": added_micros(partial(graph_of, layer), LAYERS, repeats),
        "attention_bytes": 4.0 * S.dim * (TOKENS * S.heads + num_keys * S.kv_heads) / TP,
        "attention_us": added_micros(attention, CALLS, repeats),
        "small_us": added_micros(partial(graph_of, lambda _: small + small), CALLS, repeats),
    }


def captured_latencies(group: Group, device: torch.device, repeats: int) -> dict[int, float]:
    """Microseconds of an all-reduce in a replayed graph, by its bytes. Every rank of the group must call it."""
    summing = CapturedGroup(group.rank, group.size, group.process_group)
    found = {}
    for size in SIZES:
        x = torch.zeros(size // 2, dtype=torch.bfloat16, device=device)

        def summed(_: int, x: Tensor = x) -> Tensor:
            return summing.all_reduce(x, "self-test")

        found[size] = added_micros(partial(graph_of, summed), SUMS, repeats)
    return found
