"""What the NPUs' self-test keeps where a device fails, and what it refuses at once. Needs no device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from lopa_ascend.config import ATTENTION_LAYOUTS
from lopa_ascend.parallel.collectives import Group, RankError
from lopa_ascend.parallel.mesh import Mesh
from scripts.selftest import findings as module
from scripts.selftest import node
from scripts.selftest.__main__ import main
from scripts.selftest.findings import Finding, examine, examine_cases, merged, options
from scripts.selftest.hour import shortened
from scripts.selftest.times import FEW, MANY, TIMED_LAYOUTS, slowest, speed_name
from tests.kernel_cases import Case
from tests.npu import captures
from tests.npu.cases import CAPTURED, CPU
from tests.npu.exchanges import EXCHANGES, exchanges_case

ONE = torch.ones(1)


def case(name: str, run: Callable[[], Any] = lambda: ONE) -> Case:
    return Case(name, run, lambda: ONE, timed=False)


def test_a_layout_that_is_faster_for_few_sequences_alone_is_named_for_those() -> None:
    """As the kernel's source has it of entries of 16 queries."""
    micros = {("TND16", *case): 10.0 if case in FEW else 300.0 for case in (*FEW, *MANY)}
    timed = [
        Finding(speed_name(layout, *case), "ok", micros=micros.get((layout, *case), 100.0))
        for layout in TIMED_LAYOUTS
        for case in (*FEW, *MANY)
    ]
    assert (module.chosen_layout(timed), module.chosen_layout(timed, FEW)) == ("TND", "TND16")


def raises(error: Exception) -> Callable[[], Any]:
    def run() -> None:
        raise error

    return run


@pytest.mark.parametrize(
    "error",
    [
        *(RuntimeError("no"), ValueError("no"), TypeError("no"), AttributeError("no"), AssertionError("no")),
        ImportError("no"),
    ],
)
def test_an_op_that_is_missing_or_takes_other_arguments_is_refused(error: Exception) -> None:
    found = examine_cases([case("swiglu", raises(error)), case("rope")], "further ops", 1)
    assert [(finding.name, finding.verdict) for finding in found] == [("swiglu", "refused"), ("rope", "ok")]
    assert found[0].message == "no"


def test_where_inputs_can_no_longer_be_made_the_findings_until_then_are_kept() -> None:
    """As on a device that a kernel has left unusable: every later tensor raises."""

    def cases() -> Iterator[Case]:
        yield case("rms_norm")
        yield case("swiglu", raises(RuntimeError("error code is 507015")))
        raise RuntimeError("error code is 507015")

    found = examine_cases(cases(), "further ops", 1)
    assert [(finding.name, finding.verdict) for finding in found] == [
        ("rms_norm", "ok"),
        ("swiglu", "refused"),
        ("further ops", "refused"),
    ]
    assert found[-1].message == "not tried: error code is 507015"
    assert options(found) is None


def test_a_layout_whose_cases_were_not_all_tried_is_not_chosen() -> None:
    first, second = ATTENTION_LAYOUTS[:2]
    found = [Finding(f"attention {layout}, 32 queries each", "ok") for layout in ATTENTION_LAYOUTS]
    assert (options(found) or "").split()[3] == first
    found.append(Finding(f"attention {first}, further cases", "refused"))
    assert (options(found) or "").split()[3] == second


def test_an_error_names_no_folder_and_no_address() -> None:
    text = "call failed,\n /home/me/venv/lib/python3.11/site-packages/torch/ops.py:7 [10.1.2.3:60000] aclnn/x 1/2 a"
    assert shortened(RuntimeError(text)) == "call failed, ops.py:7 [<address>:60000] aclnn/x 1/2 a"
    assert shortened(AssertionError()) == "AssertionError"


def test_ranks_with_fewer_findings_are_named() -> None:
    norm, rope = Finding("norm", "ok", 0.001), Finding("rope", "ok", 0.002)
    rest = Finding("further ops", "refused", message="not tried: 507015")
    assert merged([[norm, rope], [norm, rest], [norm, rope]]) == [
        norm,
        Finding("rope", "ok", 0.002, ranks=(0, 2)),
        Finding("further ops", "refused", message="not tried: 507015", ranks=(1,)),
    ]
    assert slowest([{"tp": {"1024": 9.0}}, {}]) == {}


class TwoRanks(SimpleNamespace):
    """A mesh of tp 2, of which the other rank says what it is asked to say."""

    def __init__(self, other: str) -> None:
        super().__init__(tp=Group(0, 2), bp=Group())
        self.other = other

    def all_gather_text(self, subject: str, text: str) -> list[str]:
        return [text, self.other]


def two_ranks(other: str) -> Mesh:
    return cast(Mesh, TwoRanks(other))


def test_no_rank_waits_for_one_whose_device_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "latencies", raises(AssertionError("not to be tried")))
    times, (found,) = node.examine_groups(two_ranks("error code is 507015"), torch.device("cpu"), [], 1)
    assert times == {}
    assert found.message == "not tried, because a device no longer computes: rank 1: error code is 507015"
    assert options([Finding(f"attention {ATTENTION_LAYOUTS[0]}, 32 queries each", "ok"), found]) is None


def test_all_reduces_that_fail_do_not_lose_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RankError("the ranks' exchange of self-test failed")

    monkeypatch.setattr(node, "latencies", fails)
    times, (found,) = node.examine_groups(two_ranks(""), torch.device("cpu"), [], 1)
    assert times == {}
    assert (found.verdict, found.message) == ("refused", "the ranks' exchange of self-test failed")


@pytest.mark.parametrize(
    ("verdict", "other", "message"),
    [
        ("refused", "", "not tried: rank 0: captured cases are not ok"),
        ("ok", "captured cases are not ok", "not tried: rank 1: captured cases are not ok"),
    ],
)
def test_no_rank_waits_in_a_step_for_one_that_captures_nothing(verdict: str, other: str, message: str) -> None:
    attention = Finding(f"attention {ATTENTION_LAYOUTS[0]}, 32 queries each", "ok")
    captured = Finding(f"{CAPTURED} layer, replayed with other KV lengths", verdict)
    found = node.examine_exchanges(two_ranks(other), [attention, captured], 1)
    assert found == Finding(EXCHANGES, "refused", message=message)
    assert (options([attention, found]) or "").endswith("--graph-mode eager")


def test_no_rank_replays_a_step_that_another_one_has_not_captured() -> None:
    class Graph:
        def __init__(self, *_: object) -> None: ...

        def capture(self) -> None: ...

    on_all = partial(node.run_on_all, two_ranks("error 107026: the capture is invalid"), "captured exchanges")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(captures, "graph_memory", dict)
        patch.setattr(captures, "Replayed", Graph)
        found = examine(exchanges_case(CPU, Group(), Group(), on_all), 1)
    assert (found.verdict, found.message) == ("refused", "rank 1: error 107026: the capture is invalid")


def test_a_case_is_named_before_it_runs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the last line says where a device hangs."""

    def run() -> torch.Tensor:
        assert capsys.readouterr().err == "rope ... "
        return ONE

    assert examine(case("rope", run), 1).verdict == "ok"
    assert capsys.readouterr().err == "ok\n"
    examine(case("swiglu", raises(RuntimeError("error code is 507015"))), 1)
    assert capsys.readouterr().err == "swiglu ... refused: error code is 507015\n"
    for name, value in {"RANK": 1, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    examine(case("rope"), 1)
    assert capsys.readouterr().err == "", "rank 0 writes"


def test_decisions_may_not_differ_at_all() -> None:
    """A rank that is off by one is far below the rounding of the largest number."""
    expected = torch.tensor([2**24, 3], dtype=torch.int32)
    decided = Case("policy", lambda: expected - torch.tensor([0, 1]), lambda: expected, timed=False, most=0.0)
    assert examine(decided, 1) == Finding("policy", "WRONG", 2.0**-24)
    assert examine(replace(decided, most=None), 1).verdict == "ok"
    assert examine(replace(decided, run=lambda: expected.clone()), 1) == Finding("policy", "ok", 0.0)


def test_a_device_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    assert module.device_failure(torch.device("cpu")) == ""
    monkeypatch.setattr(torch, "ones", lambda *_, **__: raises(RuntimeError("error code is 507015"))())
    assert module.device_failure(torch.device("cpu")) == "error code is 507015"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--repeats", "0"], "--repeats: must be a whole number from 1 on, got '0'"),
        (["--json", "no/such/folder/report.json"], "--json: must be a file in a folder that exists"),
    ],
)
def test_wrong_flags(capsys: pytest.CaptureFixture[str], argv: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (
            None,
            "--tensor-parallel-size 4 needs 4 ranks or a multiple: scripts/launch/node.sh --tp 4 --bp 1 --selftest",
        ),
        (2, "--tensor-parallel-size 4 does not divide 2 ranks; start a multiple of 4"),
        (6, "--tensor-parallel-size 4 does not divide 6 ranks; start a multiple of 4"),
    ],
)
def test_ranks_that_do_not_divide(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, ranks: int | None, message: str
) -> None:
    if ranks is not None:
        for name, value in {"RANK": 0, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}.items():
            monkeypatch.setenv(name, str(value))
    assert main(["--tensor-parallel-size", "4"]) == 1
    assert capsys.readouterr().err.startswith(f"error: {message}")


def test_the_folder_of_a_report_may_be_the_current_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(node, "examine_node", lambda *_: ({"options": "x"}, [], 0))
    monkeypatch.setattr(node, "report_text", lambda *_: "")
    assert main(["--json", "report.json"]) == 0
    assert (tmp_path / "report.json").read_text() == '{\n "options": "x"\n}\n'


def test_the_only_rank_that_torchrun_has_started_meets_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that it needs no HCCL, as a server of one rank."""
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    assert node._join(1).size == 1
