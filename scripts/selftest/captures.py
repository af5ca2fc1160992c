"""Captures functions as the engine's compiler captures decode steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lopa_ascend.backend.compiler import MIN_KV_LENGTH

NUM_LENGTHS = 61
"""Different KV lengths during a capture; equal to ``NUM_LENGTHS`` of backend/npu/compiler.py."""
Step = Callable[[Sequence[int]], list[Tensor]]
"""Computes some tensors, given the KV length of each attention entry."""


def capture_lengths(num_entries: int) -> list[int]:
    """The KV lengths with which the engine captures a step of so many attention entries: few, and all different."""
    return [MIN_KV_LENGTH + index % NUM_LENGTHS for index in range(num_entries)]


class Captures:
    """Graphs that share one pool of memory, and are captured on one stream."""

    def __init__(self) -> None:
        npu = torch.get_device_module("npu")
        self._pool, self._stream = npu.graph_pool_handle(), npu.Stream()

    def capture(self, step: Step, name: str, num_entries: int = 0, in_thread: bool = False) -> Step:
        """A function that replays the step, which runs once before the capture.

        The tensors that the function returns are copies: the graphs write their results into the memory that they
        share.

        Args:
            step: what to capture.
            name: of the graph, for messages.
            num_entries: attention entries of the step.
            in_thread: whether a thread gives replays their KV lengths.
        """
        from lopa_ascend.backend.npu.captured import CapturedRun, capturing

        lengths = capture_lengths(num_entries)
        step(lengths)  # what a first call needs, such as loading the kernels, may not happen in a capture
        capture = capturing(pool=self._pool, stream=self._stream, auto_dispatch_capture=True)
        with torch.no_grad(), capture as graph:
            outputs = step(lengths)
        run = CapturedRun(graph, step, outputs[0], name, lengths)
        run.in_thread = in_thread

        def replay(kv_lengths: Sequence[int]) -> list[Tensor]:
            run(kv_lengths)
            return [output.clone() for output in outputs]

        return replay
