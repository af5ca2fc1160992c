"""RMSNorm with dynamic quantisation: the CPU op and its definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lopa_ascend.backend.cpu import definition
from lopa_ascend.backend.cpu.ops import CpuOps
from tests.torch.paging import randn

either = pytest.mark.parametrize("ops", [CpuOps(), definition], ids=["fast", "plain"])


@either
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_has_a_scale_and_the_norm_is_rounded_once(ops: Any, dtype: torch.dtype) -> None:
    x, weight = randn(9, 64).to(dtype), randn(64, seed=1).to(dtype)
    codes, scale = ops.rms_norm_quant(x, weight, 1e-6)
    assert (codes.dtype, codes.shape, scale.dtype, scale.shape) == (torch.int8, x.shape, torch.float32, (9,))
    wide = x.double() * (x.double().pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()
    torch.testing.assert_close(scale.double(), wide.abs().amax(-1) / 127, rtol=1e-6, atol=0)
    assert (codes.double() * scale[:, None] - wide).abs().max() <= 0.5001 * scale.max()
    assert torch.equal(codes.abs().amax(-1), torch.full((9,), 127, dtype=torch.int8))


@either
def test_halves_are_rounded_to_even(ops: Any) -> None:
    """The norm of ones is one, so these are the weights, and the scale is one."""
    weight = torch.tensor([127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5])
    codes, scale = ops.rms_norm_quant(torch.ones(1, 7), weight, 0.0)
    assert codes.tolist() == [[127, 0, 2, 2, 0, -2, -2]]
    assert scale.tolist() == [1]


@either
def test_zeros_and_tiny_values(ops: Any) -> None:
    codes, scale = ops.rms_norm_quant(torch.zeros(2, 8), torch.ones(8), 1e-6)
    assert not codes.any()
    assert not scale.any()
    tiny = torch.full((1, 8), 1e-38)  # whose scale has few bits left
    codes, _ = ops.rms_norm_quant(torch.ones(1, 8), tiny * 1e-5, 1e-6)
    assert (codes > 0).all()


@either
def test_the_sum_comes_with_it_and_may_be_in_the_residual(ops: Any) -> None:
    x, residual, weight = randn(5, 16), randn(5, 16, seed=1), randn(16, seed=2)
    total = x + residual
    before = x.clone()
    codes, scale, got = ops.add_rms_norm_quant(x, residual, weight, 1e-6)
    expected_codes, expected_scale = ops.rms_norm_quant(total, weight, 1e-6)
    assert torch.equal(got, total)
    assert torch.equal(codes, expected_codes)
    assert torch.equal(scale, expected_scale)
    assert torch.equal(x, before)
