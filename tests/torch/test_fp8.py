"""FP8 on a CPU: products that are exact and independent of their rows, and models that run on them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from lopa_ascend import LLM, DecodingParams
from lopa_ascend.backend import find_device
from lopa_ascend.backend.cpu import definition
from lopa_ascend.backend.cpu.native import load_cpu_ops
from lopa_ascend.backend.cpu.ops import CpuOps
from lopa_ascend.backend.interface import FP8
from lopa_ascend.checkpoint import quantize_weight
from lopa_ascend.config import EngineConfig, ParameterError
from lopa_ascend.hub.fit import check_fit
from tests.tiny import write_dream, write_tokenizer
from tests.torch.paging import randn

FINITE = torch.arange(256, dtype=torch.uint8)[torch.arange(256) % 128 != 127].view(FP8).float()
"""Every number of the format."""


@pytest.fixture(params=[CpuOps, load_cpu_ops], ids=["torch", "native"])
def ops(request: pytest.FixtureRequest) -> CpuOps:
    made: CpuOps = request.param(packs_weights=True)
    return made


def bits(x: Tensor) -> Tensor:
    """The bytes of codes, which torch compares where it does not compare float8; all NaN alike."""
    return x.view(torch.uint8).masked_fill(x.isnan(), 127) if x.dtype == FP8 else x


def test_numbers_are_rounded_to_the_nearest_code_half_to_even(ops: CpuOps) -> None:
    """The largest is 448, so the scale is 1: numbers stay as they are."""
    ordered = FINITE.unique()
    between = (ordered[1:] + ordered[:-1]) / 2
    codes, scale = ops.quantize(torch.cat([between, ordered])[None], FP8)
    assert scale.tolist() == [1.0]
    found = codes[0].float()
    assert torch.equal(found[len(between) :], ordered)
    nearest = found[: len(between)]
    assert ((nearest == ordered[1:]) | (nearest == ordered[:-1])).all()
    assert not (nearest.to(FP8).view(torch.uint8) & 1).any()  # the last bit of the mantissa


def test_scales_rows_of_zeros_and_the_largest_numbers(ops: CpuOps) -> None:
    x = randn(6, 64)
    x[1], x[2] = 0, 8.4e-43  # the second scale has few bits, so quotients lie beyond 448
    x[3, 5] = 3e38
    codes, scale = ops.quantize(x, FP8)
    assert torch.equal(scale, x.abs().amax(1) / 448)
    assert (codes[1].float() == 0).all()
    assert codes.float().abs().amax(1).tolist() == [448, 0, 448, 448, 448, 448]
    assert all(map(torch.equal, map(bits, (codes, scale)), map(bits, definition.quantize(x, FP8))))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_becomes_nan_and_no_other(ops: CpuOps, bad: float) -> None:
    x = randn(3, 32)
    x[1, 5] = bad
    weight, weight_scale = quantize_weight(randn(16, 32, seed=1), FP8)
    out = ops.quant_linear(*ops.quantize(x, FP8), weight, weight_scale, None, torch.bfloat16)
    assert out.isnan().all(1).tolist() == [False, True, False]
    assert out[::2].isfinite().all()


@pytest.mark.parametrize("inputs", [1, 48, 18944])
def test_products_are_exact(ops: CpuOps, inputs: int) -> None:
    """Also of the largest numbers beside the smallest ones: by integers, since all numbers are multiples of 2^-9."""
    generator = torch.Generator().manual_seed(inputs)
    codes, weight = (FINITE[torch.randint(len(FINITE), (rows, inputs), generator=generator)] for rows in (5, 3))
    codes[4], weight[2] = 448, 448
    codes[4, -1] = weight[2, -1] = 2**-9
    exact = ((codes * 512).long() @ (weight * 512).long().T).double() / 2**18
    out = ops.quant_linear(codes.to(FP8), torch.ones(5), weight.to(FP8), torch.ones(3), None, torch.float32)
    assert torch.equal(out, exact.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ops_are_those_of_the_definition_row_by_row(ops: CpuOps, dtype: torch.dtype) -> None:
    x, residual = randn(2, 40, 96).to(dtype)
    norm, bias = randn(96, seed=1).to(dtype), randn(64, seed=2).to(dtype)
    weight, weight_scale = quantize_weight(randn(64, 96, seed=3), FP8)
    by_row = definition.quantize(x, FP8)
    pairs = [
        (ops.quantize(x, FP8), by_row),
        ([ops.quant_linear(*by_row, weight, weight_scale, bias, dtype)],
         [definition.quant_linear(*by_row, weight, weight_scale, bias, dtype)]),
        (ops.quant_swiglu(*by_row, weight, weight_scale, dtype),
         ops.swiglu_quant(ops.quant_linear(*by_row, weight, weight_scale, None, dtype), FP8)),
    ]  # fmt: skip
    for found, expected in pairs:
        assert all(map(torch.equal, map(bits, found), map(bits, expected)))
    normed = [
        (ops.rms_norm_quant(x, norm, 1e-6, FP8), definition.rms_norm_quant(x, norm, 1e-6, FP8)),
        (ops.add_rms_norm_quant(x, residual.clone(), norm, 1e-6, FP8)[:2],
         definition.add_rms_norm_quant(x, residual, norm, 1e-6, FP8)[:2]),
        (ops.swiglu_quant(x, FP8), definition.swiglu_quant(x, FP8)),
    ]  # fmt: skip
    for found, expected in normed:  # norms and exponentials may be rounded otherwise, so a code may be its neighbour
        torch.testing.assert_close(found[0].float() * found[1][:, None], expected[0].float() * expected[1][:, None],
                                   rtol=2**-3, atol=1e-2)  # fmt: skip

    def all_of(rows: slice) -> list[Tensor]:
        codes, scale = ops.rms_norm_quant(x[rows], norm, 1e-6, FP8)
        gated = ops.quant_swiglu(codes, scale, weight, weight_scale, dtype)
        return [codes, scale, ops.quant_linear(codes, scale, weight, weight_scale, bias, dtype), *gated]

    for alone, among in zip(all_of(slice(7, 9)), all_of(slice(None)), strict=True):
        assert torch.equal(bits(alone), bits(among)[7:9])


@pytest.mark.skipif(TorchVersion(torch.__version__) < "2.13", reason="an older torch may have no such kernel of a CPU")
@pytest.mark.parametrize("has_bias", [False, True])
def test_torch_multiplies_as_the_definition_does(has_bias: bool) -> None:
    """Its kernel of a CPU, in the form in which the one of a GPU is called."""
    (codes, scale), (weight, weight_scale) = definition.quantize(randn(7, 96), FP8), quantize_weight(randn(48, 96), FP8)
    bias = randn(48, seed=1).bfloat16() if has_bias else None
    out = torch._scaled_mm(codes, weight.t(), scale[:, None], weight_scale[None], bias, out_dtype=torch.bfloat16)
    expected = definition.quant_linear(codes, scale, weight, weight_scale, bias, torch.bfloat16)
    torch.testing.assert_close(out, expected, rtol=2**-7, atol=1e-2)


def test_weights_are_quantised_as_rows_are() -> None:
    weight = randn(1500, 40).bfloat16()
    weight[3] = 0
    (codes, scale), (expected, by_row) = quantize_weight(weight, FP8), definition.quantize(weight, FP8)
    assert torch.equal(bits(codes), bits(expected))
    assert torch.equal(scale, by_row.masked_fill(by_row == 0, 1))


# ---- whole models ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_tokenizer(path)
    return write_dream(path, hidden=64, intermediate=96, layers=2, scale=0.1)


PROMPTS = [[5, 6, 7], list(range(20, 60)), [300, 2, 300, 9]]
PARAMS = DecodingParams(num_branches=2, max_new_tokens=32, block_size=8, tau_conf=0.5, ignore_eos=True)


def tokens(llm: LLM, *batches: list[list[int]]) -> list[list[int]]:
    return [list(output.token_ids) for prompts in batches for output in llm.generate(prompts, PARAMS, quiet=True)]


def test_a_model_runs_on_fp8(path: Path) -> None:
    llm = LLM(path, quantization="fp8", dtype="bfloat16", quantization_exclude=["o_proj"], enable_prefix_caching=False)
    weights = llm.engine.runner.model.weights
    fp8 = {name for name, weight in weights.items() if weight.dtype == FP8}
    assert fp8 == {f"layers.{n}.{name}.weight" for n in range(2) for name in ("qkv", "gate_up", "down")}
    assert "fp8 weights are multiplied exactly, by float64 products" in llm.engine.ranks[0].linear
    found = tokens(llm, PROMPTS)
    assert found == tokens(llm, *([prompt] for prompt in PROMPTS))
    assert found != tokens(LLM(path, dtype="bfloat16"), PROMPTS)


def test_a_device_without_kernels_is_refused_by_name(path: Path) -> None:
    words = "quantization: 'fp8' means fp8 weights, for which device npu has no kernels; choose device cpu or cuda"
    with pytest.raises(ParameterError, match=words):
        find_device("npu").check_codes("quantization", "'fp8'", "fp8")
    config = EngineConfig(model=str(path), device="npu", quantization="fp8", dtype="bfloat16")
    with pytest.raises(ParameterError, match=words):
        check_fit("org/model", config, path, 1)


@pytest.mark.parametrize(
    ("sizes", "options", "words"),
    [
        ({}, {"dtype": "float32"}, "dtype: fp8 weights on device cuda need dtype bfloat16, got float32"),
        ({"intermediate": 40}, {}, "model: on each of 1 ranks .* has layers of 64, 40, 64, 64 inputs or outputs; fp8"),
        ({"intermediate": 48}, {"tensor_parallel_size": 2}, "on each of 2 ranks .* 64, 24, .*; fp8 .* multiples of 16"),
    ],
)
def test_what_a_gpu_does_not_take_is_refused_by_name(
    sizes: dict[str, Any], options: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    path = write_dream(tmp_path, hidden=64, **sizes)
    config = EngineConfig(device="cuda", quantization="fp8", **{"dtype": "bfloat16", **options})
    with pytest.raises(ParameterError, match=words):
        check_fit("org/model", config, path, 1)
