"""The layer with planted outliers: that they stand out, and that its table shows what smoothing does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lopa_ascend.backend.cpu import CpuOps
from lopa_ascend.config import ModelConfig
from scripts.planted_outliers import PLACES, built, hidden_states, one_layer, output_errors, planted, sequence
from scripts.quant_quality import MeasuringOps
from scripts.quant_quality import planted as print_table


@pytest.fixture
def narrow() -> ModelConfig:
    """A layer of the same shape, narrow."""
    return replace(
        one_layer(), hidden_size=256, intermediate_size=512, num_heads=4, num_kv_heads=2, head_dim=64, rope_theta=1e4
    )


def test_inputs_have_outliers(narrow: ModelConfig) -> None:
    generator = torch.Generator().manual_seed(3)
    tensors = planted(narrow, generator, "all inputs")
    model = built(narrow, tensors, (), torch.float32, CpuOps())
    measuring = MeasuringOps(model.ops, dict(model.weights))
    model.ops = measuring
    hidden_states(model, sequence(narrow, generator))
    outliers = {name.rpartition(".")[2]: error.outlier for name, error in measuring.errors.items()}
    assert min(outliers[name] for name in ("qkv", "gate_up", "down")) > 2 * outliers["o"]
    assert all(torch.equal(tensor, tensor.bfloat16().float()) for tensor in tensors.values())


def test_smoothing_helps_where_outliers_are(narrow: ModelConfig, capsys: pytest.CaptureFixture[str]) -> None:
    everywhere, at_down = (dict(output_errors(narrow, place)) for place in PLACES)
    for errors in (everywhere, at_down):
        assert errors["bfloat16"] < errors["w8a8, smoothed"] < 0.7 * errors["w8a8"]
        assert errors["w8a8, down_proj in bfloat16"] < errors["w8a8"]
    # What folding into up_proj is good for.
    assert at_down["w8a8, smoothed"] < 1.3 * at_down["w8a8, down_proj in bfloat16"]
    print_table(narrow, 1)
    rows = capsys.readouterr().out.splitlines()[2:]
    assert rows == [f"| {name} | {everywhere[name]:.2%} | {at_down[name]:.2%} |" for name in everywhere]
