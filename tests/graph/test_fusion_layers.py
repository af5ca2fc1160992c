"""The passes for rope and linear layers: the graph before and after, what it computes, and what must be left."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.graph.plain import rope
from tests.graph.tracing import DTYPES, OPS, assert_fuses, assert_left, calls, fused, randn, traced

T, HIDDEN = 5, 16
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


# Rotary embeddings.


def factors(*shape: int, dtype: torch.dtype) -> Tensor:
    """Angles' cosines [*shape, 8] with equal halves, as they are of a head of 8."""
    return randn(*shape, 4, seed=7).cos().repeat(*[1] * len(shape), 2).to(dtype)


@dtypes
def test_rope_by_rotated_halves_out_of_tables(dtype: torch.dtype) -> None:
    """The tables are constants in the form that the op wants, and their rows are taken once for q and k."""
    cos, sin = factors(32, 1, dtype=dtype), factors(32, 1, dtype=dtype)
    q, k = randn(T, 4, 8, dtype=dtype), randn(T, 2, 8, dtype=dtype)
    positions = torch.tensor([3, 1, 4, 1, 5])

    def both(q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        at, to = cos[positions], sin[positions]
        return rope(q, at, to), rope(k, at, to)

    before = ["mul", "split", "neg", "cat", "mul", "add"]
    assert calls(traced(both, q, k, positions)) == ["index", "index", *before, *before]
    module, report = fused(both, q, k, positions)
    assert calls(module) == ["index_select", "index_select", "ops.rope", "ops.rope"]
    assert report.fused == {"rope": 2}
    with torch.no_grad():
        assert torch.equal(module(q, k, positions)[0], both(q, k, positions)[0])  # in bfloat16 too


def test_ropes_with_other_cosines_have_their_own_tables() -> None:
    x, cos, sin = randn(T, 3, 8), factors(T, 1, dtype=torch.float32), factors(T, 1, dtype=torch.float32) * 0.5
    module, report = fused(lambda x: (rope(x, cos, sin), rope(x, sin, cos)), x)
    assert report.fused == {"rope": 2}
    assert calls(module).count("ops.rope_tables") == 2


@dtypes
def test_rope_in_halves(dtype: torch.dtype) -> None:
    cos, sin = factors(T, 1, dtype=dtype)[..., :4], factors(T, 1, dtype=dtype)[..., 4:]

    def halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        left, right = x[..., :4], x[..., 4:]
        return torch.cat([left * cos - right * sin, right * cos + sin * left], dim=-1)

    module, _ = fused(halves, randn(T, 3, 8, dtype=dtype), cos, sin)
    assert calls(module)[-2:] == ["ops.rope_tables", "ops.rope"]
    assert "mul" not in calls(module)


def test_rope_on_heads_before_tokens() -> None:
    """x [B, H, S, D] as transformers has it, with factors that are computed: [B, S, D] or the same for the batch."""
    x = randn(2, T, 3 * 8)
    frequencies = randn(4, seed=3)

    def heads_first(x: Tensor, positions: Tensor) -> Tensor:
        angles = positions[..., None].float() * frequencies
        whole = torch.cat((angles, angles), -1)
        return rope(x.view(2, T, 3, 8).transpose(1, 2), whole.cos()[..., None, :, :], whole.sin()[..., None, :, :])

    for positions in (torch.arange(2 * T).view(2, T), torch.arange(T)[None]):
        module, report = fused(heads_first, x, positions)
        assert report.fused == {"rope": 1}
        assert {"neg", "cat"} & set(calls(module)) == {"cat"}


def test_a_rope_is_left_where_it_may_be_none() -> None:
    x, cos, sin = randn(T, 3, 8), factors(T, 1, dtype=torch.float32), factors(T, 1, dtype=torch.float32)
    unequal = randn(T, 1, 8)

    def backwards(x: Tensor) -> Tensor:
        left, right = x.chunk(2, -1)
        return x * cos + torch.cat((right, -left), -1) * sin

    def in_quarters(x: Tensor) -> Tensor:
        return x * cos + torch.cat((-x[..., 4:6], x[..., :6]), -1) * sin

    def interleaved(x: Tensor) -> Tensor:
        return x * cos + torch.cat((-x[..., 1::2], x[..., ::2]), -1) * sin

    def with_the_rotation_used(x: Tensor) -> tuple[Tensor, Tensor]:
        left, right = x.chunk(2, -1)
        rotated = torch.cat((-right, left), -1)
        return x * cos + rotated * sin, rotated

    def with_unequal_angles(x: Tensor) -> Tensor:
        angles = torch.cat((cos[..., :4], sin[..., :4] * 3), -1)
        return rope(x, angles.cos(), angles.sin())

    def with_scaled_angles(x: Tensor) -> Tensor:
        half = cos[..., :4]
        angles = torch.cat((half, half), -1) * unequal
        return rope(x, angles.cos(), angles.sin())

    def with_other_halves(x: Tensor) -> Tensor:
        whole = unequal * 2
        angles = torch.cat((whole, whole), -1)[..., :8]
        return rope(x, angles.cos(), angles.sin())

    for function in (with_unequal_angles, with_scaled_angles, with_other_halves):
        assert_left(function, x, reason={"rope": "are not known to be equal"})
    assert_left(rope, x, cos, sin, reason={"rope": "are not known to be equal"})
    assert_left(lambda x: rope(x, unequal, unequal), x, reason={"rope": "are not known to be equal"})
    for function in (backwards, in_quarters, interleaved):
        assert_left(function, x, reason={"rope": ""})
    assert_left(with_the_rotation_used, x, reason={"rope": "is used by output too"})
    assert_left(lambda x: rope(x, cos, sin), x.bfloat16(), reason={"rope": "not computed in the dtype"})
    assert_left(lambda x: rope(x, cos[None], sin[None]), x, reason={"rope": "do not broadcast"})


# Linear layers.


@dtypes
def test_bias_goes_into_the_product(dtype: torch.dtype) -> None:
    x, weight, bias = (randn(*shape, dtype=dtype) for shape in ((T, HIDDEN), (7, HIDDEN), (7,)))
    for function, before in (
        (lambda x: F.linear(x, weight, bias), ["t", "addmm"]),
        (lambda x: x @ weight.T + bias, ["permute", "mm", "add"]),
        (lambda x: bias + torch.mm(x, weight.t()), ["t", "mm", "add"]),
        (lambda x: torch.addmm(bias, x, weight.mT), ["transpose", "addmm"]),
    ):
        assert calls(traced(function, x)) == before
        module, _ = fused(function, x)
        assert calls(module) == ["ops.linear"]
        assert torch.equal(module(x), OPS.linear(x, weight, bias))


@dtypes
def test_bias_and_activation(dtype: torch.dtype) -> None:
    """SiLU as it is, and taken apart: of biased halves it is a SwiGLU, and by itself one op after the product."""
    x, weight, bias = (randn(*shape, dtype=dtype) for shape in ((T, HIDDEN), (8, HIDDEN), (8,)))

    def apart(x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.sigmoid(wide)).to(x.dtype)

    for silu in (F.silu, apart, lambda x: F.silu(x.float()).to(x.dtype)):
        module, report = fused(lambda x: silu(x @ weight.T + bias), x)  # noqa: B023
        assert calls(module) == ["ops.linear", "silu"]
        assert report.fused == {"bias": 1, "linear": 1}

        def gated(x: Tensor) -> Tensor:
            gate, up = (x @ weight.T + bias).chunk(2, -1)
            return silu(gate) * up  # noqa: B023

        module, report = fused(gated, x)
        assert calls(module) == ["ops.linear", "ops.swiglu"]
        assert report.fused == {"bias": 1, "swiglu": 1, "linear": 1}


def test_a_linear_layer_of_tokens_in_batches_is_flat_inside() -> None:
    x, weight, bias = randn(2, 3, HIDDEN), randn(7, HIDDEN, seed=1), randn(7, seed=2)
    module, _ = fused(lambda x: F.linear(x, weight, bias), x)
    assert calls(module) == ["reshape", "ops.linear", "reshape"]
    fused(lambda x: F.linear(x.view(6, HIDDEN), weight).view(3, 2, 7), x)


def test_a_linear_layer_whose_weight_is_an_input_stays() -> None:
    class Product(torch.nn.Module):
        def forward(self, x: Tensor, weight: Tensor) -> Tensor:
            return F.linear(x, weight)

    args = randn(T, HIDDEN), randn(7, HIDDEN, seed=1)
    module = torch.export.export(Product(), args).run_decompositions({}).module()
    assert assert_fuses(module, Product(), *args).refused == {"linear": ["weight is no constant of the graph"]}


def test_what_is_added_is_no_bias_if_it_is_a_residual_or_the_product_is_used() -> None:
    x, weight, bias = randn(7, 7), randn(7, 7, seed=1), randn(7, seed=2)

    def product_used(x: Tensor) -> tuple[Tensor, Tensor]:
        product = x @ weight
        return product + bias, product

    def twice(x: Tensor) -> Tensor:
        return torch.add(x @ weight, bias, alpha=2)

    assert_left(lambda x: x @ weight + x, x, reason={"bias": ""})
    assert_left(lambda x: x @ weight + bias[:, None], x, reason={"bias": ""})
    assert_left(product_used, x, reason={"bias": "is used by output too"})
    assert_left(twice, x, reason={"bias": ""})
    assert_left(lambda x: x @ weight + bias.double().float()[:1], x, reason={"bias": "shape or dtype of a bias"})
    assert_left(lambda x: torch.addmm(bias, x, weight, beta=2), x, reason={"linear": ""})
    assert_left(torch.mm, x, weight, reason={"linear": ""})
    assert_left(F.linear, x, weight, reason={"linear": ""})


# Packing.


@dtypes
def test_projections_of_one_input_are_packed(dtype: torch.dtype) -> None:
    x = randn(T, HIDDEN, dtype=dtype)
    weights = [randn(rows, HIDDEN, dtype=dtype, seed=rows) for rows in (8, 4, 6)]
    biases = [randn(rows, dtype=dtype, seed=rows) for rows in (8, 4, 6)]

    def qkv(x: Tensor) -> list[Tensor]:
        return [2 * F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]

    assert calls(traced(qkv, x)) == ["t", "addmm", "mul"] * 3
    module, report = fused(qkv, x)
    assert calls(module) == ["ops.linear", "split_with_sizes", "mul", "mul", "mul"]
    assert report.fused == {"packing": 1, "linear": 1}
    # Stacked once, and the single ones are gone.
    assert sorted(list(tensor.shape) for tensor in module.buffers()) == [[18], [18, HIDDEN]]
    assert not list(module.parameters())


@dtypes
@pytest.mark.parametrize("up_first", [False, True])
def test_gate_and_up_are_packed_to_a_swiglu(dtype: torch.dtype, up_first: bool) -> None:
    x = randn(T, HIDDEN, dtype=dtype)
    gate, up = randn(2, 6, HIDDEN, dtype=dtype, seed=1)

    def mlp(x: Tensor) -> Tensor:
        if up_first:
            side = F.linear(x, up)
            return side * F.silu(F.linear(x, gate))
        return F.silu(F.linear(x, gate)) * F.linear(x, up)

    module, report = fused(mlp, x)
    assert calls(module) == ["ops.linear", "ops.swiglu"]
    assert report.fused == {"packing": 1, "swiglu": 1, "linear": 1}


def test_packing_keeps_apart_what_does_not_belong_together() -> None:
    x = randn(T, HIDDEN)
    first, second, bias = randn(6, HIDDEN, seed=1), randn(6, HIDDEN, seed=2), randn(6, seed=3)

    def of_two_dtypes(x: Tensor) -> tuple[Tensor, Tensor]:
        return F.linear(x, first), F.linear(x.bfloat16(), second.bfloat16())

    def one_biased(x: Tensor) -> tuple[Tensor, Tensor]:
        return F.linear(x, first, bias), F.linear(x, second)

    def of_two_inputs(x: Tensor) -> tuple[Tensor, Tensor]:
        return F.linear(x, first), F.linear(x + 1, second)

    def by_an_input(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return torch.ops.aten.linear(x, first), torch.ops.aten.linear(x, weight)

    def biased_by_an_input(x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        return F.linear(x, first, bias), F.linear(x, second, bias)

    assert_left(of_two_dtypes, x, reason={"packing": ""})
    assert_left(one_biased, x, reason={"packing": "some have a bias and some have none"})
    assert_left(of_two_inputs, x, reason={"packing": ""})
    assert_left(by_an_input, x, second, reason={"packing": ""})
    assert_left(biased_by_an_input, x, bias, reason={"packing": "is no constant"})


# SwiGLU.


@dtypes
def test_swiglu_of_halves(dtype: torch.dtype) -> None:
    x = randn(T, 12, dtype=dtype)
    for function in (
        lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
        lambda x: x[:, 6:] * F.silu(x[:, :6]),
        lambda x: F.silu(x.split([6, 6], 1)[0]) * x[..., -6:],
    ):
        module, report = fused(function, x)
        assert calls(module) == ["ops.swiglu"]
        assert report.fused == {"swiglu": 1}


def test_a_swiglu_is_left_where_it_is_none() -> None:
    x = randn(12, 12)
    apart = "not the halves of one tensor"
    assert_left(lambda x: F.silu(x[:, 6:]) * x[:, :6], x, reason={"swiglu": apart})
    assert_left(lambda x: F.silu(x[:, :4]) * x[:, 8:], x, reason={"swiglu": apart})
    assert_left(lambda x: F.silu(x[:, :4]) * x[:, 4:8], x, reason={"swiglu": apart})
    assert_left(lambda x: F.silu(x[:, :6]) * x.split([3, 6, 3], 1)[1], x, reason={"swiglu": apart})
    assert_left(lambda x: F.silu(x[:, ::2]) * x[:, 6:], x, reason={"swiglu": apart})
    assert_left(lambda x: F.silu(x.chunk(2, -1)[1]) * x.chunk(2, -1)[0], x, reason={"swiglu": apart})
    assert_left(lambda x: F.silu(x.chunk(2)[0]) * x.chunk(2)[1], x, reason={"swiglu": apart})
    assert_left(lambda x: F.silu(x[:6]) * x[6:], x, reason={"swiglu": apart})
    assert_left(lambda x: F.silu(x[:, :6]) * x.flip(0)[:, 6:], x, reason={"swiglu": apart})
    assert_left(lambda x: torch.sigmoid(x[:, :6]) * x[:, 6:], x, reason={"swiglu": ""})

    def silu_used(x: Tensor) -> tuple[Tensor, Tensor]:
        gate = F.silu(x[:, :6])
        return gate * x[:, 6:], gate

    assert_left(silu_used, x, reason={"swiglu": "silu is used by output too"})
