"""The laboratory itself: what the simulated device does that a real one does, and the recorder of lowered graphs."""

from __future__ import annotations

import ctypes
import resource
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch_npu import npu

from lopa_ascend.backend.npu import DEVICE, hccl
from lopa_ascend.parallel import mesh
from tests.npu.lab import attention, cann, capture, collectives, device, units  # noqa: F401
from tests.npu.lab.constraints import NpuConstraint
from tests.npu.lab.limits import streams_taken
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
    # torch_npu 2.10 computes it on the host by itself.
    with pytest.raises(RuntimeError, match="scatter_reduce: .*amax.* runs on the host|_copy_from_and_resize"):
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


def test_a_communicator_takes_streams_by_its_own_expansion(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's tensor parallel one runs on the vector cores, whatever the default."""
    monkeypatch.delenv(hccl.EXPANSION_VARIABLE, raising=False)
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        tp, bp = (
            mesh.new_groups(DEVICE, purpose, ranks, timedelta(seconds=10), timeout=60).group_name
            for purpose, ranks in (("tp", [[0, 1], [2, 3]]), ("bp", [[0, 2], [1, 3]]))
        )
        assert streams_taken([frozenset({tp})] * 3) == 3 * 2
        assert streams_taken([frozenset({tp, bp})] * 3) == 3 * 4 + 40
    finally:
        dist.destroy_process_group()


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


# ---- what a capture and an update refuse ---------------------------------------------------------------------------


def attention_arguments(entries: int = 2, pages: int = 12, queries: int = 4) -> dict[str, Any]:
    """Of npu_fused_infer_attention_score.default, with TND and few keys."""
    cache = torch.zeros(entries * pages, 128, 128, dtype=torch.bfloat16, device="npu")
    return {
        "query": torch.ones(entries * queries, 1, 128, dtype=torch.bfloat16, device="npu"),
        **dict.fromkeys(("key", "value"), cache),
        "block_table": torch.zeros(entries, pages, dtype=torch.int32, device="npu"),
        **{"num_heads": 1, "scale": 0.5, "input_layout": "TND", "block_size": 128},
        "actual_seq_lengths": [queries * (entry + 1) for entry in range(entries)],
        "actual_seq_lengths_kv": [9] * entries,
    }


def captured_attention(**changes: Any) -> npu.NPUGraph:
    given = {**attention_arguments(), **changes}
    graph, tensors = npu.NPUGraph(), [given.pop(name) for name in ("query", "key", "value")]
    with npu.graph(graph, auto_dispatch_capture=True):
        torch.ops.npu.npu_fused_infer_attention_score(*tensors, **given)
    graph.kept = tensors, given
    return graph


def updated(graph: npu.NPUGraph, **changes: Any) -> None:
    ramp().cpu()  # waits for earlier replays
    graph.replay()
    try:
        graph.update([changes])
    finally:  # so that nothing waits for this replay
        device.recorder.taker.take = capture._Captures.waiting = None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"actual_seq_lengths_kv": [9, 9, 9]}, "a task of 2 entries is updated with 3 KV lengths"),
        ({"input_layout": "BSH"}, "RT_ERROR_KERNEL_TYPE: .* captured as Fused.*TND.* and updated as PromptFlash"),
        ({"actual_seq_lengths": [3, 8]}, "changes other arguments of a task than its KV lengths"),
        ({"scale": 2.0}, "changes other arguments of a task than its KV lengths"),
    ],
)
def test_an_update_changes_kv_lengths_alone(changes: dict[str, Any], message: str) -> None:
    graph = captured_attention()
    updated(graph, actual_seq_lengths_kv=[9, 1500])
    with pytest.raises(RuntimeError, match=message):
        updated(graph, **{"actual_seq_lengths_kv": [9, 9], **changes})


def test_an_update_may_need_no_more_workspace_than_the_capture_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the host computes the most workspace for few keys. A device would write into other tensors."""
    few = attention.workspace_bytes
    library = torch.library.Library("npu", "IMPL")

    def too_small(query: Tensor, *_: Any, **__: Any) -> Tensor:
        return query.new_empty(few(query, 1, "TND", [9, 9]), dtype=torch.uint8)

    library.impl("_npu_fused_infer_attention_score_get_max_workspace", too_small, "CPU", allow_override=True)
    try:
        graph = captured_attention()
    finally:
        library._destroy()
    updated(graph, actual_seq_lengths_kv=[900, 1000])
    with pytest.raises(NpuConstraint, match=r"needs \d+ bytes of workspace for these KV lengths and has 512"):
        updated(graph, actual_seq_lengths_kv=[9, 1100])


@pytest.mark.parametrize("launch", [lambda x: x.copy_(x + 1), lambda x: x.long().cumsum(0)])
def test_a_group_holds_kernels_of_the_cores_alone(launch: Callable[[Tensor], object]) -> None:
    x, event = ramp(), npu.ExternalEvent()

    def capture_group() -> None:
        with npu.graph(npu.NPUGraph()):
            stream = npu.current_stream()
            event.wait(stream)
            npu.graph_task_group_begin(stream)
            launch(x)

    with pytest.raises(RuntimeError, match="507009: task not supported"):
        capture_group()


def unit_of(run: Callable[[], object]) -> list[str]:
    with npu.graph(npu.NPUGraph()):
        run()
    return capture.tapes()[-1].on_aicpu


@pytest.mark.parametrize(("rows", "columns", "on_cpu"), [(2000, 8192, False), (2001, 8192, True), (2001, 4096, False)])
def test_a_gather_of_many_long_rows_runs_on_the_devices_cpu(rows: int, columns: int, on_cpu: bool) -> None:
    with device.nothing_computed():
        x, index = torch.empty(rows, columns, device="npu"), torch.zeros(rows, 1, dtype=torch.int64, device="npu")
    assert unit_of(lambda: x.gather(1, index)) == ["aten::gather"] * on_cpu


def test_sums_and_sorts_of_wide_integers_run_on_the_devices_cpu() -> None:
    x, wide = ramp(), ramp().long()
    assert unit_of(lambda: (x.cumsum(0), x.sort(), x.topk(2), wide.sum(), wide + 1)) == []
    assert unit_of(lambda: wide.cumsum(0)) == ["aten::cumsum"]
    assert unit_of(lambda: wide.sort(stable=True)) == ["aten::sort.stable"]


def test_an_op_that_no_list_has_is_not_captured() -> None:
    x = ramp()
    with pytest.raises(RuntimeError, match="aten::erfinv.*not known whether a die"), npu.graph(npu.NPUGraph()):
        x.erfinv()


def test_collectives_leave_the_vector_cores_above_their_limit() -> None:
    """For four ranks: sums of 4 MiB, gathers of 512 KiB in all."""
    sums = [torch.empty(mib << 19, dtype=torch.bfloat16, device="meta") for mib in (4, 5)]
    assert [units.unit_of_collective("all_reduce_", x, 4) for x in sums] == [units.AIV, units.AICPU]
    gathers = [torch.empty(kib << 10, dtype=torch.int8, device="meta") for kib in (128, 129)]
    assert [units.unit_of_collective("all_gather_into_tensor", x, 4) for x in gathers] == [units.AIV, units.AICPU]


def test_a_collective_must_be_waited_for_before_its_result_is_used() -> None:
    functional, x = torch.ops._c10d_functional, torch.ones(8, device="npu")
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    group = dist.group.WORLD
    try:
        with npu.graph(npu.NPUGraph()):
            functional.wait_tensor(functional.all_reduce(x + 1, "sum", group.group_name)).add_(1)
        assert capture.tapes()[-1].stream_waits == 2
        with pytest.raises(RuntimeError, match="without having waited for it"), npu.graph(npu.NPUGraph()):
            functional.all_reduce(x + 1, "sum", group.group_name).add_(1)
    finally:
        dist.destroy_process_group()


def test_events_of_tasks_are_values_in_the_devices_memory() -> None:
    """As since torch_npu 2.9.0.post6 and 2.10.0.post4 with a CANN that has aclrtValueWait and aclrtValueWrite."""
    written = ctypes.c_ulong.in_dll(cann, "standin_values_written")
    npu.synchronize()
    before = written.value
    updated(captured_attention(), actual_seq_lengths_kv=[9, 10])
    npu.synchronize()  # a thread of torch_npu's records them
    assert written.value - before == 1
