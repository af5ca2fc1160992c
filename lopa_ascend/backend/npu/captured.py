"""Captured ACL graphs, and the KV lengths of their attention tasks.

A captured attention task waits for an event before each run, so that its arguments can be changed while the graph runs.
It keeps its last arguments. So if lengths are those of the graph's last replay, the host only records the event; to
give a task other lengths, the host prepares its launch anew, which takes far longer (see docs/ascend.md, Host time of a
replay). A thread of its own can do that while this one starts the replay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch_npu import npu

from lopa_ascend.backend.compiler import GraphError
from lopa_ascend.backend.npu.profiler import mark

KV_LENGTHS = "actual_seq_lengths_kv"
"""The attention kernel's argument with the KV lengths of its entries."""


class Graph(npu.NPUGraph):  # type: ignore[misc]
    """An ACL graph that can be captured and replayed in inference mode and outside it. All graphs of a device share the
    two tensors of its random state. torch_npu 2.10 makes them at the first capture, in that capture's mode, and fills
    them at each capture and replay. Outside inference mode it could not fill tensors that were made in it."""

    def capture_begin(self, *args: Any, **options: Any) -> None:
        with torch.inference_mode(False):
            super().capture_begin(*args, **options)


@contextmanager
def capturing(**options: Any) -> Iterator[Graph]:
    """Captures a graph by ``npu.graph`` with these options. If the capture fails, ops are dispatched and launched as
    before: torch_npu leaves its own dispatch and its stream behind if the end of a capture raises."""
    graph, stream = Graph(), npu.current_stream()
    try:
        with npu.graph(graph, **options):
            yield graph
    except BaseException:
        mode = graph.graph_dispatch_mode
        if mode in _get_current_dispatch_mode_stack():
            mode.__exit__(None, None, None)
        npu.set_stream(stream)
        raise


class CapturedRun:
    """A ``Run`` that replays a captured graph with other KV lengths than the capture's, ``kv_lengths``.

    With ``in_thread`` a thread of its own gives the tasks their lengths while this one starts the replay. ``captured``,
    the captured function, holds the tensors whose memory the graph uses; every replay writes its result to ``output``.
    GraphError if the tasks take the lengths in another way than ``ranges_of_lengths`` says.
    """

    def __init__(
        self, graph: npu.NPUGraph, captured: Callable[..., Any], output: Tensor, name: str, kv_lengths: list[int]
    ):
        self._graph, self._captured, self._output = graph, captured, output
        mode = graph.graph_dispatch_mode
        self._update_stream = mode.update_stream
        ranges = ranges_of_lengths(graph, name, kv_lengths)
        self._tasks = list(zip(mode.graph_dispatch_records, ranges, strict=True))
        self._done = npu.Event()
        self.in_thread = False

    def __call__(self, kv_lengths: Sequence[int]) -> Tensor:
        if self.in_thread:
            released = update_thread(npu.current_device()).submit(self._release_all, kv_lengths)
            try:
                with mark("launch"):
                    self._graph.replay()
            finally:
                released.result()
        else:
            with mark("launch"):
                self._graph.replay()
            self._release_all(kv_lengths)
        self._done.record()
        return self._output

    @torch.inference_mode()
    def _release_all(self, kv_lengths: Sequence[int]) -> None:
        """Lets all attention tasks of the starting replay go on, with these lengths."""
        # Neither tasks nor events may change before the previous replay is over: it may still wait for them.
        self._update_stream.wait_event(self._done)
        with npu.stream(self._update_stream), mark("update"):
            for task, taken_range in self._tasks:
                self._release(task, list(kv_lengths[taken_range]))

    def _release(self, task: Any, kv_lengths: list[int]) -> None:
        """Lets an attention task of the running graph go on, with these lengths. ``task`` is torch_npu's record: event,
        handle, and the op with its present arguments."""
        if task.kwargs[KV_LENGTHS] != kv_lengths:
            npu.graph_task_update_begin(self._update_stream, task.handle)
            task.kwargs[KV_LENGTHS] = kv_lengths
            task.op_cache_entry(*task.args, **task.kwargs)
            npu.graph_task_update_end(self._update_stream)
        task.event.record(self._update_stream)


@cache
def update_thread(device: int) -> ThreadPoolExecutor:
    """The thread that updates the graphs of a device."""
    return ThreadPoolExecutor(1, "graph updates", initializer=npu.set_device, initargs=(device,))


def ranges_of_lengths(graph: npu.NPUGraph, name: str, kv_lengths: list[int]) -> list[slice]:
    """Which KV lengths of a step each attention task of its captured graph takes: in every layer, the tasks together
    take all lengths in order. GraphError if they do not."""
    ranges, first = [], 0
    for record in graph.graph_dispatch_mode.graph_dispatch_records:
        taken = record.kwargs[KV_LENGTHS]
        taken_range = slice(first, first + len(taken))
        if kv_lengths[taken_range] != taken:
            raise GraphError(f"bucket {name}: attention takes other KV lengths than the step was given")
        ranges.append(taken_range)
        first = taken_range.stop % len(kv_lengths)
    return ranges
