"""The compiler of decode steps on an NVIDIA GPU: each bucket is captured as one CUDA graph.

A captured step reads inputs and KV lengths where they lay during the capture, in memory that outlives it; the host
copies new ones there before a replay, on the same stream. Everything that the step allocates comes from one pool, which
all buckets share because their replays follow one another.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol
from weakref import WeakSet

import torch
from torch import Tensor

from lopa_ascend.backend.compiler import Compiler, Run, Step

POLL_INTERVAL = 2e-5
"""Seconds between two looks at an event: a step takes a hundred times as long."""
WARM_UPS = 2
"""Runs before a capture: the first one compiles kernels, and lets the libraries allocate what they keep."""
Launch = Callable[[], Tensor]
WhileWaiting = Callable[[float], None]
"""See ``Group.while_waiting``."""


class Event(Protocol):
    """Like ``torch.cuda.Event``: whether the device has done what was launched before the event was recorded."""

    def query(self) -> bool: ...


def wait_for(event: Event, while_waiting: WhileWaiting) -> None:
    """Waits for a recorded event. Not by its own ``synchronize``: NCCL's kernels wait for a dead peer for ever."""
    begin = time.monotonic()
    while not event.query():
        while_waiting(time.monotonic() - begin)
        time.sleep(POLL_INTERVAL)


class Capture(Protocol):
    """What a device offers for graphs."""

    def warm_up(self, launch: Launch) -> None:
        """Runs a step on the stream of captures, behind what was launched before."""
        ...

    def capture(self, launch: Launch) -> tuple[Callable[[], None], Tensor]:
        """Records what a step launches, without running it. Returns a function that runs it all again, and the tensor
        in which the step's result then lies."""
        ...

    def wait(self, while_waiting: WhileWaiting = lambda seconds: None) -> None:
        """Waits until the device has done all that was launched (``wait_for``)."""
        ...

    def reserved(self) -> int:
        """Bytes of device memory that torch holds and uses, or keeps for graphs."""
        ...

    def close(self) -> None:
        """Destroys what was captured."""
        ...


class StreamCapture:
    """Captures on a stream of its own: only captures on the same stream share a pool's memory."""

    def __init__(self) -> None:
        self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        self._graphs = WeakSet[torch.cuda.CUDAGraph]()
        """Those that live, whose memory is in the pool."""

    def warm_up(self, launch: Launch) -> None:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            launch()
        torch.cuda.current_stream().wait_stream(self._stream)

    def capture(self, launch: Launch) -> tuple[Callable[[], None], Tensor]:
        if not self._graphs:  # torch gives up a pool with its last graph, and refuses it while a tensor there lives
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # In the mode "global" the thread in which NCCL looks after its collectives would break the capture.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            output = launch()
        self._graphs.add(graph)
        return graph.replay, output

    def wait(self, while_waiting: WhileWaiting = lambda seconds: None) -> None:
        event = torch.cuda.Event()
        event.record()
        wait_for(event, while_waiting)

    def reserved(self) -> int:
        torch.cuda.empty_cache()
        reserved: int = torch.cuda.memory_reserved()
        return reserved

    def close(self) -> None:
        for graph in list(self._graphs):
            graph.reset()
        self._graphs.clear()


class CudaGraphs(Compiler):
    """Captures buckets as CUDA graphs of this process's GPU."""

    mode, rehearses, packs = "cuda_graphs", True, True

    def __init__(self, capture: Capture) -> None:
        super().__init__()
        self._capture = capture
        self._rehearsed = set[str]()

    def rehearse(self, step: Step, name: str, tensors: Sequence[Tensor], kv_lengths: Sequence[int]) -> None:
        lengths = _on_device(kv_lengths, tensors)
        for _ in range(WARM_UPS):
            self._capture.warm_up(lambda: step(tensors, lengths))
            self._wait()
        self._rehearsed.add(name)

    def _compile(self, step: Step, name: str, tensors: Sequence[Tensor], kv_lengths: list[int]) -> Run:
        lengths = _on_device(kv_lengths, tensors)

        def launch() -> Tensor:
            return step(tensors, lengths)

        if name not in self._rehearsed:
            self.rehearse(step, name, tensors, kv_lengths)
        memory_before = self._capture.reserved()
        self.on_every_rank(True)  # a rank that still connects would make collectives of the others wait
        replay, output = self._capture.capture(launch)
        self.num_compilations += 1
        self.captured.append(name)
        self.memory += self._capture.reserved() - memory_before
        return CudaGraphRun(launch, replay, output, lengths, kv_lengths)

    def close(self) -> None:
        self._capture.close()

    def launch(self, run: Run, name: str, kv_lengths: Sequence[int]) -> Tensor:
        output = run(kv_lengths)
        self._wait()
        return output

    def _wait(self) -> None:
        self._capture.wait(self.while_waiting)

    def replayed(self, launch: Launch) -> Tensor:
        replay, output = self._capture.capture(launch)
        replay()
        self._wait()
        return output.clone()

    def try_out(self, run: Run, name: str, kv_lengths: Sequence[Sequence[int]]) -> None:
        for lengths in kv_lengths:
            self._wait()
            begin = time.perf_counter()
            run(lengths)
            self._wait()
            self.replay_milliseconds[name] = 1000 * (time.perf_counter() - begin)


def _on_device(kv_lengths: Sequence[int], tensors: Sequence[Tensor]) -> Tensor:
    """KV lengths, int32, on the device of a bucket's tensors."""
    return torch.tensor(kv_lengths, dtype=torch.int32).to(tensors[0].device)


class CudaGraphRun:
    """A ``Run`` that replays a captured step with other KV lengths. ``launch``, the captured function, holds the
    tensors whose memory the graph uses. A replay leaves its result in ``output`` and reads KV lengths from ``lengths``,
    int32, which hold ``kv_lengths`` now."""

    def __init__(
        self, launch: Launch, replay: Callable[[], None], output: Tensor, lengths: Tensor, kv_lengths: list[int]
    ) -> None:
        self._launch, self._replay, self._output = launch, replay, output
        self._lengths, self._held = lengths, kv_lengths

    def __call__(self, kv_lengths: Sequence[int]) -> Tensor:
        if kv_lengths != self._held:
            self._held = list(kv_lengths)
            on_host = torch.tensor(self._held, dtype=torch.int32)
            if self._lengths.is_cuda:  # from other memory the host would wait for the copy
                on_host = on_host.pin_memory()
            self._lengths.copy_(on_host, non_blocking=True)
        self._replay()
        return self._output
