"""What a graph must be: functional, and self-explaining. What fused graphs may be used for."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lopa_ascend.graph.fusion import fuse
from tests.graph.plain import rms_norm
from tests.graph.tracing import OPS, calls, fused, randn, traced

T, HIDDEN = 5, 16


@torch.library.custom_op("lopa_tests::doubled", mutates_args=(), schema="(Tensor x) -> Tensor")
def doubled(x: Tensor) -> Tensor:
    """A kernel that takes contiguous tensors alone."""
    assert x.is_contiguous()
    return 2 * x


@doubled.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_parts_of_a_packed_layer_need_not_lie_together() -> None:
    """The parts are slices, of which some views cannot be taken."""
    x, first, second = randn(4, HIDDEN), randn(6, HIDDEN, seed=1), randn(3, HIDDEN, seed=2)

    def across_rows(x: Tensor) -> tuple[Tensor, Tensor]:
        return F.linear(x, first).view(8, 3), F.linear(x, second).view(-1)

    def for_others(x: Tensor) -> tuple[Tensor, Tensor]:
        return doubled(F.linear(x, first).view(4, 2, 3)), F.linear(x, second)

    for function in (across_rows, for_others):
        module, report = fused(function, x)
        assert report.fused == {"packing": 1, "linear": 1}
        assert all(result.is_contiguous() for result in module(x))


def test_a_fused_graph_can_be_traced_and_compiled_and_copied() -> None:
    x, other, weight = randn(T, HIDDEN), randn(T, HIDDEN, seed=1), randn(HIDDEN, seed=2)
    gate_up = randn(8, HIDDEN, seed=3)

    def block(x: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        total = x * 2 + other * 3
        gate, up = F.linear(rms_norm(total, weight), gate_up).chunk(2, -1)
        return F.silu(gate) * up, total

    module, _ = fused(block, x, other)
    assert calls(module) == ["mul", "mul", "ops.add_rms_norm", "ops.linear", "ops.swiglu"]
    expected = module(x, other)
    for again in (traced(module, x, other), torch.compile(module, backend="aot_eager", fullgraph=True)):
        for result, wanted in zip(again(x, other), expected, strict=True):
            assert torch.equal(result, wanted)
    assert torch.equal(copy.deepcopy(module)(x, other)[0], expected[0])
    assert not fuse(module, OPS).fused  # there is nothing more to do


def test_what_a_graph_does_not_say_is_refused_by_name() -> None:
    x = randn(T, HIDDEN)
    symbolic = torch.fx.symbolic_trace(lambda x: x + 1)
    with pytest.raises(ValueError, match="x: the graph does not say what it gives"):
        fuse(symbolic, OPS)
    dynamic = torch.fx.experimental.proxy_tensor.make_fx(lambda x: x + 1, tracing_mode="symbolic")(x)
    with pytest.raises(ValueError, match="x_1: shape .* is not static"):
        fuse(dynamic, OPS)
    with pytest.raises(ValueError, match=r"add_: aten.add_.Tensor writes into its argument"):
        fuse(traced(lambda x: (x * 2).add_(1), x), OPS)
    with pytest.raises(ValueError, match="as_strided: as_strided depends on how a tensor lies in memory"):
        fuse(traced(lambda x: (x * 2).as_strided((4, 3), (6, 2)), x), OPS)
