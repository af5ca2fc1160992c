"""Collectives between the ranks in captured graphs: alone, and beside attention as the engine captures a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lopa_ascend.backend.interface import Entries, Ops
from lopa_ascend.kv.pages import PAGE_SIZE, pages_for
from lopa_ascend.parallel.collectives import CapturedGroup, Group
from lopa_ascend.score.greedy import GreedyScore
from lopa_ascend.score.prediction import float_bits
from scripts.selftest.captures import Replayed, graph_memory
from scripts.selftest.cases import BLOCK, CAPTURED, CPU, DIM, HIDDEN, KV_HEADS, Case, randn
from scripts.selftest.findings import REFUSALS
from scripts.selftest.hour import shortened
from scripts.selftest.layer_cases import (
    NUM_BLOCKS,
    OTHER_LENGTHS,
    Layer,
    layer_weights,
    random_layer_inputs,
)
from scripts.selftest.step_cases import MASK, VOCABULARY

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
"""Of the sample, which must be the same on all ranks, whatever each of them has tried before."""
NUM_GRAPHS = 15
"""Graphs that an engine of TP 4 x BP 4 has by default, at most."""
REPLAYS = 3
"""Of each of these graphs."""


@dataclass(frozen=True)
class Sample:
    """Random weights and inputs of a step, on the CPU, which are the same on all ranks."""

    weights: tuple[Tensor, Tensor, Tensor]
    """Of a ``Layer``. Two layers have the same ones."""
    o: Tensor
    """Weight of the product after attention [HIDDEN, HIDDEN]."""
    caches: Tensor
    """Keys and values [NUM_LAYERS, 2, pages, PAGE_SIZE, KV_HEADS, DIM]."""
    entries: Entries
    kv_lengths: list[tuple[int, ...]]
    """Of the capture, then of each replay."""
    inputs: list[list[Tensor]]
    """Likewise what the layers read, and logits [BLOCK, VOCABULARY]."""


def make_sample(max_queries: int | None) -> Sample:
    """The sample, with entries of so many queries at most."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        logits = randn(BLOCK, VOCABULARY)
        every = [None, *(kv_lengths for _, kv_lengths in REPLAYED)]
        given = [random_layer_inputs(kv_lengths, PAGE_TABLE_WIDTH, NUM_PAGES, max_queries) for kv_lengths in every]
        inputs = [[*tensors, logits.roll(number, 1)] for number, (_, tensors) in enumerate(given)]
        o = randn(HIDDEN, HIDDEN, scale=HIDDEN**-0.5)
        caches = randn(NUM_LAYERS, 2, NUM_PAGES, PAGE_SIZE, KV_HEADS, DIM)
        lengths = [entries.kv_lengths for entries, _ in given]
        return Sample(layer_weights(), o, caches, given[0][0], lengths, inputs)


class RankStep:
    """A rank's part of a step: after each layer's attention a sum over the tensor parallel ranks; scores, for which
    these ranks exchange what they found in their parts of the vocabulary; and the predictions of all branch parallel
    ranks.

    So that no two ranks send the same, rank r of a tensor parallel group has ``o`` times 2 ** -r, and rank r of a
    branch parallel group has its logits shifted by r rows.
    """

    def __init__(self, ops: Ops, sample: Sample, tp: Group, bp: Group) -> None:
        self._ops, self._tp, self._bp, self._entries = ops, tp, bp, sample.entries
        self._layer = Layer(ops, *sample.weights)
        self._o = ops.stored((sample.o * 2.0**-tp.rank).to(ops.device))
        self.caches = sample.caches.to(ops.device, copy=True)
        shard = -(-VOCABULARY // tp.size)
        self._ids = range(tp.rank * shard, min((tp.rank + 1) * shard, VOCABULARY))
        self._score = GreedyScore(self._ids, MASK, VOCABULARY, tp, ops)

    def __call__(self, kv_lengths: Sequence[int], *inputs: Tensor) -> list[Tensor]:
        """The sum of each layer [TOKENS, HIDDEN], and the predictions as int32 [branch parallel ranks, 2, BLOCK]: token
        ids, and the bits of their probabilities; of inputs as ``own_inputs`` gives them."""
        *of_layers, logits = inputs
        sums = []
        for caches in self.caches:
            attended = self._layer(kv_lengths, of_layers, caches, self._entries)
            sums.append(self._tp.all_reduce(self._ops.linear(attended, self._o), "layers"))
        ids, probs, _ = self._score(logits)
        return [*sums, self._bp.all_gather(torch.stack(float_bits([ids, probs])), "branches")]

    def own_inputs(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """This rank's part of inputs, on its device."""
        *of_layers, logits = inputs
        own = logits.roll(self._bp.rank, 0)[:, self._ids.start : self._ids.stop]
        return [x.to(self._ops.device, copy=True) for x in (*of_layers, own)]


def exchanges_case(ops: Ops, tp: Group, bp: Group, agree: Callable[[str], None]) -> Case:
    """Two graphs of a ``RankStep``, replayed in turn with other inputs. Every rank must run the case.

    Args:
        agree: called with why the capture failed, or ""; raises if it failed on any rank, which the others would wait
            for in the replays.
    """
    sample = make_sample(ops.max_queries)
    groups = [CapturedGroup(group.rank, group.size, group.process_group) for group in (tp, bp)]

    def run() -> list[Tensor]:
        try:
            step, memory = RankStep(ops, sample, *groups), graph_memory()
            current, *later = map(step.own_inputs, sample.inputs)
            graphs = [Replayed(step, EXCHANGES, sample.kv_lengths[0], current, memory) for _ in range(2)]
            for graph in graphs:
                graph.capture()
        except REFUSALS as error:
            agree(shortened(error))
            raise
        agree("")
        given = zip(REPLAYED, sample.kv_lengths[1:], later, strict=True)
        found = [[x.clone() for x in graphs[which](lengths, inputs)] for (which, _), lengths, inputs in given]
        outputs = []
        for (*sums, predicted), (*_, logits) in zip(found, sample.inputs[1:], strict=True):
            outputs += [*sums, *probs_and_logits(predicted.cpu(), logits)]
        return [*outputs, step.caches]

    return Case(EXCHANGES, run, expected_results(sample, tp.size, bp.size), timed=False)


def probs_and_logits(predicted: Tensor, logits: Tensor) -> list[Tensor]:
    """What a ``RankStep`` predicts as probabilities, and the logits of the token ids; ``logits`` are those of branch
    parallel rank 0. The ids are not compared: between equal logits a device may choose another one."""
    ids, bits = predicted.unbind(1)
    shifted = torch.stack([logits.roll(rank, 0) for rank in range(len(ids))])
    chosen = ids.long().clamp(0, VOCABULARY - 1)[..., None]
    return [bits.contiguous().view(torch.float32), shifted.gather(2, chosen)]


def expected_results(sample: Sample, tp_size: int, bp_size: int) -> list[Tensor]:
    """What every rank gets from the replays, and the caches after them, computed on the CPU without other ranks."""
    step = RankStep(CPU, sample, Group(), Group())
    total_share = sum(2.0**-rank for rank in range(tp_size))
    results = []
    for kv_lengths, inputs in zip(sample.kv_lengths, sample.inputs, strict=True):
        *sums, predicted = step(kv_lengths, *inputs)
        of_ranks = torch.stack([predicted[0].roll(rank, -1) for rank in range(bp_size)])
        results.append([*(total * total_share for total in sums), *probs_and_logits(of_ranks, inputs[-1])])
    return [*(result for replayed in results[1:] for result in replayed), step.caches]


def collectives_case(groups: Sequence[Group], device: torch.device) -> Case:
    """As many graphs as an engine has, each with a sum over the ranks of every group, replayed in turn.

    How many graphs with collectives a die can hold, and whether two communicators can be captured, is in no document
    that says it for certain. Every rank must run the case.
    """
    in_graph = [CapturedGroup(group.rank, group.size, group.process_group) for group in groups]

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
    return Case(name, run, expected, timed=False)
