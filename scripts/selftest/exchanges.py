"""Collectives between the ranks in captured graphs: alone, and beside attention as the engine captures a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lopa_ascend.backend.interface import Ops
from lopa_ascend.kv.pages import PAGE_SIZE, pages_for
from lopa_ascend.parallel.collectives import CapturedGroup, Group
from lopa_ascend.score.greedy import GreedyScore
from lopa_ascend.score.prediction import float_bits
from scripts.selftest.captures import Captures, Step
from scripts.selftest.cases import BLOCK, CAPTURED, CPU, DIM, HIDDEN, KV_HEADS, Case, randn
from scripts.selftest.findings import REFUSALS
from scripts.selftest.hour import shortened
from scripts.selftest.layer_cases import (
    NUM_BLOCKS,
    OTHER_LENGTHS,
    Layer,
    LayerInputs,
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
functional = torch.ops._c10d_functional


@dataclass(frozen=True)
class Sample:
    """Random weights and inputs of a step, on the CPU. They are the same on all ranks."""

    weights: tuple[Tensor, Tensor, Tensor]
    """Of a ``Layer``. Two layers have the same ones."""
    o: Tensor
    """Weight of the product after attention [HIDDEN, HIDDEN]."""
    caches: Tensor
    """Keys and values [NUM_LAYERS, 2, pages, PAGE_SIZE, KV_HEADS, DIM]."""
    inputs: list[tuple[LayerInputs, Tensor]]
    """Inputs of the layers, and logits [BLOCK, VOCABULARY]: those of the capture, then those of each replay."""


def make_sample(max_queries: int | None) -> Sample:
    """The sample.

    Args:
        max_queries: see ``Ops.max_queries``.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        inputs, logits = [], randn(BLOCK, VOCABULARY)
        for number, kv_lengths in enumerate((None, *(replayed[1] for replayed in REPLAYED))):
            of_layers = random_layer_inputs(kv_lengths, PAGE_TABLE_WIDTH, NUM_PAGES, max_queries)
            inputs.append((of_layers, logits.roll(number, 1)))
        o = randn(HIDDEN, HIDDEN, scale=HIDDEN**-0.5)
        caches = randn(NUM_LAYERS, 2, NUM_PAGES, PAGE_SIZE, KV_HEADS, DIM)
        return Sample(layer_weights(), o, caches, inputs)


class RankStep:
    """A rank's part of a step: after each layer's attention a sum over the tensor parallel ranks; scores, for which
    these ranks exchange what they found in their parts of the vocabulary; and the predictions of all branch parallel
    ranks.

    So that no two ranks send the same, rank r of a tensor parallel group has ``o`` times 2 ** -r, and rank r of a
    branch parallel group has its logits shifted by r rows.

    Args:
        ops: the device's.
        tp: the tensor parallel ranks.
        bp: the branch parallel ranks.
    """

    def __init__(self, ops: Ops, sample: Sample, tp: Group, bp: Group) -> None:
        self._ops, self._tp, self._bp = ops, tp, bp
        self._layer = Layer(ops, *sample.weights)
        self._o = ops.stored((sample.o * 2.0**-tp.rank).to(ops.device))
        self.caches = sample.caches.to(ops.device)
        shard = -(-VOCABULARY // tp.size)
        ids = range(tp.rank * shard, min((tp.rank + 1) * shard, VOCABULARY))
        self._score = GreedyScore(ids, MASK, VOCABULARY, tp, ops)
        self._inputs = [
            (of_layers.on(ops), logits.roll(bp.rank, 0)[:, ids.start : ids.stop].to(ops.device))
            for of_layers, logits in sample.inputs
        ]

    def __call__(self, kv_lengths: Sequence[int]) -> list[Tensor]:
        """The sum of each layer [TOKENS, HIDDEN], and the predictions as int32 [branch parallel ranks, 2, BLOCK]: token
        ids, and the bits of their probabilities."""
        inputs, logits = self._inputs[0]
        entries = replace(inputs.entries, kv_lengths=tuple(kv_lengths))
        sums = []
        for caches in self.caches:
            attended = self._layer(inputs.x, caches, inputs.slot_mapping, entries)
            sums.append(self._tp.all_reduce(self._ops.linear(attended, self._o), "layers"))
        ids, probs, _ = self._score(logits)
        return [*sums, self._bp.all_gather(torch.stack(float_bits([ids, probs])), "branches")]

    def load(self, number: int) -> None:
        """Puts the inputs of a replay where the graphs read them."""
        (inputs, logits), (later_inputs, later_logits) = self._inputs[0], self._inputs[number]
        inputs.copy_from(later_inputs)
        logits.copy_(later_logits)


def exchanges_case(ops: Ops, tp: Group, bp: Group, agree: Callable[[str], None]) -> Case:
    """Two graphs of a ``RankStep``, replayed in turn with other inputs. Every rank must run the case.

    Args:
        ops: the device's.
        tp: the tensor parallel ranks.
        bp: the branch parallel ranks.
        agree: called with why the capture failed, or ""; raises if it failed on any rank, which the others would wait
            for in the replays.
    """
    sample = make_sample(ops.max_queries)
    num_entries = len(sample.inputs[0][0].entries.lengths)
    groups = [CapturedGroup(group.rank, group.size, group.process_group) for group in (tp, bp)]

    def capture_both() -> tuple[RankStep, list[Step]]:
        step, captures = RankStep(ops, sample, *groups), Captures()
        return step, [captures.capture(step, EXCHANGES, num_entries) for _ in range(2)]

    def run() -> list[Tensor]:
        try:
            step, replays = capture_both()
        except REFUSALS as error:
            agree(shortened(error))
            raise
        agree("")
        found = []
        for number, (graph, _) in enumerate(REPLAYED, 1):
            step.load(number)
            found.append(replays[graph](sample.inputs[number][0].entries.kv_lengths))
        outputs = []
        for (*sums, predicted), (_, logits) in zip(found, sample.inputs[1:], strict=True):
            outputs += [*sums, *probs_and_logits(predicted.cpu(), logits)]
        return [*outputs, step.caches]

    return Case(EXCHANGES, run, expected_results(sample, tp.size, bp.size), timed=False)


def probs_and_logits(predicted: Tensor, logits: Tensor) -> list[Tensor]:
    """The predictions of all branch parallel ranks as probabilities, and the logits of the token ids.

    The ids themselves are not compared: between equal logits a device may choose another one.

    Args:
        predicted: as ``RankStep`` returns them.
        logits: [BLOCK, VOCABULARY] of branch parallel rank 0.
    """
    ids, bits = predicted.unbind(1)
    shifted = torch.stack([logits.roll(rank, 0) for rank in range(len(ids))])
    chosen = ids.long().clamp(0, VOCABULARY - 1)[..., None]
    return [bits.contiguous().view(torch.float32), shifted.gather(2, chosen)]


def expected_results(sample: Sample, tp_size: int, bp_size: int) -> list[Tensor]:
    """What every rank gets from the replays, and the caches after them, computed on the CPU without other ranks."""
    step = RankStep(CPU, deepcopy(sample), Group(), Group())  # it writes into what it is given
    total_share = sum(2.0**-rank for rank in range(tp_size))
    results = []
    for number, (inputs, logits) in enumerate(sample.inputs):
        if number:
            step.load(number)
        *sums, predicted = step(inputs.entries.kv_lengths)
        of_ranks = torch.stack([predicted[0].roll(rank, -1) for rank in range(bp_size)])
        results.append([*(total * total_share for total in sums), *probs_and_logits(of_ranks, logits)])
    return [*(result for replayed in results[1:] for result in replayed), step.caches]


def collectives_case(groups: Sequence[Group], device: torch.device) -> Case:
    """As many graphs as an engine has, each with a sum over the ranks of every group, replayed in turn.

    How many graphs with collectives a die can hold, and whether two communicators can be captured, is in no document
    that says it for certain. Every rank must run the case.
    """

    def sum_over(x: Tensor) -> Tensor:
        for group in groups:
            assert group.process_group is not None
            x = functional.wait_tensor(functional.all_reduce(x, "sum", group.process_group.group_name))
        return x

    def run() -> list[Tensor]:
        from lopa_ascend.backend.npu.captured import capturing

        graphs, results = [], []
        sum_over(torch.ones(1024, device=device))  # HCCL connects at the first one, which may not happen in a capture
        inputs = [torch.full((1024,), float(number + 1), device=device) for number in range(NUM_GRAPHS)]
        for x in inputs:  # which keep the memory that the graphs read
            with capturing() as graph:
                results.append(sum_over(x))
            graphs.append(graph)
        for _ in range(REPLAYS):
            for graph in graphs:
                graph.replay()
        return [result.cpu() for result in results]

    ranks = 1
    for group in groups:
        ranks *= group.size
    expected = [torch.full((1024,), float(ranks * (number + 1))) for number in range(NUM_GRAPHS)]
    return Case(f"{CAPTURED} collectives, replayed in {NUM_GRAPHS} graphs", run, expected, timed=False)
