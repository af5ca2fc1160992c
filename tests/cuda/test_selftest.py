"""The self-test of a GPU at tiny shapes, on the recorder."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from lopa_ascend.backend.cuda.ops import CudaOps
from scripts.selftest import gpu
from scripts.selftest.__main__ import main
from scripts.selftest.gpu_kernels import Sizes
from scripts.selftest.gpu_steps import Shape, StepCase
from tests.cuda.recorder import Recorder

SIZES = Sizes(32, 48, 4, 2, 16, 300, tokens=3, keys=128, sequences=2, copied=2**12, side=32)
SHAPES = (
    ("Dream", Shape("Dream", 32, 48, 1, 4, 2, 8, 300, True)),
    ("SDAR", Shape("sdar", 32, 48, 1, 4, 2, 8, 300, False)),
)
PLAN = gpu.Plan(SIZES, SHAPES, (StepCase(1, 1, 128, block=1),), torch.float32, (), (), problems=0, seconds=600)


def test_a_report_of_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scripts.selftest.gpu_kernels.CALLS", 1)
    monkeypatch.setattr("scripts.selftest.gpu_steps.REPLAYS", 1)
    report = json.loads(json.dumps(gpu.examine_gpu(CudaOps(torch.device("cpu")), Recorder(), PLAN)))
    assert gpu.failures(report) == []
    assert len(report["steps"]) == 4
    assert {step["equal"] for step in report["steps"]} == {True}
    text = gpu.report_text(report)
    for name in ("attention, 1 request of 8 branches", "int8 linear, down", "SDAR W8A8, 1 x k = 1, prompt 128"):
        assert name in text
    report["kernels"][0]["verdict"], report["steps"][0]["equal"] = "WRONG", False
    assert len(gpu.failures(report)) == 2


def test_what_there_is_no_time_for_is_named() -> None:
    plan = replace(PLAN, seconds=-1.0)
    left_out: list[str] = []
    assert list(gpu._steps(CudaOps(torch.device("cpu")), Recorder(), None, plan, 0.0, left_out)) == []  # type: ignore[arg-type]
    assert left_out == [f"{name} {kind}: no time" for name in ("Dream", "SDAR") for kind in ("bf16", "W8A8")]


def test_without_a_gpu_the_command_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "cuda"]) == 1
    assert "cuda_graphs needs a GPU" in capsys.readouterr().err
