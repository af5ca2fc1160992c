"""The laboratory itself: what the simulated device does that a real one does, and the recorder of lowered graphs."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch_npu import npu

from tests.npu.lab import capture, device  # noqa: F401
from tests.npu.lab.constraints import NpuConstraint
from tests.npu.lab.lowering import lower
from tests.npu.lab.traffic import host_traffic

pytestmark = pytest.mark.npu


def ramp() -> Tensor:
    return torch.arange(6.0).to("npu")


READS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x[0].item(),
    "cpu": lambda x: x.cpu(),
    "tolist": lambda x: x.tolist(),
    "bool": lambda x: bool(x[0] > 1),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 2],
    "mask of columns": lambda x: x.view(2, 3)[:, x[:3] > 1],
    "equal": lambda x: torch.equal(x, x),
    "unique": lambda x: x.unique(),
    "copy into pageable memory": lambda x: torch.empty(6).copy_(x),
    "copy that cannot go on": lambda x: torch.empty(6).copy_(x, non_blocking=True),
    "upload": lambda x: torch.arange(6).to("npu"),
    "synchronize": lambda x: npu.synchronize(),
    "stream": lambda x: npu.current_stream().synchronize(),
    "event": lambda x: recorded_event().synchronize(),
}


def recorded_event() -> npu.Event:
    event = npu.Event()
    event.record()
    return event


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_the_host_is_seen_to_wait(read: Callable[[Tensor], object]) -> None:
    x = ramp()
    with host_traffic() as traffic:
        read(x)
    assert len(traffic.stalls) == 1


def test_a_thread_that_looks_for_work_seldom_wakes() -> None:
    """torch_npu's own does ten thousand times a second."""
    ramp().cpu()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
    time.sleep(0.5)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - before < 1000


def test_kernels_and_asynchronous_copies_do_not_make_the_host_wait() -> None:
    x, indices = ramp(), torch.tensor([3, 1]).to("npu")
    read_back, sent = torch.empty(6, pin_memory=True), torch.ones(6).pin_memory()
    with host_traffic() as traffic:
        y = x * 2 + 1
        y[:2] = x.index_select(0, indices)
        y.masked_fill_(x > 4, 0.5)
        y += sent.to("npu", non_blocking=True)
        read_back.copy_(y, non_blocking=True)
        recorded_event()
    assert not traffic.stalls
    assert traffic.launches[-1] == "copy to host"
    assert read_back.tolist() == [4, 2, 6, 8, 10, 1.5]


def test_a_kernel_refuses_a_tensor_of_the_host() -> None:
    with pytest.raises(
        RuntimeError, match="aten::index_select: one tensor is on the device and another one on the host"
    ):
        ramp().index_select(0, torch.tensor([1]))


def test_ops_that_cost_more_than_they_seem_to_are_refused() -> None:
    x, places = torch.zeros(4, 6, device="npu"), torch.tensor([1, 3], device="npu")
    x.index_copy_(0, places, torch.ones(2, 6, device="npu"))
    assert x.sum() == 12
    with pytest.raises(NpuConstraint, match="index_copy: transposes the whole tensor"):
        x.index_copy_(1, places, torch.ones(4, 2, device="npu"))
    with pytest.raises(NpuConstraint, match="scatter_reduce: .*amax.* runs on the host"):
        x.scatter_reduce_(1, torch.zeros(4, 1, dtype=torch.int64, device="npu"), torch.ones(4, 1, device="npu"), "amax")


def test_views_share_memory_and_results_do_not() -> None:
    x = ramp()
    x.view(2, 3)[1].add_(10)
    copy = x + 0
    x.zero_()
    assert copy.tolist() == [0, 1, 2, 13, 14, 15]
    assert x.view(3, 2).t().contiguous().tolist() == [[0, 0, 0], [0, 0, 0]]


@pytest.mark.parametrize("read", [read for name, read in READS.items() if name != "event"])
def test_a_capture_refuses_what_waits_for_the_host(read: Callable[[Tensor], object]) -> None:
    x = ramp()
    with (
        pytest.raises(RuntimeError, match=r"host takes part|NPU function error"),
        npu.graph(npu.NPUGraph()),
    ):
        read(x)
    assert (x + 1).tolist() == [1, 2, 3, 4, 5, 6]


def test_a_capture_computes_nothing_and_a_replay_uses_what_is_in_memory() -> None:
    x, total = ramp(), torch.zeros(6).to("npu")
    graph = npu.NPUGraph()
    with npu.graph(graph):
        doubled = x * 2
        total.add_(doubled)
    assert total.tolist() == [0] * 6
    x.fill_(3)
    graph.replay()
    assert doubled.tolist() == [6] * 6
    x.fill_(5)
    graph.replay()
    assert total.tolist() == [16] * 6


def test_graphs_of_one_pool_share_memory() -> None:
    """What one graph computed does not outlive the replay of another one."""
    x = ramp()
    first, second = npu.NPUGraph(), npu.NPUGraph()
    with npu.graph(first):
        address = (x + 1).data_ptr()
    with npu.graph(second, pool=first.pool()):
        assert (x + 2).data_ptr() == address


def test_a_replay_that_waits_for_its_lengths_is_seen() -> None:
    q = torch.zeros(4, 1, 128, dtype=torch.bfloat16, device="npu")
    cache = torch.zeros(1, 128, 128, dtype=torch.bfloat16, device="npu")
    table = torch.zeros(1, 1, dtype=torch.int32, device="npu")
    graph = npu.NPUGraph()
    with npu.graph(graph, auto_dispatch_capture=True):
        torch.ops.npu.npu_fused_infer_attention_score(
            q, cache, cache, block_table=table, num_heads=1, scale=1.0, input_layout="TND", block_size=128,
            actual_seq_lengths=[4], actual_seq_lengths_kv=[9],
        )  # fmt: skip
    graph.replay()
    with pytest.raises(RuntimeError, match="waits for events"):
        q.cpu()


def test_lowering_counts_what_is_launched() -> None:
    x, weight = torch.empty(2, 4, 8, device="npu"), torch.empty(8, 8, device="npu")
    lowered = lower(lambda x, w: (x.view(-1, 8) @ w).unsqueeze(0), x, weight)
    assert lowered.kernels == {"MatMul": 1}
    assert lowered.by_type["Data"] == 2
    assert lowered.by_type["Reshape"] == 1


def test_lowering_shows_copies_of_caches() -> None:
    def write(k_cache: Tensor, v_cache: Tensor, slots: Tensor, new: Tensor) -> None:
        torch.ops.npu.npu_scatter_pa_kv_cache(new, new, k_cache, v_cache, slots, cache_mode="Norm")

    caches = torch.empty(2, 3, 128, 1, 16, device="npu")
    new, slots = torch.empty(5, 1, 16, device="npu"), torch.empty(5, dtype=torch.int32, device="npu")
    assert lower(write, *caches, slots, new).kernels == {"ScatterPaKvCache": 1}
    assert lower(lambda pool, *given: write(*pool, *given), caches, slots, new).kernels["TensorMove"] == 2


def test_dynamic_lowering_takes_sizes_as_inputs() -> None:
    def shapes(dynamic: bool) -> list[tuple[tuple[int, ...], ...]]:
        lowered = lower(lambda x: x.view(-1, 2, 8) + 1, torch.empty(6, 8, device="npu"), dynamic=dynamic)
        return [op.shapes for op in lowered.ops if op.type == "Data"]

    assert shapes(dynamic=False) == [((6, 8),)]
    assert shapes(dynamic=True) == [((-1, 8),)]
