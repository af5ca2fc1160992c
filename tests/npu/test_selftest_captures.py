"""The captured cases of the self-test alone, on simulated devices that do something else in a graph."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lopa_ascend.backend.npu import compiler
from lopa_ascend.backend.npu.captured import KV_LENGTHS
from scripts.selftest.findings import eager_ops, examine_cases
from tests.dist.ranks import finish, start
from tests.kernel_cases import Case
from tests.npu import captures
from tests.npu.captured_cases import layer_cases, policy_cases
from tests.npu.lab import attention, capture, device
from tests.tiers import slow_but

pytestmark = pytest.mark.npu
OTHER, THREAD, SAME, LONG, TWO_KERNELS = (
    "captured layer, replayed with other KV lengths",
    "captured layer, replayed with KV lengths that a thread changes",
    "captured layer, replayed with the KV lengths of the capture",
    "captured layer, replayed with up to 4500 keys",
    "captured layer of two attention kernels",
)


def verdicts_of(cases: Iterable[Case]) -> dict[str, str]:
    """By name, without all other checks."""
    return {finding.name: finding.verdict for finding in examine_cases(cases, "further cases", 1)}


def wrong_of(cases: Iterable[Case]) -> list[str]:
    """The names of the cases whose result is wrong. Fails if the device refuses a case."""
    verdicts = verdicts_of(cases)
    assert "refused" not in verdicts.values()
    return [name for name, verdict in verdicts.items() if verdict == "WRONG"]


def test_where_a_task_keeps_other_lengths_for_one_replay_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """And then has those of the capture again."""
    run, change, of_capture = capture.Task.run, capture.change, dict[int, Any]()

    def noted(op: Any, args: Any, kwargs: Any) -> Any:
        group = capture._Captures.changing
        assert group is not None
        (task,) = (task for task in group.tasks if task.op is op)
        of_capture[id(task)] = task.kwargs[KV_LENGTHS]
        return change(op, args, kwargs)

    def forgetful(task: capture.Task) -> None:
        run(task)
        if id(task) in of_capture:
            task.kwargs[KV_LENGTHS] = of_capture.pop(id(task))

    monkeypatch.setattr(capture, "change", noted)
    monkeypatch.setattr(capture.Task, "run", forgetful)
    wrong = wrong_of(layer_cases(eager_ops("TND")))
    assert OTHER in wrong
    assert THREAD in wrong
    assert SAME not in wrong


def test_where_lengths_always_go_to_the_first_kernel_of_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:

    def misled(op: Any, args: Any, kwargs: Any) -> Any:
        assert capture._Captures.changing is not None
        (task,) = capture._Captures.changing.tape.groups[0].tasks
        task.kwargs = {**task.kwargs, KV_LENGTHS: kwargs[KV_LENGTHS]}
        return kwargs["out"]

    monkeypatch.setattr(capture, "change", misled)
    assert wrong_of(layer_cases(eager_ops("TND"))) == [TWO_KERNELS]


def test_where_attention_reads_no_more_than_4096_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = attention.attend

    def short(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        return attend(query, key[:4096], value[:4096], scale)

    monkeypatch.setattr(attention, "attend", short)
    assert wrong_of(layer_cases(eager_ops("TND"))) == [LONG]


def test_captured_layers_of_entries_of_16_queries() -> None:
    assert wrong_of(layer_cases(eager_ops("TND16"))) == []


def test_captures_have_the_lengths_of_the_engines() -> None:
    assert captures.NUM_LENGTHS == compiler.NUM_LENGTHS


@pytest.mark.parametrize("in_graphs_only", [False, True])
def test_where_the_policy_is_not_computed_as_on_a_cpu(monkeypatch: pytest.MonkeyPatch, in_graphs_only: bool) -> None:
    compute, run = device.cpu_result, capture.Task.run

    def least(op: Any, args: Any, kwargs: Any) -> Any:
        is_topk = op is torch.ops.aten.topk.default
        return compute(op, args, {**kwargs, "largest": False} if is_topk else kwargs)

    def run_wrongly(task: capture.Task) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(device, "cpu_result", least)
            run(task)

    monkeypatch.setattr(capture.Task, "run", run_wrongly)
    if not in_graphs_only:
        monkeypatch.setattr(device, "cpu_result", least)
    verdicts = verdicts_of(policy_cases(eager_ops("TND")))
    assert set(verdicts.values()) == ({"ok", "WRONG"} if in_graphs_only else {"WRONG"})
    assert all(verdict == "WRONG" for name, verdict in verdicts.items() if name.endswith("replayed"))
    assert all(name.startswith("captured ") for name in verdicts), "eager mode does without"


RANK = """
import json, sys
from dataclasses import asdict
from functools import partial
from unittest import mock
import tests.npu.lab
import torch
from lopa_ascend.backend.npu import Npu
from lopa_ascend.config import EngineConfig
from lopa_ascend.parallel import mesh
from lopa_ascend.parallel.launch import Rendezvous, exit_rank
from scripts.selftest.findings import Finding, eager_ops, examine
from scripts.selftest import times as measured
from scripts.selftest.node import ask_vector_cores, examine_groups, run_on_all
from tests.npu.exchanges import exchanges_case
from tests.npu.lab import capture, collectives, device

tp, bp = map(int, sys.argv[2:])
config = EngineConfig(device="npu", tensor_parallel_size=tp, branch_parallel_size=bp)
with mock.patch.object(Npu, "collectives", "gloo"):
    joined = mesh.Mesh.join(config, Rendezvous.from_environment(), exit_rank)
measured.SIZES = (1024, 4096)
device_of_rank, known = torch.device("npu", 0), [Finding("attention TND, 32 queries each", "ok")]
times, findings = examine_groups(joined, device_of_rank, known, 1)
(*_, step) = (tape for tape in capture.tapes() if tape.groups)
names = [task.op.name() for task in step.tasks]
if tp > 1:
    found, asked = ask_vector_cores(joined, device_of_rank, known, 1)
    times |= found
    assert asked.message.startswith("right; if the times"), asked

run = capture.Task.run

def without_sums(task):
    # As where an all-reduce does nothing in a graph that waits for updates of its attention.
    (tape,) = (tape for tape in capture.tapes() if any(task is other for other in tape.tasks))
    if not tape.groups or "all_reduce" not in task.op.name():
        run(task)

if bp == 1:
    with mock.patch.object(capture.Task, "run", without_sums):
        case = exchanges_case(eager_ops("TND"), joined.tp, joined.bp, partial(run_on_all, joined, "again"))
        findings.append(examine(case, 1))
joined.close()
with open(f"{sys.argv[1]}.{joined.rank}", "w") as file:
    json.dump([[asdict(finding) for finding in findings], names, times], file)
"""


@pytest.mark.multirank
@pytest.mark.parametrize(("tp", "bp"), slow_but([(2, 1), (1, 2), (2, 2)], [(2, 1)]))
def test_exchanges_of_a_captured_step(tp: int, bp: int, tmp_path: Path) -> None:
    errors = finish(start(tp * bp, "-c", RANK, str(tmp_path / "out"), str(tp), str(bp)))
    assert "captured attention between collectives, as in a step ... ok\n" in errors[0]
    assert "..." not in errors[-1], "rank 0 writes the progress"
    for rank in range(tp * bp):
        findings, names, times = json.loads((tmp_path / f"out.{rank}").read_text())
        groups = ["tp"] * (tp > 1) + ["bp"] * (bp > 1)
        asked = ["tp, vector cores alone, captured"] * (tp > 1)
        assert list(times) == [*groups, *(f"{name}, captured" for name in groups), *asked]
        assert all(list(found) == ["1024", "4096"] for found in times.values())
        assert [finding["verdict"] for finding in findings] == ["ok", "ok", "WRONG"][: len(findings)]
        assert len(findings) == (3 if bp == 1 else 2)
        gather = "lab::all_gather_into_tensor"
        exchanged = [name for name in names if name.startswith("lab::") or "attention" in name]
        layer = ["npu::npu_fused_infer_attention_score.out", *["lab::all_reduce_"] * (tp > 1)]
        assert exchanged == [*layer, *layer, *[gather] * ((tp > 1) + (bp > 1))]
