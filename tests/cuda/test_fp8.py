"""FP8 on a GPU: kernels that quantise, interpreted and compiled, and torch's product between them."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lopa_ascend import LLM, DecodingParams
from lopa_ascend.backend.cpu import definition
from lopa_ascend.backend.cuda.ops import CudaOps
from lopa_ascend.backend.interface import FP8
from lopa_ascend.checkpoint import quantize_weight
from tests.cuda.test_ops import dtypes, every_op, seeds
from tests.tiny import write_dream, write_tokenizer
from tests.torch.paging import randn

OPS = CudaOps(torch.device("cpu"))
PRINT_COMPILED = """
import json
import torch
from tests.cuda import resources

def run(ops):
    x, norm, residual = (torch.empty(shape, dtype=torch.bfloat16) for shape in ((64, 3584), (3584,), (64, 3584)))
    codes = torch.float8_e4m3fn
    ops.add_rms_norm_quant(x, residual, norm, 1e-6, codes)
    ops.swiglu_quant(x, codes)
    ops.quantize(x, codes)

print(json.dumps([resources.compiled(call, kind) for call in resources.calls_of(run) for kind in (89, 90)]))
"""


def assert_codes(got: tuple[Tensor, ...], expected: tuple[Tensor, ...], *, is_exact: bool) -> None:
    """A code may be the neighbour where what is quantised was rounded otherwise."""
    assert got[0].dtype == FP8
    if is_exact:
        assert torch.equal(got[0].float(), expected[0].float())
        assert torch.equal(got[1], expected[1])
    else:
        torch.testing.assert_close(got[1], expected[1], rtol=1e-2, atol=0)
        torch.testing.assert_close(got[0].float(), expected[0].float(), rtol=2**-3, atol=1)


@every_op
@given(seeds, st.integers(1, 5), st.sampled_from([16, 48, 200, 2500]), dtypes)
def test_rows_are_quantised_as_the_definition_says(seed: int, num_rows: int, size: int, dtype: torch.dtype) -> None:
    x, residual = (randn(2, num_rows, size, seed=seed) * 10.0 ** (seed % 9 - 4)).to(dtype)
    x[0, 1:] = 0
    norm = randn(size, seed=seed + 1).to(dtype)
    assert_codes(OPS.quantize(x, FP8), definition.quantize(x, FP8), is_exact=True)
    assert_codes(OPS.rms_norm_quant(x, norm, 1e-6, FP8), definition.rms_norm_quant(x, norm, 1e-6, FP8), is_exact=False)
    codes, scale, total = OPS.add_rms_norm_quant(x, residual.clone(), norm, 1e-6, FP8)
    assert_codes((codes, scale), definition.rms_norm_quant(total, norm, 1e-6, FP8), is_exact=False)
    gate_up = torch.cat([x, residual], 1)
    assert_codes(OPS.swiglu_quant(gate_up, FP8), definition.swiglu_quant(gate_up, FP8), is_exact=False)


def test_every_number_and_what_lies_between_two_is_rounded_as_torch_does() -> None:
    numbers = torch.arange(256, dtype=torch.uint8).view(FP8).float()
    ordered = numbers[numbers.isfinite()].unique()
    x = torch.cat([ordered, (ordered[1:] + ordered[:-1]) / 2, ordered * (1 + 2**-20)])[None].clamp(-448, 448)
    assert_codes(OPS.quantize(x, FP8), (x.to(FP8), torch.ones(1)), is_exact=True)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_stays_not_finite_in_its_row(bad: float) -> None:
    x, (weight, weight_scale) = randn(3, 32), quantize_weight(randn(16, 32, seed=1), FP8)
    x[1, 5] = bad
    out = OPS.quant_linear(*OPS.quantize(x, FP8), OPS.stored(weight), weight_scale, None, torch.bfloat16)
    assert out.isfinite().all(-1).tolist() == [True, False, True]


def test_products_are_near_the_exact_ones() -> None:
    (weight, weight_scale), bias = quantize_weight(randn(128, 96, seed=1), FP8), randn(128).bfloat16()
    codes, scale = OPS.quantize(randn(21, 96), FP8)
    given = codes, scale, weight, weight_scale
    expected = definition.quant_linear(*given, bias, torch.bfloat16)
    torch.testing.assert_close(OPS.quant_linear(*given, bias, torch.bfloat16), expected, rtol=2**-7, atol=1e-2)
    assert_codes(
        OPS.quant_swiglu(*given, torch.bfloat16), definition.quant_swiglu(*given, torch.bfloat16), is_exact=False
    )
    assert "rows are independent" in OPS.settle([weight])


def test_a_model_runs_on_fp8(tmp_path: Path) -> None:
    """In float32, because the interpreter multiplies no bfloat16."""
    write_tokenizer(tmp_path)
    path = str(write_dream(tmp_path, hidden=64, intermediate=64, layers=1, scale=0.1))
    params = DecodingParams(max_new_tokens=8, block_size=8, ignore_eos=True)
    llm = LLM(path, device="cuda", graph_mode="eager", quantization="fp8")
    expected = LLM(path, quantization="fp8").generate([[5, 6, 7]], params, quiet=True)
    found = llm.generate([[5, 6, 7]], params, quiet=True)
    assert found[0].token_ids == expected[0].token_ids


def test_kernels_compile_without_spills_and_narrow_loads() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_DEFAULT_FP_FUSION"] = "0"  # as the device has it
    command = [sys.executable, "-c", PRINT_COMPILED]
    reports = json.loads(subprocess.run(command, env=environment, capture_output=True, check=True).stdout)
    assert {(report["kernel"], report["architecture"]) for report in reports} == {
        (kernel, kind) for kernel in ("norm_rows", "quantize_rows") for kind in (89, 90)
    }
    assert all((report["stack"], report["narrow"]) == (0, 0) for report in reports)
