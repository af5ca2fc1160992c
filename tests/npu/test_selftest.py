"""The self-test on the simulated device: what it says where all is well, and where a kernel is not."""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_npu import npu

from scripts.bench.plan.devices import load_device
from scripts.selftest import findings, times
from scripts.selftest.__main__ import main
from scripts.selftest.findings import Finding, eager_ops, examine_cases, merged
from scripts.selftest.times import slowest
from tests.npu import cases, op_cases
from tests.npu.lab import attention, capture
from tests.npu.lab.constraints import require
from tests.tiers import slow_but

pytestmark = pytest.mark.npu


@pytest.fixture(autouse=True)
def price_of_an_entry(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, float]]:
    """[queries, seconds]: entries with at least so many queries, at as many keys as the longer timed case has, take so
    much longer, by a clock that counts this process's CPU time and these seconds. So what is faster does not depend on
    what else this machine does."""
    attend, prices, paid = attention.attend, [(1, 0.02)], [0.0]

    def priced(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        paid.extend(seconds for queries, seconds in prices if len(query) >= queries and len(key) == 4096)
        return attend(query, key, value, scale)

    clock = SimpleNamespace(perf_counter=lambda: time.process_time() + sum(paid))
    monkeypatch.setattr(attention, "attend", priced)
    monkeypatch.setattr(times, "time", clock)
    return prices


@pytest.fixture(autouse=True)
def small_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Int8 products of few outputs and narrow experts, since larger ones take seconds here, a large pool of few pages,
    and attention of one block in place of many."""
    monkeypatch.setattr(op_cases, "MAX_OUTPUTS", 512)
    monkeypatch.setattr(op_cases, "EXPERT_HIDDEN", 64)
    monkeypatch.setattr(cases, "LARGE", 2**23)
    for module in (times, findings):
        monkeypatch.setattr(module, "MANY", ((1, 1024),))
    monkeypatch.setattr(times, "PRODUCTS", ((96, 64), (64, 32)))


@contextmanager
def replaced(name: str, kernel: Any) -> Iterator[None]:
    """The laboratory's kernel of ``npu::name`` is another one for a while."""
    library = torch.library.Library("npu", "IMPL")
    library.impl(name, kernel, "CPU", allow_override=True)
    yield
    library._destroy()


def reported(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, str], str]:
    """(exit status, verdicts by check, the last line) of the printed report. The progress names every check too."""
    status = main(["--repeats", "1", *arguments])
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    words = [line.split(maxsplit=1) for line in lines if line.split(" ")[0] in ("ok", "refused", "WRONG", "asked")]
    verdicts = {rest.split("  ")[0]: verdict for verdict, rest in words}
    progress = dict(line.split(" ... ") for line in printed.err.splitlines() if " ... " in line)
    assert list(progress) == list(verdicts)
    assert all(progress[name].startswith(verdict) for name, verdict in verdicts.items() if verdict != "asked")
    return status, verdicts, lines[-1]


def test_where_all_is_well(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(op_cases, "MAX_OUTPUTS", 2 * cases.S.inner)
    file = tmp_path / "report.json"
    status, verdicts, last = reported(capsys, "--json", str(file))
    assert last == "options for the server: --device npu --attention-layout TND --graph-mode npugraph_ex"
    assert status == 0
    assert len(verdicts) == 63
    assert sum(name.startswith("experts: ") for name in verdicts) == 3
    assert sum(name.startswith("W8A8: ") for name in verdicts) == 19
    assert [name for name, verdict in verdicts.items() if verdict != "ok"] == [
        "attention, pool smaller than the entries' pages, at once"
    ]
    names = [name.split(",")[0].split(":")[0] for name in verdicts]
    assert names[-20:] == ["W8A8"] * 19 + ["attention"], "what may leave the device unusable comes last"
    report = json.loads(file.read_text())
    assert {finding["name"]: finding["verdict"] for finding in report["findings"]} == verdicts
    assert report["stack"]["CANN"] == "9.1.0"
    assert last.endswith(report["options"])
    by_layout = report["attention_us"]
    assert {layout: list(found) for layout, found in by_layout.items()} == {
        layout: ["4 blocks, 544 keys", "4 blocks, 4096 keys", "1 blocks, 1024 keys"] for layout in ("TND", "TND16")
    }
    assert by_layout["TND"]["4 blocks, 4096 keys"] > by_layout["TND"]["4 blocks, 544 keys"]
    assert list(report["updates_us"]["1"]) == [times.KEPT, times.CHANGED, times.IN_THREAD]
    assert report["updates_us"]["0"] == "not measured: this process does not know how it was started"
    assert report["parts"]["products_bytes"] == 2 * (96 * 64 + 64 * 32)
    measured = load_device(str(file))
    assert measured.low.memory_efficiency == measured.high.memory_efficiency
    assert measured.high.host_layer_s < 1


@pytest.mark.slow  # another process loads torch_npu
def test_replays_are_also_timed_by_a_process_with_another_task_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "orig_argv", [sys.executable, "-m", "tests.npu.lab", "scripts.selftest", "--json", "x"])
    by_queue = times.times_by_queue(eager_ops("TND"), repeats=2)
    assert [list(found) for found in by_queue.values()] == [[times.KEPT, times.CHANGED, times.IN_THREAD]] * 2


@pytest.mark.parametrize(
    ("changed", "fastest"), [({"0": 900.0, "1": 1000.0}, "0"), ({"0": 980.0, "1": 1000.0}, None), ({"1": 9.0}, None)]
)
def test_the_task_queue_is_switched_off_where_updates_cost_less_without(
    changed: dict[str, float], fastest: str | None
) -> None:
    found: dict[str, dict[str, float] | str] = {"0": "not measured"}
    found |= {queue: {times.KEPT: 1.0, times.CHANGED: us, times.IN_THREAD: 2000} for queue, us in changed.items()}
    assert times.fastest_queue(found) == fastest


def wrong_swiglu(x: Tensor, dim: int = -1) -> Tensor:
    gate, up = x.chunk(2, dim)
    return gate * torch.nn.functional.silu(up)


def refused(*_args: Any, **_options: Any) -> Any:
    raise RuntimeError("error 561002: not on this device")


def test_without_the_ops_of_w8a8_the_server_runs_unquantised(capsys: pytest.CaptureFixture[str]) -> None:
    with replaced("npu_dequant_swiglu_quant", refused):
        status, verdicts, last = reported(capsys)
    of_four = ["W8A8: swiglu_quant of a rank of 4", "W8A8: quant_swiglu of a rank of 4"]
    assert [name for name in verdicts if verdicts[name] == "refused"] == [*of_four, "W8A8: quant_swiglu"]
    assert last == "options for the server: --device npu --attention-layout TND --graph-mode npugraph_ex"
    assert status == 0


@pytest.mark.parametrize(
    ("kernel", "verdict"), slow_but([(wrong_swiglu, "WRONG"), (refused, "refused")], [(wrong_swiglu, "WRONG")])
)
def test_an_op_without_which_nothing_runs(capsys: pytest.CaptureFixture[str], kernel: Any, verdict: str) -> None:
    with replaced("npu_swiglu", kernel):
        status, verdicts, last = reported(capsys)
    experts = {f"experts: {tokens} tokens" for tokens in op_cases.EXPERT_TOKENS}
    # SwiGLU of a single rank is quantised by a kernel of its own after it.
    with_swiglu = {"swiglu", "W8A8: swiglu_quant", *experts}
    assert {name for name in verdicts if verdicts[name] == verdict} == with_swiglu
    assert last.startswith("options for the server: none")
    assert status == 1


@pytest.mark.slow  # test_where_tnd_computes_something_else leads to the same options
def test_where_tnd_refuses_many_queries(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    spans = attention.query_spans

    def at_most_16(query: Tensor, lengths: Sequence[int], layout: str, heads: int) -> list[Tensor]:
        found = spans(query, lengths, layout, heads)
        require(layout == "BSH" or max(map(len, found)) <= 16, "561002: TND takes 16 queries")
        return found

    monkeypatch.setattr(attention, "query_spans", at_most_16)
    status, verdicts, last = reported(capsys)
    assert verdicts["attention TND, 32 queries each"] == "refused"
    assert verdicts["attention TND16, 32 queries each"] == "ok"
    assert verdicts["replayed attention TND, 4 calls of 4 blocks, 544 keys"] == "refused", "and is not even tried"
    assert last == "options for the server: --device npu --attention-layout TND16 --graph-mode npugraph_ex"
    assert status == 0, "nothing wrong was computed, and there are options without it"


def test_a_capture_that_fails_spoils_no_later_check(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    end, calls = npu.NPUGraph.capture_end, itertools.count()

    def fail_once(graph: Any) -> None:
        end(graph)
        if next(calls) == 0:
            raise RuntimeError("error 107026: the capture is invalid")

    monkeypatch.setattr(npu.NPUGraph, "capture_end", fail_once)
    _, verdicts, last = reported(capsys)
    failed = [name for name, verdict in verdicts.items() if verdict == "refused"]
    assert failed == ["replayed attention TND, 4 calls of 4 blocks, 544 keys"]
    assert last.endswith("--graph-mode npugraph_ex")


def test_where_entries_of_16_queries_are_faster(
    capsys: pytest.CaptureFixture[str], price_of_an_entry: list[tuple[int, float]]
) -> None:
    price_of_an_entry[:] = [(17, 0.1)]
    status, _, last = reported(capsys)
    assert last == "options for the server: --device npu --attention-layout TND16 --graph-mode npugraph_ex"
    assert status == 0


def test_where_tnd_computes_something_else(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of keys after the queries' own span, as a kernel would that takes the entries for causal."""
    spans, attend = attention.query_spans, attention.attend
    layouts: list[str] = []

    def noted(query: Tensor, lengths: Sequence[int], layout: str, heads: int) -> list[Tensor]:
        layouts.append(layout)
        return spans(query, lengths, layout, heads)

    def short(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        count = len(query) if layouts[-1] == "TND" else len(key)
        return attend(query, key[:count], value[:count], scale)

    monkeypatch.setattr(attention, "query_spans", noted)
    monkeypatch.setattr(attention, "attend", short)
    status, verdicts, last = reported(capsys)
    assert verdicts["attention TND, 32 queries each"] == "WRONG"
    assert verdicts["attention BSH, 32 queries each"] == "ok"
    assert last == "options for the server: --device npu --attention-layout BSH --graph-mode npugraph_ex"
    assert status == 1


def test_where_nothing_can_be_captured(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "record", refused)
    status, verdicts, last = reported(capsys)
    assert verdicts["captured layer, replayed with other KV lengths"] == "refused"
    assert last == "options for the server: --device npu --attention-layout TND --graph-mode eager"
    assert status == 0


OTHER, SAME = (
    f"captured layer, replayed with {which}" for which in ("other KV lengths", "the KV lengths of the capture")
)


def test_where_a_replay_keeps_the_lengths_of_the_capture(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture, "change", lambda op, args, kwargs: kwargs.get("out"))
    status, verdicts, last = reported(capsys)
    assert (verdicts[OTHER], verdicts[SAME]) == ("WRONG", "ok")
    assert last.endswith("--graph-mode eager")
    assert status == 1


@pytest.mark.slow  # test_where_a_replay_keeps_the_lengths_of_the_capture leads to the same options
def test_where_writes_of_rows_flush_bits_that_look_denormal(capsys: pytest.CaptureFixture[str]) -> None:
    """The state of a sequence, int32 that is written as float32, would be lost."""

    def flushing(x: Tensor, rows: Tensor, values: Tensor) -> Tensor:
        is_denormal = values.abs() < torch.finfo(torch.float32).tiny
        x[rows[:, 0].long()] = values.masked_fill(is_denormal, 0)
        return x

    with replaced("npu_scatter_nd_update_", flushing):
        status, verdicts, last = reported(capsys)
    assert [name for name, verdict in verdicts.items() if verdict == "WRONG"] == [
        "captured predictions and writes of rows"
    ]
    assert last.endswith("--graph-mode eager")
    assert status == 1


@pytest.mark.slow  # test_where_a_replay_keeps_the_lengths_of_the_capture leads to the same options
def test_where_a_replay_forgets_the_lengths_that_it_is_not_given_again(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if a task took one key where its lengths have not been written since the last replay."""
    run, change = capture.Task.run, capture.change
    written: list[Any] = []

    def noted(op: Any, args: Any, kwargs: Any) -> Any:
        written.append(kwargs["out"])
        return change(op, args, kwargs)

    def forgetful(task: capture.Task) -> None:
        if "actual_seq_lengths_kv" in task.kwargs and not written:
            task.kwargs["actual_seq_lengths_kv"] = [1] * len(task.kwargs["actual_seq_lengths_kv"])
        written.clear()
        run(task)

    monkeypatch.setattr(capture, "change", noted)
    monkeypatch.setattr(capture.Task, "run", forgetful)
    status, verdicts, last = reported(capsys)
    assert verdicts[SAME] == "WRONG"
    assert last.endswith("--graph-mode eager")
    assert status == 1


def test_a_large_pool_is_made_only_where_there_is_much_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "last pages of a large pool"

    def large_pool() -> dict[str, str]:
        found = examine_cases(cases.large_pool_cases(eager_ops("TND")), "further ops", 1)
        return {finding.name: finding.verdict for finding in found}

    assert large_pool() == {name: "ok"}
    with replaced("npu_scatter_pa_kv_cache", lambda *_, **__: None):
        assert large_pool() == {name: "WRONG"}
    monkeypatch.setattr(npu, "mem_get_info", lambda: (2**25, 2**36))
    assert large_pool() == {}


@pytest.mark.slow  # test_without_the_ops_of_w8a8_the_server_runs_unquantised leads to the same options
def test_where_no_graph_can_hold_an_int8_product(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    record = capture.record

    def refusing(op: Any, args: Any, kwargs: Any) -> Any:
        require(op is not torch.ops.npu.npu_quant_matmul.default, "error 107026: the capture is invalid")
        return record(op, args, kwargs)

    monkeypatch.setattr(capture, "record", refusing)
    status, verdicts, last = reported(capsys)
    refusals = [name for name, verdict in verdicts.items() if verdict == "refused"]
    assert refusals == ["W8A8: product in a graph, replayed with other inputs"]
    assert last.endswith("--graph-mode npugraph_ex")
    assert status == 0


def test_ranks_are_reported_as_the_worst_of_them() -> None:
    good, bad = Finding("rope", "ok", 0.001, 9.0), Finding("rope", "WRONG", 0.5, 7.0)
    norm = Finding("norm", "ok", 0.001, 9.0)
    assert merged([[good, norm], [bad, norm], [bad, norm]]) == [
        Finding("rope", "WRONG", 0.5, 7.0, ranks=(1, 2)),
        norm,
    ]
    assert slowest([{"tp": {"1024": 9.0, "4096": 20.0}}, {"tp": {"1024": 11.0, "4096": 12.0}}]) == {
        "tp": {"1024": 11.0, "4096": 20.0}
    }
