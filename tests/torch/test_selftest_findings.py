"""What the NPUs' self-test keeps where a device fails, and what it refuses at once. Needs no device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from lopa_ascend.config import ATTENTION_LAYOUTS
from lopa_ascend.parallel.collectives import Group, RankError
from lopa_ascend.parallel.mesh import Mesh
from scripts.npu_selftest import findings as module
from scripts.npu_selftest import node
from scripts.npu_selftest.__main__ import main
from scripts.npu_selftest.cases import Case
from scripts.npu_selftest.findings import Finding, examine_cases, merged, options, shortened, slowest

ONE = torch.ones(1)


def case(name: str, run: Callable[[], Any] = lambda: ONE) -> Case:
    return Case(name, run, ONE, timed=False)


def raises(error: Exception) -> Callable[[], Any]:
    def run() -> None:
        raise error

    return run


@pytest.mark.parametrize(
    "error", [RuntimeError("no"), ValueError("no"), TypeError("no"), AttributeError("no"), AssertionError("no")]
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
    times, (found,) = node.examine_groups(two_ranks("error code is 507015"), torch.device("cpu"), 1)
    assert times == {}
    assert found.message == "not tried, because the device of rank 1 no longer computes: error code is 507015"
    assert options([Finding(f"attention {ATTENTION_LAYOUTS[0]}, 32 queries each", "ok"), found]) is None


def test_all_reduces_that_fail_do_not_lose_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RankError("the ranks' exchange of self-test failed")

    monkeypatch.setattr(node, "latencies", fails)
    times, (found,) = node.examine_groups(two_ranks(""), torch.device("cpu"), 1)
    assert times == {}
    assert (found.verdict, found.message) == ("refused", "the ranks' exchange of self-test failed")


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
            "--tensor-parallel-size 4 needs 4 ranks or a multiple, which torchrun starts: torchrun --nproc-per-node 4",
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
