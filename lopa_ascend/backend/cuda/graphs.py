"""The compiler of decode steps on an NVIDIA GPU: each bucket is captured as one CUDA graph.

A captured step reads inputs and KV lengths where they lay during the capture, in memory that outlives it; the host
copies new ones there before a replay, on the same stream. Everything that the step allocates comes from one pool, which
all buckets share because their replays follow one another.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from lopa_ascend.backend.compiler import Compiler, Run, Step

WARM_UPS = 2
"""Runs before a capture: the first one compiles kernels, and lets the libraries allocate what they keep."""
Launch = Callable[[], Tensor]


class Capture(Protocol):
    """What a device offers for graphs."""

    def warm_up(self, launch: Launch) -> None:
        """Runs a step on the stream of captures, and waits for it."""
        ...

    def capture(self, launch: Launch) -> tuple[Callable[[], None], Tensor]:
        """Records what a step launches, without running it.

        Returns:
            A function that runs it all again, and the tensor in which the step's result then lies.
        """
        ...

    def wait(self) -> None:
        """Waits until the device has done all that was launched."""
        ...

    def reserved(self) -> int:
        """Bytes of device memory that torch holds."""
        ...


class StreamCapture:
    """Captures on a stream of its own: memory of one pool is shared only by captures on the same stream."""

    def __init__(self) -> None:
        self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()

    def warm_up(self, launch: Launch) -> None:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            launch()
        self.wait()

    def capture(self, launch: Launch) -> tuple[Callable[[], None], Tensor]:
        graph = torch.cuda.CUDAGraph()
        # In the mode "global" the thread in which NCCL looks after its collectives would break the capture.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            output = launch()
        return graph.replay, output

    def wait(self) -> None:
        torch.cuda.synchronize()

    def reserved(self) -> int:
        reserved: int = torch.cuda.memory_reserved()
        return reserved


class CudaGraphs(Compiler):
    """Captures buckets as CUDA graphs.

    Args:
        capture: of this process's GPU.
    """

    mode = "cuda_graphs"
    packs = True

    def __init__(self, capture: Capture) -> None:
        super().__init__()
        self._capture = capture

    def _compile(self, step: Step, name: str, tensors: Sequence[Tensor], kv_lengths: list[int]) -> Run:
        lengths = torch.tensor(kv_lengths, dtype=torch.int32).to(tensors[0].device)

        def launch() -> Tensor:
            return step(tensors, lengths)

        memory_before = self._capture.reserved()
        for _ in range(WARM_UPS):
            self._capture.warm_up(launch)
        self.on_every_rank(True)  # a rank that still connects would make collectives of the others wait
        replay, output = self._capture.capture(launch)
        self.num_compilations += 1
        self.captured.append(name)
        self.memory += self._capture.reserved() - memory_before
        return CudaGraphRun(launch, replay, output, lengths, kv_lengths)

    def replayed(self, launch: Launch) -> Tensor:
        replay, output = self._capture.capture(launch)
        replay()
        return output.clone()

    def try_out(self, run: Run, name: str, kv_lengths: Sequence[Sequence[int]]) -> None:
        for lengths in kv_lengths:
            self._capture.wait()
            begin = time.perf_counter()
            run(lengths)
            self._capture.wait()
            self.replay_milliseconds[name] = 1000 * (time.perf_counter() - begin)


class CudaGraphRun:
    """A ``Run`` that replays a captured step with other KV lengths.

    Args:
        launch: the function that was captured. It holds the tensors whose memory the graph uses.
        replay: runs the captured step.
        output: where its result then lies.
        lengths: from where it reads its KV lengths, int32.
        kv_lengths: what ``lengths`` holds.
    """

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
