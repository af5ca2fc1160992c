"""What a machine lacks is said before any weight is read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lopa_ascend import LLM
from lopa_ascend.backend.cuda import INTERPRETED, Cuda, check_capability, check_fp8_capability
from lopa_ascend.config import ParameterError

MODELS = Path(__file__).parents[1] / "data" / "golden" / "models"


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


def test_a_model_with_experts_is_refused() -> None:
    model = str(MODELS / "llada2" / "model_a")
    with pytest.raises(ParameterError, match=r"model_a has experts, for which device cuda has no kernels; choose cpu"):
        LLM(model, device="cuda", graph_mode="eager")
