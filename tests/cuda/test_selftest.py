"""The self-test of a GPU at tiny sizes: the whole first hour in its order, on the recorder of captures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lopa_ascend.backend.cuda import INTERPRETED
from lopa_ascend.backend.cuda.graphs import CudaGraphs
from lopa_ascend.graph import setup
from scripts.bench.plan.models import load_model
from scripts.selftest import engines, gpu, steps
from scripts.selftest.__main__ import main
from scripts.selftest.gpu import first_hour
from scripts.selftest.hour import Examination, Report, Row, Step
from tests.cuda.recorder import Recorder
from tests.kernel_cases import Case, Sizes

SIZES = Sizes(32, 24, 2, 1, 16, 100, tokens=3, keys=128, sequences=1)
SMALLER: dict[str, Any] = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16},
    **{"rotary_dim": 16, "max_position_embeddings": 256, "vocab_size": 100, "mask_token_id": 99, "eos_token_ids": (0,)},
}
TINY = replace(load_model("Dream-7B"), **SMALLER)
PLAN = gpu.Plan(
    sizes=SIZES,
    dtypes=(torch.float32,),
    model=TINY,
    layers=1,
    dtype=torch.float32,
    copied=2**12,
    side=32,
    steps=((1, 128),),
    block=2,
    keys=128,
    few_sequences=1,
    most_sequences=1,
    most_blocks=4,
    goldens=("d2f_causal_b4_eos",),
    problems=1,
    rows=(3,),
    server=("--device", "cpu", "--graph-mode", "eager"),
)


@pytest.fixture(autouse=True)
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a GPU only its captures are a fake. Forked children have no pool of threads."""
    monkeypatch.setattr(gpu, "capture_of", lambda _: Recorder())
    monkeypatch.setattr(gpu, "CALLS", 1)
    monkeypatch.setattr(gpu, "SETS", 1)
    monkeypatch.setattr(steps, "REPLAYS", 1)
    monkeypatch.setattr(setup, "load_compiler", lambda *_, **__: CudaGraphs(Recorder()))
    opened = gpu.opened

    def single() -> object:
        torch.set_num_threads(1)
        return opened()

    monkeypatch.setattr(gpu, "opened", single)


def examined(steps: list[Step], file: Path, seconds: float = 900) -> tuple[list[str], list[Row]]:
    faults = Examination(file, seconds).run(steps)
    report = json.loads(file.read_text())
    assert report["faults"] == faults
    return faults, report["steps"]


@pytest.mark.slow  # minutes: the interpreter is a thousand times slower than a GPU
@pytest.mark.timeout(900)
def test_the_first_hour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole engines run on the CPU, in two ranks where they run on two GPUs."""
    for name, value in {"DEVICE": "cpu", "MODES": ("eager",), "PROBLEMS": 1}.items():
        monkeypatch.setattr(engines, name, value)
    count = [{"name": "GPU", "is": "none", "count": 2}]
    steps = [replace(step, seconds=300) for step in first_hour(PLAN)]
    steps[0] = replace(steps[0], run=lambda _: iter(count))
    faults, found = examined(steps, tmp_path / "report.json")
    assert faults == []
    assert [step["step"] for step in found] == [name for name, *_ in gpu.ORDER]
    names = [row["name"] for step in found for row in step["found"]]
    predicted = names.index("w8a8, k = 1, 128 keys, predicted")
    assert names[predicted + 1].startswith("w8a8, k = 1, 128 keys, sequences1"), "a prediction stands before it"
    assert {step["verdict"] for step in found} == {"ok"}
    left_out = {row["name"] for step in found for row in step["found"] if row.get("verdict") == "left out"}
    assert left_out == {"compute-sanitizer", "ncu"}
    for name in ("branch_parallel_size 2 closes", "a follower dies", "SIGTERM", "golden traces, eager", "descending"):
        assert name in names


def test_a_wrong_kernel_ends_the_hour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = torch.ones(1)
    made = [Case("right", lambda: one, lambda: one), Case("wrong", lambda: one + 0.1, lambda: one)]
    monkeypatch.setattr(gpu, "cases", lambda *_: iter([*made, Case("never", lambda: 1 / 0, lambda: one)]))
    order = first_hour(replace(PLAN, dtypes=(torch.bfloat16, torch.float32)))
    faults, found = examined(order, tmp_path / "report.json")
    assert faults == ["kernels: wrong, bf16; error 0.1; most 0.01; verdict WRONG"]
    assert [row["name"] for row in found[1]["found"]] == ["right, bf16", "wrong, bf16"]
    assert {step["verdict"] for step in found[2:]} == {"left out"}
    assert len(found) == len(gpu.ORDER)


def test_what_a_kernel_does_not_write_is_poison(monkeypatch: pytest.MonkeyPatch) -> None:
    zeros = torch.zeros(4)

    def writes_half() -> torch.Tensor:
        made = torch.zeros(1).new_empty(4)
        made[:2] = 0
        return made

    torch.zeros(4)  # whose memory the next tensor may get
    monkeypatch.setattr(gpu, "cases", lambda *_: iter([Case("half", writes_half, lambda: zeros)]))
    assert [row["verdict"] for row in gpu.kernels(PLAN, {})] == ["WRONG"]
    assert not torch.are_deterministic_algorithms_enabled()


def test_the_report_is_written_before_and_after_every_finding(tmp_path: Path) -> None:
    file = tmp_path / "report.json"

    def looking(_: Report) -> Iterator[Row]:
        for number in range(2):
            end = time.monotonic() + 10
            while len((seen := json.loads(file.read_text())["steps"][-1])["found"]) < number < time.monotonic() < end:
                time.sleep(0.01)
            yield {"name": number, "seen": seen}

    step = Step("first", 20, "two rows", looking)
    faults, found = examined([step, replace(step, name="second")], file)
    assert faults == []
    assert [step["step"] for step in found] == ["first", "second"]
    before, after = (row["seen"] for row in found[1]["found"])
    assert (before["verdict"], before["expected"], before["found"]) == ("running", "two rows", [])
    assert after["found"] == [found[1]["found"][0]]


def hangs(_: Report) -> Iterator[Row]:
    yield {"name": "begun", "pid": os.getpid()}
    os.system("exec sleep 600 &")
    time.sleep(600)


def dies(_: Report) -> Iterator[Row]:
    yield {"name": "begun"}
    os.kill(os.getpid(), 9)


def lacks(_: Report) -> Iterator[Row]:
    yield {"name": "begun"}
    raise ModuleNotFoundError("No module named 'msgspec'", name="msgspec")


def fails(_: Report) -> Iterator[Row]:
    yield {"name": "begun"}
    raise RuntimeError("CUDA error: an illegal memory access was encountered in /home/me/kernel.cu")


def test_a_step_that_does_not_end_well_loses_nothing(tmp_path: Path) -> None:
    """Neither what it has found, nor the steps after it; what it has started ends with it."""
    steps = [Step("hangs", 1.0, "", hangs), *(Step(run.__name__, 20, "", run) for run in (dies, lacks, fails))]
    faults, found = examined(steps, tmp_path / "report.json")
    assert faults == [
        "hangs: verdict hung; message ended after 1 s",
        "dies: verdict died; message exit code -9",
        "fails: fails; verdict failed; message RuntimeError: CUDA error: an illegal memory access was encountered in "
        "kernel.cu",
    ]
    assert [step["found"][0]["name"] for step in found] == ["begun"] * 4
    assert found[2]["found"][1]["message"] == "needs msgspec"
    group = found[0]["found"][0]["pid"]
    stats = [file.read_text().rpartition(") ")[2].split() for file in Path("/proc").glob("[0-9]*/stat")]
    assert not [state for state, _, of_group, *_ in stats if of_group == str(group) and state != "Z"]


def test_what_there_is_no_time_for_is_named(tmp_path: Path) -> None:
    faults, found = examined([Step("late", 20, "", fails)], tmp_path / "report.json", seconds=0)
    assert (faults, found[0]["verdict"], found[0]["message"]) == ([], "left out", "no time")


def test_a_gpu_is_compared_with_its_data_sheet() -> None:
    found: Report = {"machine": [{"name": "GPU", "is": "NVIDIA GeForce RTX 4090"}]}
    low, high = steps.predicted(found, 7, 640, "bf16")
    slower, _ = steps.predicted(found, 7, 4224, "bf16")
    assert 10 < low <= high
    assert low < slower
    assert steps.predicted({}, 7, 640, "bf16") == []


def test_all_but_engines_needs_torch_triton_and_numpy_alone() -> None:
    blocked = ("pytest", "transformers", "huggingface_hub", "pydantic", "filelock", "yaml", *gpu.SERVED)
    code = f"""
import sys
sys.modules |= dict.fromkeys({blocked})
from scripts.selftest import __main__, gpu, hour
gpu.opened()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stderr == ""


def test_without_a_gpu_the_command_says_so(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.delenv(INTERPRETED)
    assert main(["--device", "cuda", "--json", str(tmp_path / "report.json")]) == 1
    assert "cuda cannot be used: torch" in capfd.readouterr().out
    report = json.loads((tmp_path / "report.json").read_text())
    assert [step["step"] for step in report["steps"]] == list(gpu.SHORT)
