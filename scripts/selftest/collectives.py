"""Collectives inside captured graphs, between the ranks of the self-test."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lopa_ascend.parallel.collectives import Group
from scripts.selftest.cases import CAPTURED, Case

NUM_GRAPHS = 12
"""Graphs that an engine of TP 4 x BP 4 has by default."""
REPLAYS = 3


def collectives_case(groups: Sequence[Group], device: torch.device) -> Case:
    """As many graphs as an engine has, each with a sum over the ranks of every group, replayed in turn.

    How many graphs with collectives a die can hold, and whether two communicators can be captured, is in no document
    that says it for certain. Every rank must run the case.
    """
    functional = torch.ops._c10d_functional

    def sum_over(x: Tensor) -> Tensor:
        for group in groups:
            assert group.process_group is not None
            x = functional.wait_tensor(functional.all_reduce(x, "sum", group.process_group.group_name))
        return x

    def run() -> list[Tensor]:
        from lopa_ascend.backend.npu.captured import capturing

        npu = torch.get_device_module("npu")
        graphs, results = [], []
        sum_over(torch.ones(1024, device=device))  # HCCL connects at the first one, which may not happen in a capture
        inputs = [torch.full((1024,), float(number + 1), device=device) for number in range(NUM_GRAPHS)]
        for x in inputs:  # which keep the memory that the graphs read
            graph = npu.NPUGraph()
            with capturing(graph):
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
