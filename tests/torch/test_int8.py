"""W8A8 on a CPU: integer products that are exact and independent of their rows, and models that run on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lopa_ascend import LLM, DecodingParams
from lopa_ascend.backend.cpu import definition
from lopa_ascend.backend.cpu.int8 import multiply_float32, packs_exactly
from lopa_ascend.backend.cpu.ops import CpuOps
from lopa_ascend.checkpoint import quantize_weight
from lopa_ascend.config import ParameterError
from tests.tiers import slow_but
from tests.tiny import write_dream, write_tokenizer
from tests.torch.paging import randn

OPS = CpuOps()


def int32_product(codes: Tensor, weight: Tensor) -> Tensor:
    """The reference: int8 [T, in] times the transpose of int8 [out, in], in plain integers, int32 [T, out]."""
    product = codes.long() @ weight.long().T
    assert product.abs().max() < 2**31 if product.numel() else True
    return product.int()


def draw(*shape: int, seed: int = 0, low: int = -128) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, 128, shape, generator=generator, dtype=torch.int8)


@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 32, 8), (33, 1024, 1100), (5, 1025, 40), (7, 4999, 33)])
def test_products_are_those_of_int32(rows: int, inputs: int, outputs: int) -> None:
    codes, weight = draw(rows, inputs, low=-127), draw(outputs, inputs, seed=1)
    assert torch.equal(multiply_float32(codes, weight), int32_product(codes, weight).float())


@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(0, 16, 4), (1, 32, 8), (33, 1024, 1100), (7, 4999, 33)])
def test_weights_as_they_are_packed_give_the_same_products(rows: int, inputs: int, outputs: int) -> None:
    """Packed where the processor multiplies packed ones exactly."""
    ops, codes, weight = CpuOps(packs_weights=True), draw(rows, inputs, low=-127), draw(outputs, inputs, seed=1)
    packed = ops.packed(weight)
    assert packed.is_mkldnn is packs_exactly(weight.shape)
    assert ("packed int8" in ops.settle([packed])) is packed.is_mkldnn
    scales = torch.ones(rows), torch.ones(outputs)
    out = ops.quant_linear(codes, scales[0], packed, scales[1], None, torch.float32)
    assert torch.equal(out, int32_product(codes, weight).float())


def saturating(codes: Tensor, weight: Tensor) -> Tensor:
    """What x86 without VNNI gives: activations without a sign, and sums of two products in 16 bits."""
    pairs = ((codes.int() + 128)[:, None] * weight.int()).unflatten(-1, (-1, 2)).sum(-1)
    return (pairs.clamp(-(2**15), 2**15 - 1).sum(-1) - 128 * weight.int().sum(1)).float()


def test_a_processor_that_does_not_multiply_packed_weights_exactly_gets_plain_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lopa_ascend.backend.cpu.int8.has_int8_instructions", lambda: True)
    monkeypatch.setattr("lopa_ascend.backend.cpu.int8.pack_int8", lambda weight: weight)
    monkeypatch.setattr("lopa_ascend.backend.cpu.int8.multiply_packed", saturating)
    weight = draw(8, 64)
    assert CpuOps(packs_weights=True).packed(weight) is weight


@pytest.mark.parametrize("inputs", [1024, 18944])
def test_the_largest_sums_are_exact(inputs: int) -> None:
    """Products of equal signs: their sums, but for some ones, are as large as they can be."""
    codes, weight = torch.full((3, inputs), 127, dtype=torch.int8), torch.full((2, inputs), -128, dtype=torch.int8)
    codes[1, ::7], weight[1, 5] = 126, 127
    assert torch.equal(multiply_float32(codes, weight), int32_product(codes, weight).float())


def test_no_rows() -> None:
    assert multiply_float32(draw(0, 16), draw(4, 16)).shape == (0, 4)


@pytest.mark.parametrize("rows", [1, 2, 16, 63])
def test_a_row_does_not_depend_on_the_others(rows: int) -> None:
    ops, weight = CpuOps(), draw(96, 1536)
    ops.settle([weight])
    codes, scale = ops.quantize(randn(300, 1536))
    scales, bias = randn(96, seed=2).abs(), randn(96, seed=3)
    whole = ops.quant_linear(codes, scale, weight, scales, bias, torch.float32)
    part = slice(100, 100 + rows)
    assert torch.equal(ops.quant_linear(codes[part], scale[part], weight, scales, bias, torch.float32), whole[part])
    assert torch.equal(ops.quantize(randn(300, 1536)[part])[0], codes[part])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("has_bias", [True, False])
def test_the_fast_ops_have_the_bits_of_their_definitions(dtype: torch.dtype, has_bias: bool) -> None:
    ops, x = CpuOps(), randn(21, 1300).to(dtype)
    x[3] = 0
    codes, scale = ops.quantize(x)
    expected = definition.quantize(x)
    assert torch.equal(codes, expected[0])
    assert torch.equal(scale, expected[1])
    assert (codes.dtype, scale.dtype) == (torch.int8, torch.float32)
    weight, weight_scale, bias = draw(40, 1300), randn(40, seed=1).abs(), randn(40, seed=2).to(dtype)
    arguments = codes, scale, weight, weight_scale, bias if has_bias else None, dtype
    assert torch.equal(ops.quant_linear(*arguments), definition.quant_linear(*arguments))
    assert ops.quant_linear(*arguments).dtype == dtype
    assert torch.equal(x, randn(21, 1300).to(dtype).index_fill(0, torch.tensor(3), 0)), "quantize changed its argument"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_stays_so_alone(value: float) -> None:
    ops, x = CpuOps(), randn(3, 64)
    x[1, 5] = value
    codes, scale = ops.quantize(x)
    out = ops.quant_linear(codes, scale, draw(8, 64), torch.ones(8), None, torch.float32)
    assert not torch.isfinite(out[1]).any()
    assert torch.isfinite(out[::2]).all()


def test_weights_are_quantised_by_output() -> None:
    weight = randn(1500, 40) * torch.logspace(-3, 3, 1500)[:, None]
    weight[7] = 0
    codes, scale = quantize_weight(weight.bfloat16())
    assert (codes.dtype, scale.dtype, scale.shape) == (torch.int8, torch.float32, (1500,))
    assert scale[7] == 1
    assert not codes[7].any()
    others = [row for row in range(1500) if row != 7]
    assert (codes[others].abs().amax(1) == 127).all()
    difference = (codes * scale[:, None] - weight.bfloat16().float()).abs()
    assert (difference <= scale[:, None] * 0.5001).all()


# ---- parts of a layer, as ranks hold them ----------------------------------------------------------------------------


def linear(x: Tensor, weight: tuple[Tensor, Tensor]) -> Tensor:
    """x [T, in] times a quantised weight [out, in]."""
    return OPS.quant_linear(*OPS.quantize(x), *weight, None, torch.float32)


def test_a_rank_that_has_whole_rows_computes_the_bits_of_a_single_process() -> None:
    """q, k, v, gate and up: the ranks split the outputs."""
    x, (codes, scale) = randn(40, 256), quantize_weight(randn(96, 256, seed=1))
    whole = linear(x, (codes, scale))
    for part in (slice(0, 48), slice(48, 96)):
        assert torch.equal(linear(x, (codes[part], scale[part])), whole[:, part])


@pytest.mark.parametrize("size", [2, 4])
def test_the_scales_of_ranks_keep_the_error_below_the_bound_of_a_single_process(size: int) -> None:
    """o and down: the ranks split the inputs, each has the scales of its own, and they add their results."""
    x, (codes, scale) = randn(40, 256), quantize_weight(randn(96, 256, seed=1))
    x[:, 5] *= 30  # an outlier, which makes only the scale of its rank large
    weight = codes * scale[:, None]
    exact = (x.double() @ weight.double().T).float()
    magnitudes = weight.abs().sum(1)
    bound = OPS.quantize(x)[1][:, None] / 2 * magnitudes
    whole = linear(x, (codes, scale))
    own_bound = torch.zeros_like(bound)
    total = torch.zeros_like(whole)
    for part in torch.arange(256).chunk(size):
        own_bound += OPS.quantize(x[:, part])[1][:, None] / 2 * weight[:, part].abs().sum(1)
        total += linear(x[:, part], (codes[:, part].contiguous(), scale))
    rounding = 1e-5 * (x.abs() @ weight.abs().T)
    assert (own_bound <= bound * 1.0001).all()
    assert ((total - exact).abs() <= own_bound + rounding).all()
    assert ((whole - exact).abs() <= bound + rounding).all()
    assert ((total - whole).abs() <= own_bound + bound + rounding).all()
    assert not torch.equal(total, whole)
    assert (total - exact).square().mean() < (whole - exact).square().mean()


# ---- whole models ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_tokenizer(path)
    return write_dream(path, hidden=64, intermediate=96, layers=3, scale=0.1)


PROMPTS = [[5, 6, 7], list(range(20, 60)), [300, 2, 300, 9]]
PARAMS = DecodingParams(num_branches=2, max_new_tokens=40, block_size=8, tau_conf=0.5, ignore_eos=True)


class PlainProducts(CpuOps):
    """The CPU's ops, but what is new for W8A8 by its definitions."""

    def quantize(self, x: Tensor, codes: torch.dtype = torch.int8) -> tuple[Tensor, Tensor]:
        return definition.quantize(x, codes)

    def quant_linear(self, *arguments: Any) -> Tensor:
        return definition.quant_linear(*arguments)


def tokens(llm: LLM, *batches: list[list[int]]) -> list[list[int]]:
    return [list(output.token_ids) for prompts in batches for output in llm.generate(prompts, PARAMS, quiet=True)]


@pytest.mark.parametrize("dtype", slow_but(["float32", "bfloat16"], ["bfloat16"]))
def test_a_model_runs_on_int8_and_as_the_definitions_say(
    path: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(path, quantization="w8a8", dtype=dtype)
    weights = llm.engine.runner.model.weights
    int8 = {name for name, weight in weights.items() if weight.dtype == torch.int8}
    names = ("qkv", "o", "gate_up", "down")
    assert int8 == {f"layers.{n}.{name}.weight" for n in range(3) for name in names}
    assert {str(w.dtype) for name, w in weights.items() if name not in int8 and "scale" not in name} == {
        f"torch.{dtype}"
    }
    assert "integer weights are multiplied exactly" in llm.engine.ranks[0].linear
    found = tokens(llm, PROMPTS)
    assert found != tokens(LLM(path, dtype=dtype), PROMPTS)
    monkeypatch.setattr("lopa_ascend.backend.cpu.ops.CpuOps", lambda **_: PlainProducts())
    assert tokens(LLM(path, quantization="w8a8", dtype=dtype), PROMPTS) == found


def test_a_request_does_not_depend_on_the_others(path: Path) -> None:
    llm = LLM(path, quantization="w8a8", enable_prefix_caching=False)
    assert tokens(llm, PROMPTS) == tokens(llm, *([prompt] for prompt in PROMPTS))


def test_layers_can_be_left_out(path: Path) -> None:
    llm = LLM(path, quantization="w8a8", quantization_exclude=["down_proj"])
    weights = llm.engine.runner.model.weights
    assert weights["layers.0.down.weight"].dtype == torch.float32
    assert "layers.0.down.weight_scale" not in weights
    assert weights["layers.0.o.weight"].dtype == torch.int8
    assert tokens(llm, PROMPTS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantization": "w4a4"}, "quantization: unknown value 'w4a4'; choose one of w8a8, w4a8"),
        ({"quantization_exclude": ["down_proj"]}, "quantization_exclude: needs quantization"),
        (
            {"quantization": "w8a8", "quantization_exclude": ["lm_head"]},
            "unknown value 'lm_head'; choose one of qkv_proj",
        ),
        (
            {"quantization": "w8a8", "quantization_exclude": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]},
            "quantization_exclude: names all linear layers, so nothing would be quantised; leave out at least one",
        ),
        (
            {"quantization": "w8a8", "graph_mode": "inductor"},
            "graph modes eager, npugraph_ex, ge, cuda_graphs; graph_mode is 'ind",
        ),
    ],
)
def test_what_does_not_go_together(path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError) as caught:
        LLM(path, **options)
    assert message in str(caught.value)
