"""The compilers of decode steps, for a small Dream with its head, followed by ops like those of the policy.

A step that ``ge`` compiles runs as torchair's FX graph after its passes; what GE would make of it cannot be seen here.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch_npu import npu

from lopa_ascend.backend.compiler import Compiler, GraphError
from lopa_ascend.backend.interface import Entries
from lopa_ascend.backend.npu import hccl
from lopa_ascend.backend.npu.captured import KV_LENGTHS
from lopa_ascend.backend.npu.ops import NpuOps
from lopa_ascend.config import ParameterError
from lopa_ascend.families import dream
from lopa_ascend.graph.compile import load_compiler
from lopa_ascend.kv.pages import PAGE_SIZE
from lopa_ascend.model.base import ForwardInputs
from lopa_ascend.model.decoder import Decoder
from tests.npu.lab import capture, device, engine  # noqa: F401
from tests.npu.lab.traffic import host_traffic
from tests.npu.samples import SMALL_VOCABULARY, dream_weights, small_dream
from tests.tiers import slow_but

pytestmark = pytest.mark.npu
MODES = {"npugraph_ex": "replay", "ge": "ge graph"}
LENGTH = 8
COLUMNS = 4
NUM_PAGES = 10  # so few that one attention kernel takes two page tables


class Sample:
    """A model with caches, and a step over rows of one block each. Its last tensor is a state that it changes."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        config = small_dream(2)
        weights = {name: x.to("npu") for name, x in dream_weights(config, torch.bfloat16).items()}
        self.model = Decoder(dream.FAMILY, config, weights, NpuOps())
        shape = (2, 2, NUM_PAGES, PAGE_SIZE, config.num_kv_heads, config.head_dim)
        self.caches = torch.randn(shape).to(torch.bfloat16).to("npu")
        self.k_caches, self.v_caches = map(list, self.caches)

    def tensors(self, rows: int) -> list[Tensor]:
        given = [torch.zeros(rows * LENGTH, dtype=torch.int64, device="npu") for _ in range(4)]  # see ``step``
        page_tables = torch.zeros(rows, COLUMNS, dtype=torch.int32, device="npu")
        return [*given, page_tables, torch.zeros(3, rows, device="npu")]

    def step(self, tensors: Sequence[Tensor], kv_lengths: Sequence[int]) -> Tensor:
        """The likeliest token of every position, and the state, which keeps the largest logit that each row has had."""
        tokens, positions, slot_mapping, wanted, page_tables, state = tensors
        rows = len(kv_lengths)
        entries = Entries((LENGTH,) * rows, tuple(kv_lengths), page_tables, tuple(range(rows)), (0,) * rows)
        inputs = ForwardInputs(tokens, positions, slot_mapping, None, entries, wanted)
        logits = self.model.logits(self.model.forward(inputs, self.k_caches, self.v_caches)).float()
        most, best = logits.max(-1)
        most = most.view(rows, LENGTH).max(-1).values
        old = state.index_select(0, torch.ones(1, dtype=torch.int64, device=state.device))
        new = torch.where(most > old, most, old)
        torch.ops.npu.npu_scatter_nd_update_(state, torch.ones(1, 1, dtype=torch.int32, device=state.device), new)
        return torch.cat([best.to(torch.int32), state.view(torch.int32).view(-1)])

    def compiled(self, compiler: Compiler, rows: int) -> Bucket:
        return Bucket(self, compiler, rows)


def fill(tensors: Sequence[Tensor], seed: int) -> None:
    """Puts random values into all tensors but the state."""
    generator = torch.Generator().manual_seed(seed)
    count, rows = len(tensors[0]), len(tensors[4])
    new = [
        torch.randint(SMALL_VOCABULARY, (count,), generator=generator),
        torch.randint(2048, (count,), generator=generator),
        torch.randperm(NUM_PAGES * PAGE_SIZE, generator=generator)[:count],
        torch.randperm(count, generator=generator),
        torch.stack([torch.randperm(NUM_PAGES, generator=generator)[:COLUMNS] for _ in range(rows)]),
    ]
    for tensor, values in zip(tensors[:-1], new, strict=True):
        tensor.copy_(values)


def filled(sample: Sample, rows: int) -> list[Tensor]:
    tensors = sample.tensors(rows)
    fill(tensors, 0)
    return tensors


class Bucket:
    """A compiled step, and the same step in eager mode."""

    def __init__(self, sample: Sample, compiler: Compiler, rows: int):
        self.sample, self.rows = sample, rows
        self.tensors = filled(sample, rows)
        self.run = compiler.compile(sample.step, f"rows{rows}", self.tensors, [PAGE_SIZE] * rows)

    def fill(self, seed: int) -> None:
        fill(self.tensors, seed)

    def expected(self, *steps: list[int]) -> tuple[Tensor, Tensor]:
        """The last result, and the caches, of eager steps with these lengths. State and caches are then restored."""
        state, caches = self.tensors[-1].clone(), self.sample.caches.clone()
        result = [self.sample.step(self.tensors, kv_lengths).cpu() for kv_lengths in steps][-1]
        written = self.sample.caches.cpu()
        self.tensors[-1].copy_(state)
        self.sample.caches.copy_(caches)
        return result, written


@pytest.fixture(scope="module")
def sample() -> Sample:
    return Sample()


@pytest.mark.parametrize("mode", slow_but(MODES, ["npugraph_ex"]))
def test_60_steps_of_three_buckets_compile_three_graphs(sample: Sample, mode: str) -> None:
    compiler = load_compiler("npu", mode, key="sample")
    graphs, before = counters["stats"]["unique_graphs"], capture.tapes()
    buckets = [sample.compiled(compiler, rows) for rows in (3, 1, 2)]
    compiler.freeze()
    assert compiler.num_compilations == 3
    assert len(compiler.captured) == (3 if mode == "npugraph_ex" else 0)
    for number in range(30):
        bucket = buckets[number * 7 % 3]
        bucket.fill(number)
        first = [LENGTH + 12 * number + row for row in range(bucket.rows)]
        second = [length + 2 for length in first]
        expected = bucket.expected(first, second) if number % 10 < 3 else None
        with host_traffic() as traffic:
            bucket.run(first)
            result = bucket.run(second)  # launched before the device has computed the first one
        assert traffic.launches == [MODES[mode]] * 2
        assert not traffic.stalls
        if expected is not None:
            assert torch.equal(result.cpu(), expected[0])
            assert torch.equal(sample.caches.cpu(), expected[1])
    assert counters["stats"]["unique_graphs"] == graphs + 3
    assert len(capture.tapes(other_than=before)) == len(compiler.captured)
    assert (compiler.num_compilations, compiler.num_refused) == (3, 0)


def test_a_captured_step_launches_what_the_eager_one_does(sample: Sample) -> None:
    """So a captured step copies neither caches nor weights nor inputs. In each of the two layers one kernel splits q, k
    and v, which are three copies eagerly."""
    bucket = sample.compiled(load_compiler("npu", "npugraph_ex", key="sample"), 4)
    with host_traffic() as eager:
        sample.step(bucket.tensors, [PAGE_SIZE] * 4)
    captured = [task.op._schema.name for task in capture.tapes()[-1].tasks]
    launched = Counter(eager.launches)
    launched.subtract({"aten::clone": 2 * 3, "aten::split_with_sizes_copy": -2})
    assert Counter(captured) <= launched
    assert captured.count("npu::npu_scatter_pa_kv_cache") == 2


def test_graphs_share_their_memory(sample: Sample) -> None:
    compiler = load_compiler("npu", "npugraph_ex", key="sample")
    buckets, held = [], []
    for rows in (4, 3, 2):
        buckets.append(sample.compiled(compiler, rows))
        held.append(compiler.memory)
    assert held[0] > 0
    assert held[2] == held[0]


@pytest.mark.parametrize("mode", slow_but(MODES, ["npugraph_ex"]))
def test_the_cache_outlives_a_compiler(sample: Sample, mode: str, tmp_path: Path) -> None:
    for key, loaded in (("a", 0), ("a", 1), ("b", 0)):
        compiler = load_compiler("npu", mode, key=key, cache_dir=tmp_path)
        bucket = sample.compiled(compiler, 2)
        assert (compiler.num_loaded, compiler.num_compilations) == (loaded, 1 - loaded)
        bucket.fill(1)
        result, _ = bucket.expected([100, 300])
        assert torch.equal(bucket.run([100, 300]).cpu(), result)


@pytest.mark.parametrize("mode", slow_but(MODES, ["npugraph_ex"]))
def test_a_damaged_entry_is_compiled_anew(
    sample: Sample, mode: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def counts() -> tuple[int, int]:
        compiler = load_compiler("npu", mode, key="damage", cache_dir=tmp_path)
        bucket = sample.compiled(compiler, 2)
        bucket.fill(1)
        result, _ = bucket.expected([100, 300])
        assert torch.equal(bucket.run([100, 300]).cpu(), result)
        return compiler.num_loaded, compiler.num_compilations

    def damage() -> None:
        (file,) = tmp_path.rglob("compiled_module")
        os.truncate(file, file.stat().st_size // 2)

    assert counts() == (0, 1)
    damage()
    assert counts() == (0, 1)
    assert "compiled_module is damaged (UnpicklingError), and is compiled anew" in caplog.text
    assert counts() == (1, 0)


def test_a_cache_that_others_may_write_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(ParameterError, match="graph_cache: .* must be writable by this user alone"):
        load_compiler("npu", "npugraph_ex", key="sample", cache_dir=tmp_path)


@pytest.mark.skipif(not hasattr(functorch_config, "error_on_custom_op_aliasing"), reason="this torch has no such check")
def test_ops_that_return_what_they_are_given_pass_where_torch_is_strict(sample: Sample) -> None:
    """Torch is strict where the environment has CI set."""
    with functorch_config.patch(error_on_custom_op_aliasing=True):
        sample.compiled(load_compiler("npu", "npugraph_ex", key="sample"), 1)


@pytest.mark.parametrize("mode", MODES)
def test_lengths_that_go_elsewhere_are_refused(sample: Sample, mode: str) -> None:
    def constant(tensors: Sequence[Tensor], kv_lengths: Sequence[int]) -> Tensor:
        return sample.step(tensors, [kv_lengths[0]] * 2)

    tensors = filled(sample, 2)
    with pytest.raises(
        GraphError, match=r"bucket constant: its graphs have \[1\] inputs for KV lengths, and the step has 2"
    ):
        load_compiler("npu", mode, key="sample").compile(constant, "constant", tensors, [9, 9])


def test_a_graph_whose_attention_takes_other_lengths_is_refused(sample: Sample) -> None:
    def reversed_lengths(tensors: Sequence[Tensor], kv_lengths: Sequence[int]) -> Tensor:
        return sample.step(tensors, kv_lengths[::-1])

    with pytest.raises(GraphError, match="bucket reversed: attention takes other KV lengths"):
        load_compiler("npu", "npugraph_ex", key="reversed").compile(
            reversed_lengths, "reversed", filled(sample, 2), [9, 9]
        )


def test_a_device_without_room_for_another_graph_is_named(sample: Sample, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*_: Any) -> None:
        raise RuntimeError("NPU function error: aclrtCreateStream, error code is 207008")

    compiler = load_compiler("npu", "npugraph_ex", key="sample")
    sample.compiled(compiler, 1)
    monkeypatch.setattr(capture, "record", no_room)
    with pytest.raises(GraphError, match="bucket rows2: after 1 graphs the device has no streams"):
        sample.compiled(compiler, 2)


def test_what_comes_too_late_or_is_too_much_is_refused(sample: Sample) -> None:
    compiler = load_compiler("npu", "npugraph_ex", key="sample")
    with pytest.raises(GraphError, match="holds 64 graphs; of 66 buckets these are too many: b64, b65"):
        compiler.check_buckets([f"b{index}" for index in range(66)])
    with pytest.raises(ValueError, match="bucket short: a KV length is less than 2"):
        compiler.compile(sample.step, "short", sample.tensors(2), [9, 1])
    compiler.freeze()
    with pytest.raises(GraphError, match="bucket rows1 was not compiled before serving began"):
        sample.compiled(compiler, 1)
    assert compiler.num_refused == 1
    with pytest.raises(ValueError, match="unknown value 'inductor'; choose one of npugraph_ex, ge, eager"):
        load_compiler("npu", "inductor", key="sample")


def test_lengths_that_a_task_has_already_are_not_written_again(sample: Sample) -> None:
    """Three rows are two attention kernels a layer: of two page tables, and of one."""
    bucket = sample.compiled(load_compiler("npu", "npugraph_ex", key="sample"), 3)
    layers = sample.model.config.num_layers
    steps = [
        ([PAGE_SIZE] * 3, 2 * layers),  # the capture had lengths of its own
        ([PAGE_SIZE] * 3, 0),
        ([100, 300, 200], 2 * layers),
        ([100, 300, 200], 0),
        ([100, 300, 201], layers),
        ([100, 302, 201], layers),
        ([100, 302, 201], 0),
    ]
    for number, (kv_lengths, updates) in enumerate(steps):
        bucket.fill(number)
        expected = bucket.expected(kv_lengths)
        with host_traffic() as traffic:
            result = bucket.run(kv_lengths)
        assert traffic.updates == updates
        assert torch.equal(result.cpu(), expected[0])
        assert torch.equal(sample.caches.cpu(), expected[1])


def captured_sample(sample: Sample) -> npu.NPUGraph:
    """A graph of a step of one row, with the KV length 9."""
    tensors, graph = filled(sample, 1), npu.NPUGraph()
    with npu.graph(graph, auto_dispatch_capture=True):
        sample.step(tensors, [9])
    return graph


def test_the_laboratory_sees_tasks_that_change_under_a_replay(sample: Sample) -> None:
    """As they would under a step that does not wait for the step before it."""
    graph = captured_sample(sample)
    graph.replay()
    graph.update([{KV_LENGTHS: [9]}])
    graph.replay()
    with pytest.raises(RuntimeError, match="changed while a replay of it may still run"):
        graph.update([{KV_LENGTHS: [9]}])
    with pytest.raises(RuntimeError, match="waits for events"):
        sample.caches.cpu()


def test_the_laboratory_sees_events_that_come_too_early_or_not_at_all(sample: Sample) -> None:
    graph = captured_sample(sample)
    first, *others = [record.event for record in graph.graph_dispatch_mode.graph_dispatch_records]
    graph.replay()
    first.record()
    with pytest.raises(RuntimeError, match="waits for events"):
        sample.caches.cpu()
    graph = captured_sample(sample)
    first, *others = [record.event for record in graph.graph_dispatch_mode.graph_dispatch_records]
    graph.replay()
    for event in (first, *others):
        event.record()
    graph.replay()
    with pytest.raises(RuntimeError, match="recorded before an earlier replay has reset it"):
        first.record()
    with pytest.raises(RuntimeError, match="waits for events"):
        sample.caches.cpu()


def test_the_laboratory_sees_a_task_that_changes_after_its_event(sample: Sample) -> None:
    graph = captured_sample(sample)
    graph.graph_dispatch_mode.graph_dispatch_records[0].event.record()
    with pytest.raises(RuntimeError, match="changed while a replay of it may still run"):
        graph.update([{KV_LENGTHS: [9]}])


def test_a_bucket_that_another_rank_lacks_is_compiled_by_all_and_ranks_wait_for_each_other(
    sample: Sample, tmp_path: Path
) -> None:
    found = []
    for others in (True, False):
        asked: list[bool] = []

        def on_every_rank(fact: bool, others: bool = others, asked: list[bool] = asked) -> bool:
            asked.append(fact)
            return fact and others

        compiler = load_compiler("npu", "npugraph_ex", key="ranks", cache_dir=tmp_path)
        compiler.on_every_rank = on_every_rank
        sample.compiled(compiler, 1)
        compiler.freeze()
        found.append((compiler.num_loaded, compiler.num_compilations, asked))
    # Whether it is kept; before the first launch of what was compiled, and of what was loaded; when all is done.
    assert found == [(0, 1, [False, True, True, True]), (0, 1, [True, True, True, True])]


def test_only_the_tensor_parallel_communicator_runs_on_the_vector_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(hccl.EXPANSION_VARIABLE, raising=False)
    assert expansion_modes() == {"tp": 3, "bp": None}
    monkeypatch.setenv(hccl.EXPANSION_VARIABLE, "AI_CPU")
    assert expansion_modes() == {"tp": None, "bp": None}
    monkeypatch.setenv(hccl.EXPANSION_VARIABLE, "AIV")
    assert expansion_modes() == {"tp": None, "bp": 2}
    monkeypatch.setenv(hccl.TP_VARIABLE, "AIV_ONLY")
    assert expansion_modes() == {"tp": 4, "bp": 2}
    monkeypatch.setenv(hccl.TP_VARIABLE, "4")
    with pytest.raises(ParameterError, match="LOPA_TP_EXPANSION_MODE: unknown value '4'; choose one of AI_CPU, AIV,"):
        expansion_modes()


def expansion_modes() -> dict[str, int | None]:
    found = {purpose: hccl.communicator_options(purpose, 60).hccl_config for purpose in ("tp", "bp")}
    return {purpose: config.get("hccl_op_expansion_mode") for purpose, config in found.items()}


def test_a_communicator_has_small_buffers_and_the_timeout_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(hccl.BUFFER_VARIABLE, raising=False)
    config = hccl.communicator_options("bp", 91).hccl_config
    assert (config["hccl_buffer_size"], config["hccl_exec_timeout"]) == (64, 91)
    monkeypatch.setenv(hccl.BUFFER_VARIABLE, "200")
    assert "hccl_buffer_size" not in hccl.communicator_options("bp", 91).hccl_config
