"""The passes for norms, sums and quantisation: the graph before and after, what it computes, what must be left."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.graph.plain import rms_norm
from tests.graph.tracing import DTYPES, OPS, assert_fuses, assert_left, calls, fused, randn, traced

T, HIDDEN = 5, 16
NORM = ["pow", "mean", "add", "rsqrt", "mul"]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def sum_and_norm(x: Tensor, other: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Of tensors that are made inside the graph, as residuals are."""
    total = x * 2 + other * 3
    return rms_norm(total, weight), total * 5


# RMSNorm.


def test_rms_norm_in_float32() -> None:
    x, weight = randn(T, HIDDEN), randn(HIDDEN, seed=1)
    assert calls(traced(rms_norm, x, weight)) == [*NORM, "mul"]
    module, report = fused(rms_norm, x, weight)
    assert calls(module) == ["ops.rms_norm"]
    assert report.fused == {"rms_norm": 1}
    assert str(report).startswith("rms_norm: 1\n  mul_1\nrope: 0\n")


def test_rms_norm_in_bfloat16_with_its_casts() -> None:
    x, weight = randn(T, HIDDEN, dtype=torch.bfloat16), randn(HIDDEN, dtype=torch.bfloat16, seed=1)
    assert calls(traced(rms_norm, x, weight)) == ["_to_copy", *NORM, "_to_copy", "mul"]
    module, _ = fused(rms_norm, x, weight)
    assert calls(module) == ["ops.rms_norm"]
    assert torch.equal(module(x, weight), OPS.rms_norm(x, weight, 1e-6))


@dtypes
def test_other_ways_to_write_an_rms_norm(dtype: torch.dtype) -> None:
    def scaled_in_float32(x: Tensor, weight: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        scale = torch.rsqrt((wide * wide).mean((-1,), keepdim=True) + 1e-5)
        return (scale * wide * weight.float()).to(x.dtype)

    def with_dead_views(x: Tensor, weight: Tensor) -> Tensor:
        wide = x.float().view(T, HIDDEN).reshape(x.shape).float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(x.dim() - 1, True) + 1e-6)
        return F.dropout(normed.to(x.dtype).contiguous(), 0.5, training=False).clone() * weight.view(-1)

    x, weight = randn(T, HIDDEN, dtype=dtype), randn(HIDDEN, dtype=dtype, seed=1)
    for function in (scaled_in_float32, with_dead_views):
        module, _ = fused(function, x, weight)
        assert calls(module) == ["ops.rms_norm"], function


@dtypes
def test_the_rms_norm_of_torch(dtype: torch.dtype) -> None:
    """Which export leaves whole."""
    norm, x = torch.nn.RMSNorm(HIDDEN, eps=1e-6, dtype=dtype), randn(T, HIDDEN, dtype=dtype)
    with torch.no_grad():
        module = torch.export.export(norm, (x,)).run_decompositions({}).module()
    assert assert_fuses(module, norm, x).fused == {"rms_norm": 1}


def test_an_rms_norm_is_left_where_it_means_something_else() -> None:
    x, weight = randn(T, T), randn(T, seed=1)

    def over_tokens(x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(0, keepdim=True) + 1e-6) * weight

    def with_a_sum(x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + weight) * weight

    def returning_the_scale(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return x * scale * weight, scale

    assert_left(over_tokens, x, weight, reason={"rms_norm": ""})
    assert_left(with_a_sum, x, weight, reason={"rms_norm": ""})
    assert_left(returning_the_scale, x, weight, reason={"rms_norm": "rsqrt is used by output too"})
    assert_left(rms_norm, x, weight[:, None], reason={"rms_norm": "a weight [5, 1] is not for the last dimension"})


def test_an_rms_norm_is_left_where_dtypes_are_other_ones() -> None:
    x, weight = randn(T, HIDDEN, dtype=torch.bfloat16), randn(HIDDEN, dtype=torch.bfloat16, seed=1)

    def in_bfloat16(x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight

    assert_left(in_bfloat16, x, weight, reason={"rms_norm": "not computed in float32"})
    assert_left(rms_norm, x, weight.float(), reason={"rms_norm": "differ"})  # rounded, then scaled in float32
    assert_left(rms_norm, x.double(), weight.double(), reason={"rms_norm": "not computed in float32"})


# Residual addition and RMSNorm.


@dtypes
def test_the_sum_lives_on_as_residual(dtype: torch.dtype) -> None:
    x, other = randn(2, T, HIDDEN, dtype=dtype)
    weight = randn(HIDDEN, dtype=dtype, seed=1)
    module, report = fused(sum_and_norm, x, other, weight)
    assert calls(module) == ["mul", "mul", "ops.add_rms_norm", "mul"]
    assert report.fused == {"rms_norm": 1, "add_rms_norm": 1}


def test_a_summand_that_is_still_needed_is_not_the_one_that_is_written_into() -> None:
    x, other, weight = randn(T, HIDDEN), randn(T, HIDDEN, seed=1), randn(HIDDEN, seed=2)

    def needed_later(x: Tensor, other: Tensor) -> tuple[Tensor, ...]:
        first, second = x * 2, other * 3
        total = first + second
        return rms_norm(total, weight), total, first.view(-1) + 1

    module, _ = fused(needed_later, x, other)
    assert "ops.add_rms_norm" in calls(module)
    (call,) = (node for node in module.graph.nodes if node.target == OPS.add_rms_norm)
    assert [str(node) for node in call.args[:2]] == ["mul", "mul_1"]  # into mul_1


def test_a_sum_is_left_where_nothing_may_be_written_into() -> None:
    x, other, weight = randn(T, HIDDEN), randn(T, HIDDEN, seed=1), randn(HIDDEN, seed=2)
    needed = "are both still needed"

    def of_inputs(x: Tensor, other: Tensor) -> Tensor:
        return rms_norm(x + other, weight)

    def of_a_view_of_an_input(x: Tensor, other: Tensor) -> Tensor:
        return rms_norm(x.view(HIDDEN, T).t().reshape(T, HIDDEN) + other.view(-1).view(T, HIDDEN), weight)

    def both_used_later(x: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        first, second = x * 2, other * 3
        return rms_norm(first + second, weight), first[1:] * second[:-1]

    def one_returned(x: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        first = x * 2
        return rms_norm(first + other, weight), first[1:]

    for function in (of_inputs, both_used_later, one_returned):
        assert_left(function, x, other, reason={"add_rms_norm": needed})
    fused(of_a_view_of_an_input, x, other)


def test_a_sum_is_left_where_it_is_no_plain_one() -> None:
    x, other, weight = randn(T, HIDDEN), randn(T, HIDDEN, seed=1), randn(HIDDEN, seed=2)

    def broadcast(x: Tensor, other: Tensor) -> Tensor:
        return rms_norm(x * 2 + other[:1] * 3, weight)

    def weighted(x: Tensor, other: Tensor) -> Tensor:
        return rms_norm(torch.add(x * 2, other * 3, alpha=2), weight)

    def overlapping(x: Tensor, other: Tensor) -> Tensor:
        return rms_norm((other[:1] * 2).expand(T, -1) + x, weight)

    def of_a_number(x: Tensor, other: Tensor) -> Tensor:
        return rms_norm(x * 2 + 3, weight)

    def twice(x: Tensor, other: Tensor) -> Tensor:
        double = x * 2
        return rms_norm(double + double, weight)

    def by_a_later_weight(x: Tensor, other: Tensor) -> Tensor:
        total = x * 2 + other * 3
        return rms_norm(total, weight * other[0])

    assert_left(by_a_later_weight, x, other, reason={"add_rms_norm": "comes after"})
    assert_left(broadcast, x, other, reason={"add_rms_norm": "not of one shape and dtype"})
    assert_left(weighted, x, other, reason={"add_rms_norm": ""})
    assert_left(overlapping, x, other, reason={"add_rms_norm": "are both still needed"})
    assert_left(of_a_number, x, other, reason={"add_rms_norm": "not of one shape and dtype"})
    assert_left(twice, x, other, reason={"add_rms_norm": "share memory"})
