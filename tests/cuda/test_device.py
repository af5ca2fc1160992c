"""What a machine lacks is said before any weight is read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import triton

from lopa_ascend import LLM
from lopa_ascend.backend.cpu.profiler import TorchProfiler
from lopa_ascend.backend.cuda import (
    DEVICE,
    INTERPRETED,
    Cuda,
    check_capability,
    check_fp8_capability,
    driver_version,
)
from lopa_ascend.config import ParameterError


def test_a_torch_without_cuda_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(INTERPRETED)
    with pytest.raises(ParameterError, match=r"device: cuda cannot be used: torch .* built without CUDA; pip install"):
        LLM(device="cuda")


def test_a_missing_driver_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(INTERPRETED)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(
        ParameterError, match=r"finds no usable GPU .*; it needs an NVIDIA GPU and a driver for CUDA 13"
    ):
        LLM(device="cuda")


def test_an_old_gpu_is_refused() -> None:
    check_capability("NVIDIA H200", (9, 0))
    with pytest.raises(ParameterError, match=r"Tesla T4 has compute capability 7\.5; it needs 8\.0 \(A100\) or newer"):
        check_capability("Tesla T4", (7, 5))


def test_a_gpu_without_row_wise_products_of_fp8_is_refused() -> None:
    for capability in ((8, 9), (9, 0), (10, 0)):
        check_fp8_capability("NVIDIA H100", capability)
    for name, capability in {"NVIDIA A100": (8, 0), "RTX 5090": (12, 0)}.items():
        with pytest.raises(ParameterError, match=rf"8\.9 or 9\.0 or 10\.0, and {name} has .*; choose .* w8a8"):
            check_fp8_capability(name, capability)


def test_a_gpu_without_room_for_the_weights_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cuda, "free_memory", lambda *_: 2**20)
    with pytest.raises(
        ParameterError, match=r"device: the weights of a rank take .* MiB, and the GPU has 1.0 MiB free"
    ):
        LLM(device="cuda", graph_mode="eager")
    monkeypatch.setattr(Cuda, "held_memory", lambda *_: (0, 2**20))
    with pytest.raises(
        ParameterError, match=r"gpu_memory_utilization: the weights .* a share of 0\.5 leaves it 512.0 KiB"
    ):
        Cuda().check_memory(2**20, 1, 0.5)


# ---- on a machine with a GPU -----------------------------------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """What torch says where there is an H200, and a Triton that has compiled nothing yet; a folder for files."""
    monkeypatch.delenv(INTERPRETED)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for name, answer in {
        "init": None,
        "device_count": 1,
        "get_device_name": "NVIDIA H200",
        "get_device_capability": (9, 0),
        "set_device": None,
        "current_device": 0,
        "is_available": True,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    for name in ("_active", "_default"):
        monkeypatch.setattr(triton.runtime.driver, name, None)
    (tmp_path / "libcuda.so.1").touch()
    monkeypatch.setenv("TRITON_LIBCUDA_PATH", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path


NEEDED = r"it needs a C compiler and Python's headers: apt-get install gcc python3-dev, or set CC"


def test_a_missing_compiler_is_refused_before_weights_are_read(monkeypatch: pytest.MonkeyPatch, gpu: Path) -> None:
    monkeypatch.setenv("PATH", str(gpu))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(ParameterError, match=rf"Triton cannot compile .*Failed to find C compiler.*; {NEEDED}"):
        LLM(device="cuda")


def test_missing_headers_of_python_are_refused_before_weights_are_read(
    monkeypatch: pytest.MonkeyPatch, gpu: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sysconfig.get_paths", lambda **_: {"include": str(gpu)})
    with pytest.raises(ParameterError, match=rf"\(\S+ has failed, as it says above\); {NEEDED}"):
        LLM(device="cuda")
    assert "Python.h" in capfd.readouterr().err


def test_the_driver_has_a_version(tmp_path: Path) -> None:
    file = tmp_path / "version"
    assert driver_version(file) is None
    file.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\nGCC version:  gcc 13.3.0\n"
    )
    assert driver_version(file) == "580.65.06"


def test_a_gpu_is_named_with_its_software(monkeypatch: pytest.MonkeyPatch, gpu: Path) -> None:
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 29, 7))
    found = DEVICE.versions()
    assert {name: found[name] for name in ("gpu", "cuda", "nccl")} == {
        "gpu": "NVIDIA H200",
        "cuda": "13.0",
        "nccl": "2.29.7",
    }
    assert found["triton"] == triton.__version__


@pytest.mark.usefixtures("gpu")
def test_profiles_of_a_gpu_have_its_kernels() -> None:
    profiler = DEVICE.profiler
    assert isinstance(profiler, TorchProfiler)
    assert profiler.activities == (torch.profiler.ProfilerActivity.CUDA,)


def test_profiles_of_interpreted_kernels_are_those_of_a_cpu() -> None:
    profiler = DEVICE.profiler
    assert isinstance(profiler, TorchProfiler)
    assert profiler.activities == ()


def test_interpreted_kernels_have_no_share_of_a_gpu() -> None:
    with pytest.raises(
        ParameterError, match="gpu_memory_utilization: needs a GPU or an NPU: .* choose kv_cache_memory"
    ):
        LLM(device="cuda", graph_mode="eager", gpu_memory_utilization=0.9)
