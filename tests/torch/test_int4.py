"""int4 weights on a CPU: products as they are defined, whose rows are independent, and models that run on them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from lopa_ascend.backend.cpu import definition
from lopa_ascend.backend.cpu.ops import CpuOps
from lopa_ascend.backend.interface import Entries, Int4Weight
from lopa_ascend.families import dream
from lopa_ascend.kv.pages import PAGE_SIZE
from lopa_ascend.model.base import ForwardInputs, settle
from lopa_ascend.model.decoder import Decoder
from tests.dream_checkpoint import load
from tests.tiny import write_dream
from tests.torch.paging import randn


def draw(outputs: int, inputs: int, group: int, *, has_zeros: bool, seed: int = 0) -> Int4Weight:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(256, (outputs, inputs // 2), generator=generator, dtype=torch.uint8)
    zero = torch.randint(16, (outputs, inputs // group), generator=generator, dtype=torch.uint8)
    return Int4Weight(codes, randn(outputs, inputs // group, seed=seed).abs(), zero if has_zeros else None)


def plain(weight: Int4Weight) -> Tensor:
    """The weight as float64 [out, in], code by code."""
    outputs, groups = weight.scale.shape
    values = torch.empty(outputs, 2 * weight.codes.shape[1], dtype=torch.float64)
    values[:, ::2], values[:, 1::2] = weight.codes % 16, weight.codes // 16
    zero = torch.full((outputs, groups), 8.0) if weight.zero is None else weight.zero
    centered = values.view(outputs, groups, -1) - zero.double()[:, :, None]
    return (centered * weight.scale.double()[:, :, None]).flatten(1)


def activations(rows: int, inputs: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    codes = torch.randint(-127, 128, (rows, inputs), generator=generator, dtype=torch.int8)
    return codes, randn(rows, seed=1).abs()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "group"), [(1, 40, 128, 32), (7, 300, 192, 64), (33, 16, 384, 128)]
)
def test_products_have_the_bits_of_their_definition(
    rows: int, outputs: int, inputs: int, group: int, has_zeros: bool, dtype: torch.dtype
) -> None:
    ops, weight = CpuOps(packs_weights=True), draw(outputs, inputs, group, has_zeros=has_zeros)
    codes, scale = activations(rows, inputs)
    bias = randn(outputs, seed=2).to(dtype)
    found = ops.int4_linear(codes, scale, ops.stored_int4(weight), bias, dtype)
    assert torch.equal(found, definition.int4_linear(codes, scale, weight, bias, dtype))
    exact = (codes.double() @ plain(weight).T) * scale[:, None] + bias.double()
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), exact, rtol=2**-8 if dtype == torch.bfloat16 else 1e-5, atol=1e-2)


def quantized(weight: Tensor, group: int) -> tuple[Int4Weight, Tensor]:
    """A weight [out, in] in int4 with zeros, and what it means."""
    groups = weight.float().unflatten(1, (-1, group))
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scale = (high - low) / 15
    zero = (-low / scale).round()
    codes = ((groups / scale[:, :, None]).round() + zero[:, :, None]).clamp(0, 15)
    meaning = ((codes - zero[:, :, None]) * scale[:, :, None]).flatten(1)
    flat = codes.flatten(1).byte()
    return Int4Weight(flat[:, ::2] | flat[:, 1::2] << 4, scale, zero.byte()), meaning


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_model_runs_on_int4(tmp_path: Path, dtype: torch.dtype) -> None:
    """Near what it computes with the same weights in its own dtype, and with activations that are not int8."""
    path = write_dream(tmp_path, hidden=64, intermediate=96, layers=2, scale=0.1, dtype=dtype)
    positions = torch.arange(40)
    entries = Entries((40,), (40,), torch.zeros(1, 1, dtype=torch.int32), (0,), (0,))
    inputs = ForwardInputs(positions % 50, positions, positions, None, entries, rows=None)
    config, weights = load(path)
    int4: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if name.split(".")[-2] in ("qkv", "o", "gate_up", "down") and name.endswith(".weight"):
            codes, weights[name] = quantized(weight, 32)
            weights[name] = weights[name].to(dtype)
            assert codes.zero is not None
            int4 |= {name: codes.codes, name + "_scale": codes.scale, name + "_zero": codes.zero}
        else:
            int4[name] = weight
    hidden = []
    for own in (weights, int4):
        model = Decoder(dream.FAMILY, config, dict(own), CpuOps(packs_weights=True))
        assert ("integer weights are multiplied exactly" in settle(model)) is (own is int4)
        k_caches, v_caches = torch.zeros(2, config.num_layers, 1, PAGE_SIZE, *config.kv_shape()[-2:], dtype=dtype)
        hidden.append(model.forward(inputs, list(k_caches), list(v_caches)).float())
    assert 0 < (hidden[1] - hidden[0]).norm() < 0.05 * hidden[0].norm()
