"""Captures on a GPU: their order, the end of their graphs, and waiting for a device whose peers may be gone. Fakes
stand where torch.cuda begins."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lopa_ascend import LLM, DecodingParams
from lopa_ascend.backend.compiler import Eager, Step
from lopa_ascend.backend.cuda import graphs
from lopa_ascend.backend.cuda.graphs import CudaGraphs, StreamCapture, wait_for
from lopa_ascend.graph import setup
from lopa_ascend.parallel.collectives import RankError
from lopa_ascend.parallel.mesh import Mesh


class Graph:
    """torch.cuda.CUDAGraph, as far as its life goes."""

    def __init__(self) -> None:
        self.is_destroyed = False

    def replay(self) -> None:
        assert not self.is_destroyed

    def reset(self) -> None:
        self.is_destroyed = True


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, int]]:
    """(graph, its pool) of each capture; the graphs are not kept alive."""
    taken: list[tuple[Any, int]] = []
    handles = iter(range(100))

    def capture(graph: Graph, pool: int, **_: Any) -> nullcontext[None]:
        taken.append((id(graph), pool))
        return nullcontext()

    stream = SimpleNamespace(wait_stream=lambda _: None)
    for name, fake in {
        "CUDAGraph": Graph,
        "graph": capture,
        "graph_pool_handle": lambda: next(handles),
        "Stream": lambda: stream,
    }.items():
        monkeypatch.setattr(f"torch.cuda.{name}", fake)
    return taken


def test_a_pool_that_has_lost_its_last_graph_is_not_taken_again(pools: list[tuple[Any, int]]) -> None:
    capture = StreamCapture()
    kept = [capture.capture(lambda: torch.zeros(1)) for _ in range(2)]
    assert pools[0][1] == pools[1][1]
    del kept[0]
    kept.append(capture.capture(lambda: torch.zeros(1)))
    assert pools[2][1] == pools[0][1]
    kept.clear()
    gc.collect()
    kept.append(capture.capture(lambda: torch.zeros(1)))
    assert pools[3][1] != pools[0][1]


def test_closing_destroys_graphs_that_others_still_hold(pools: list[tuple[Any, int]]) -> None:
    """As the traceback of an exception under way does."""
    compiler = CudaGraphs(StreamCapture())
    replay, _ = compiler._capture.capture(lambda: torch.zeros(1))
    replay()
    compiler.close()
    with pytest.raises(AssertionError):
        replay()


# ---- the order of captures -------------------------------------------------------------------------------------------


class Noting(Eager):
    """Notes what is asked of it: what is rehearsed, and what compiled."""

    rehearses = True

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[str, str]] = []

    def rehearse(self, step: Step, name: str, *_: Any) -> None:
        self.asked.append(("rehearse", name))

    def _compile(self, step: Step, name: str, tensors: Any, kv_lengths: list[int]) -> Any:
        self.asked.append(("compile", name))
        return super()._compile(step, name, tensors, kv_lengths)


def test_the_largest_bucket_is_captured_first_and_after_all_rehearsals(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = Noting()
    monkeypatch.setattr(setup, "load_compiler", lambda *_, **__: compiler)
    with LLM(graph_mode="inductor", max_num_seqs=8, kv_cache_memory=2**27, max_model_len=256) as llm:
        executor = llm.engine.runner.graphs
        assert executor is not None
        declared = executor.graphs.buckets.declared
        llm.generate("hi", DecodingParams(max_new_tokens=4), quiet=True)
    assert len(declared) > 2
    by_name = {bucket.name: bucket.tokens for bucket in declared}
    for kind in ("rehearse", "compile"):
        sizes = [by_name[name] for what, name in compiler.asked if what == kind]
        assert sorted(sizes, reverse=True) == sizes
        assert len(sizes) == len(declared)
    assert [what for what, _ in compiler.asked] == ["rehearse"] * len(declared) + ["compile"] * len(declared)
    assert [bucket.tokens for bucket in declared] == sorted(by_name.values())  # the cheapest is chosen first


class Fake:
    """A ``Capture`` that notes its calls, and runs what it captures."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def warm_up(self, launch: Callable[[], Tensor]) -> None:
        self.calls.append("warm up")

    def capture(self, launch: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        self.calls.append("capture")
        return lambda: None, launch()

    def wait(self, while_waiting: Callable[[float], None] = lambda seconds: None) -> None:
        while_waiting(0.0)

    def reserved(self) -> int:
        return 0

    def close(self) -> None:
        pass


def test_a_bucket_that_was_rehearsed_is_captured_at_once() -> None:
    capture = Fake()
    compiler, tensors = CudaGraphs(capture), [torch.zeros(1)]

    def step(tensors: Any, _: Any) -> Tensor:
        return tensors[0] + 1

    compiler.rehearse(step, "a", tensors, [2])
    rehearsal = ["warm up"] * graphs.WARM_UPS
    assert capture.calls == rehearsal
    compiler.compile(step, "a", tensors, [2])
    assert capture.calls == [*rehearsal, "capture"]
    compiler.compile(step, "b", tensors, [2])
    assert capture.calls == [*rehearsal, "capture", *rehearsal, "capture"]


# ---- waiting ---------------------------------------------------------------------------------------------------------


class Events:
    """An event of the device that comes after so many looks; None: never."""

    def __init__(self, looks: int | None) -> None:
        self._looks: Iterator[bool] = iter([False] * looks if looks is not None else iter(lambda: False, True))

    def query(self) -> bool:
        return next(self._looks, True)


def waiting(mesh: Mesh) -> Callable[[float], None]:
    return mesh._check_waiting


def test_a_wait_ends_with_the_device_or_with_another_rank() -> None:
    mesh = Mesh()
    wait_for(Events(3), waiting(mesh))
    mesh.failure = "rank 1 has ended"
    wait_for(Events(0), waiting(mesh))  # what is there is there
    with pytest.raises(RankError, match="a step failed: rank 1 has ended"):
        wait_for(Events(None), waiting(mesh))


def test_a_rank_that_does_not_answer_is_given_up_after_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh, clock = Mesh(), iter(range(10**6))
    mesh._timeout = timedelta(seconds=20)
    mesh.start()
    monkeypatch.setattr(graphs, "time", SimpleNamespace(monotonic=lambda: next(clock), sleep=lambda _: None))
    with pytest.raises(RankError, match="the device has not finished it in [0-9]+ s; a rank does not answer"):
        wait_for(Events(None), waiting(mesh))
    assert next(clock) == 22  # it began at 0, and gave up at 21


def test_a_capture_whose_warm_up_waits_for_a_dead_rank_ends() -> None:
    compiler, mesh = CudaGraphs(Fake()), Mesh()
    mesh.failure = "rank 1 has ended"
    compiler.while_waiting = waiting(mesh)
    with pytest.raises(RankError, match="rank 1 has ended"):
        compiler.compile(lambda tensors, _: tensors[0], "bucket", [torch.zeros(1)], [2])
