"""Collectives between the ranks in captured graphs: alone, and beside attention as the engine captures a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lopa_ascend.backend.interface import Ops
from lopa_ascend.kv.pages import PAGE_SIZE, pages_for
from lopa_ascend.parallel.collectives import ALONE, CapturedGroup, Group
from lopa_ascend.score.greedy import GreedyScore
from lopa_ascend.score.prediction import float_bits
from tests.kernel_cases import BLOCK, Case
from tests.npu.captured_cases import (
    NUM_BLOCKS,
    OTHER_LENGTHS,
    Layer,
    layer_inputs,
    layer_weights,
    logits_of,
)
from tests.npu.captures import Replayed, Step, graph_memory, replayed_case
from tests.npu.cases import CAPTURED, MASK, S, randn

EXCHANGES = f"{CAPTURED} attention between collectives, as in a step"
"""Name of ``exchanges_case``."""
NUM_LAYERS = 2
MORE_LENGTHS = [545, 553, 600, 640]
REPLAYED = ((0, OTHER_LENGTHS), (1, OTHER_LENGTHS), (0, MORE_LENGTHS))
"""The graph and the KV lengths of each replay. Both graphs share their memory."""
PAGE_TABLE_WIDTH = pages_for(max(MORE_LENGTHS))
NUM_PAGES = 2 * NUM_BLOCKS * PAGE_TABLE_WIDTH
"""Pages of the cache; one attention kernel is enough then in every layout, which the ranks choose each for itself."""
SEED = 1
"""Of weights and inputs, which must be the same on all ranks, whatever each of them has tried before."""
NUM_GRAPHS = 15
"""Graphs that an engine of TP 4 x BP 4 has by default, at most."""
REPLAYS = 3
"""Of each of these graphs."""


class Alike(Group):
    """Stands for ranks whose parts of a step can be made of this one's."""

    def all_reduce(self, x: Tensor, purpose: str) -> Tensor:
        return x * sum(2.0**-rank for rank in range(self.size))

    def all_gather(self, x: Tensor, purpose: str) -> Tensor:
        return torch.stack([x.roll(rank - self.rank, -1) for rank in range(self.size)])


def captured_group(group: Group) -> CapturedGroup:
    return CapturedGroup(group.rank, group.size, group.process_group)


def exchanges_case(ops: Ops, tp: Group, bp: Group, on_all: Callable[[Callable[[], Any]], Any]) -> Case:
    """Two graphs of a rank's part of a step, replayed in turn with other inputs: after each layer's attention a sum
    over the tensor parallel ranks; scores, for which these ranks exchange what they found in their parts of the
    vocabulary; and the predictions of all branch parallel ranks. Every rank must run the case.

    So that no two ranks send the same, rank r of a tensor parallel group has its attention times 2 ** -r, and rank r of
    a branch parallel group has its logits shifted by r rows.

    Args:
        on_all: runs the capture; raises on all ranks if it fails on any, for which the others would wait in the
            replays.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        weights, filled = layer_weights(), randn(NUM_LAYERS, 2, NUM_PAGES, PAGE_SIZE, S.kv_heads, S.dim)
        every = [None, *(kv_lengths for _, kv_lengths in REPLAYED)]
        given = [layer_inputs(kv_lengths, PAGE_TABLE_WIDTH, NUM_PAGES, ops.max_queries) for kv_lengths in every]
        inputs = [[*of_layers, randn(BLOCK, S.vocabulary).roll(bp.rank, 0)] for _, of_layers in given]

    def step_of_rank(there: Ops, tp: Group, bp: Group, shards: Group) -> Step:
        layer, caches = Layer(there, weights), filled.to(there.device, copy=True)
        size = -(-S.vocabulary // shards.size)
        ids = range(S.vocabulary)[shards.rank * size : (shards.rank + 1) * size]
        score = GreedyScore(ids, MASK, S.vocabulary, shards, there)

        def step(kv_lengths: Sequence[int], *inputs: Tensor) -> list[Tensor]:
            *of_layers, logits = inputs
            sums = []
            for of_layer in caches:
                attended = layer(kv_lengths, of_layers, of_layer, given[0][0])
                sums.append(tp.all_reduce(attended * 2.0**-tp.rank, "layers"))
            scored = score(logits[:, ids.start : ids.stop])
            message = torch.stack(float_bits([scored.probs, logits_of(logits, scored.ids)]))
            return [*sums, *bp.all_gather(message, "branches").view(torch.float32).unbind(1), caches]

        return step

    def make(there: Ops) -> Step:
        if there is not ops:
            return step_of_rank(there, Alike(0, tp.size), Alike(bp.rank, bp.size), ALONE)
        shards, branches = (captured_group(group) for group in (tp, bp))
        return step_of_rank(there, shards, branches, shards)

    lengths, turns = [entries.kv_lengths for entries, _ in given], [graph for graph, _ in REPLAYED]
    return replayed_case(ops, EXCHANGES, make, inputs, lengths, turns=turns, on_all=on_all)


def collectives_case(groups: Sequence[Group], device: torch.device) -> Case:
    """As many graphs as an engine has, each with a sum over the ranks of every group, replayed in turn.

    How many graphs with collectives a die can hold, and whether two communicators can be captured, is in no document
    that says it for certain. Every rank must run the case.
    """
    in_graph = [captured_group(group) for group in groups]

    def sums(_: Sequence[int], x: Tensor) -> list[Tensor]:
        total = x.clone()  # the sums take its place
        for group in in_graph:
            total = group.all_reduce(total, "self-test")
        return [total]

    def run() -> list[Tensor]:
        memory = graph_memory()
        inputs = [torch.full((1024,), number + 1.0, device=device) for number in range(NUM_GRAPHS)]
        graphs = [Replayed(sums, name, tensors=[x], memory=memory) for x in inputs]
        return [graph()[0] for _ in range(REPLAYS) for graph in graphs][-NUM_GRAPHS:]

    name, ranks = f"{CAPTURED} collectives, replayed in {NUM_GRAPHS} graphs", math.prod(group.size for group in groups)
    expected = [torch.full((1024,), ranks * (number + 1.0)) for number in range(NUM_GRAPHS)]
    return Case(name, run, lambda: expected, timed=False)
