"""Captures functions as the engine's compiler captures decode steps, and replays them with other inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from lopa_ascend.backend.compiler import MIN_KV_LENGTH
from lopa_ascend.backend.interface import Ops
from tests.kernel_cases import Case
from tests.npu.cases import CPU

NUM_LENGTHS = 61
"""Different KV lengths during a capture; equal to ``NUM_LENGTHS`` of backend/npu/compiler.py."""
Step = Callable[..., list[Tensor]]
"""Computes some tensors, given the KV length of each attention entry, and the tensors that it reads."""


def capture_lengths(num_entries: int) -> list[int]:
    """The KV lengths with which the engine captures a step of so many attention entries: few, and all different."""
    return [MIN_KV_LENGTH + index % NUM_LENGTHS for index in range(num_entries)]


def graph_memory() -> dict[str, Any]:
    """A pool of memory and a stream, which graphs can share as those of an engine do."""
    npu = torch.get_device_module("npu")
    return {"pool": npu.graph_pool_handle(), "stream": npu.Stream()}


@dataclass
class Replayed:
    """A step in a graph, which the first call captures and every call replays."""

    step: Step
    name: str
    """For messages."""
    kv_lengths: Sequence[int] = ()
    """During the capture."""
    tensors: Sequence[Tensor] = ()
    """That the step reads, on the device."""
    memory: dict[str, Any] | None = None
    """See ``graph_memory``; None for some of its own."""
    in_thread: bool = False
    """Whether a thread gives replays their KV lengths."""
    _run: Any = None
    _outputs: list[Tensor] = field(default_factory=list)

    def capture(self) -> Any:
        """Captures the graph, whose function replays it."""
        from lopa_ascend.backend.npu.captured import CapturedRun, capturing

        memory = self.memory or graph_memory()
        self.step(self.kv_lengths, *self.tensors)  # what a first call needs, such as loading the kernels
        with torch.no_grad(), capturing(**memory, auto_dispatch_capture=True) as graph:
            self._outputs = self.step(self.kv_lengths, *self.tensors)
        self._run = CapturedRun(graph, self.step, self._outputs[0], self.name, list(self.kv_lengths))
        return self._run

    def __call__(self, kv_lengths: Sequence[int] | None = None, given: Sequence[Tensor] = ()) -> list[Tensor]:
        """The tensors of the step, which are the same ones each time: the graph writes into their memory. Without KV
        lengths, with those of the capture; what is ``given`` is first copied into the tensors that the step reads."""
        run = self._run or self.capture()
        run.in_thread = self.in_thread
        for x, values in zip(self.tensors, given, strict=bool(given)):
            x.copy_(values)
        run(self.kv_lengths if kv_lengths is None else kv_lengths)
        return self._outputs


def replayed_case(
    ops: Ops,
    name: str,
    make: Callable[[Ops], Step],
    inputs: Sequence[Sequence[Tensor]],
    kv_lengths: Sequence[Sequence[int]] | None = None,
    *,
    in_thread: bool = False,
    turns: Sequence[int] = (),
    on_all: Callable[[Callable[[], Any]], Any] = lambda capture: capture(),
) -> Case:
    """A step that is captured with the first of some inputs, and replayed with each of the others. The host does not
    wait between the replays.

    Args:
        inputs: tensors that the step reads, on the CPU.
        kv_lengths: that belong to each of the inputs; None for a step without attention.
        turns: which of several equal graphs, that share their memory, makes each replay; empty for one graph.
        on_all: runs the capture, on all ranks that take part in it.
    """
    lengths = kv_lengths or [()] * len(inputs)

    def run() -> list[Tensor]:
        current, *later = ([x.to(ops.device) for x in given] for given in inputs)

        def capture() -> list[Replayed]:
            step, memory, numbers = make(ops), graph_memory(), range(1 + max(turns, default=0))
            graphs = [Replayed(step, name, lengths[0], current, memory, in_thread) for _ in numbers]
            for graph in graphs:
                graph.capture()
            return graphs

        graphs = on_all(capture)
        replays = zip(turns or [0] * len(later), lengths[1:], later, strict=True)
        return [x.clone() for number, each, given in replays for x in graphs[number](each, given)]

    def expected() -> list[Tensor]:
        step = make(CPU)
        results = [[x.clone() for x in step(each, *given)] for each, given in zip(lengths, inputs, strict=True)]
        return list(chain.from_iterable(results[1:]))

    return Case(name, run, expected, timed=False)
