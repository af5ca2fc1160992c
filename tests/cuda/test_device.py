"""What a machine lacks is said before any weight is read."""

from __future__ import annotations

import pytest
import torch

from lopa_ascend import LLM
from lopa_ascend.backend.cuda import INTERPRETED, Cuda, check_capability
from lopa_ascend.config import ParameterError


def test_a_torch_without_cuda_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(INTERPRETED)
    with pytest.raises(ParameterError, match=r"device: cuda cannot be used: torch .* is built without CUDA; install"):
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


def test_interpreted_kernels_have_no_share_of_a_gpu() -> None:
    with pytest.raises(
        ParameterError, match="gpu_memory_utilization: needs a GPU or an NPU: .* choose kv_cache_memory"
    ):
        LLM(device="cuda", graph_mode="eager", gpu_memory_utilization=0.9)
