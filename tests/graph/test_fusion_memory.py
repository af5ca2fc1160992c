"""What keeps a pass from rewriting: memory that is written into, inputs that others see, graphs that say too little."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lopa_ascend.graph.fusion import fuse
from tests.graph.plain import rms_norm
from tests.graph.tracing import OPS, assert_left, calls, fused, randn, traced

T, HIDDEN = 5, 16


@torch.library.custom_op("lopa_tests::doubled", mutates_args=(), schema="(Tensor x) -> Tensor")
def doubled(x: Tensor) -> Tensor:
    """A kernel that takes contiguous tensors alone."""
    assert x.is_contiguous()
    return 2 * x


@doubled.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_nothing_is_fused_across_a_write_into_what_it_reads() -> None:
    x, weight, projection = randn(T, HIDDEN), randn(HIDDEN, seed=1), randn(3, HIDDEN, seed=2)

    def norm_of_changed(x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        x.view(-1).mul_(2)
        return x * scale * weight

    def halves_of_changed(x: Tensor) -> Tensor:
        gate = F.silu(x[:, :8])
        x.view(-1)[3:].add_(1)
        return gate * x[:, 8:]

    def packed_of_changed(x: Tensor) -> tuple[Tensor, Tensor]:
        first = F.linear(x, projection)
        x.t().mul_(2)
        return first, F.linear(x, projection)

    def weight_of_changed(x: Tensor) -> tuple[Tensor, Tensor]:
        kept = weight * 1
        normed = rms_norm(x, kept)
        kept.mul_(2)
        return normed, kept

    between = "memory is written into between"
    assert_left(norm_of_changed, x, reason={"rms_norm": between})
    assert_left(halves_of_changed, x, reason={"swiglu": between})
    assert_left(packed_of_changed, x, reason={"packing": between})
    assert fused(weight_of_changed, x)[1].fused == {"rms_norm": 1}  # the write comes after


def test_a_sum_that_is_changed_later_is_the_one_that_was_normed() -> None:
    x, other, weight = randn(T, HIDDEN), randn(T, HIDDEN, seed=1), randn(HIDDEN, seed=2)

    def changed_between(x: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        total = x * 2 + other * 3
        kept = total.t()
        kept.add_(1)
        return rms_norm(total, weight), kept

    def changed_after(x: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        total = x * 2 + other * 3
        normed = rms_norm(total, weight)
        return normed, total.add_(1)

    assert_left(changed_between, x, other, reason={"add_rms_norm": "memory is written into between"})
    assert "ops.add_rms_norm" in calls(fused(changed_after, x, other)[0])


def test_constants_that_are_written_into_are_none() -> None:
    x, weight = randn(T, HIDDEN), randn(8, HIDDEN, seed=1)

    def with_a_counter(x: Tensor) -> Tensor:
        weight.view(-1)[0].add_(0)
        return F.linear(x, weight)

    _, report = fused(with_a_counter, x)
    assert not report.fused


def test_copies_stay_where_they_are_seen() -> None:
    x = randn(T, HIDDEN)

    def returned(x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x.clone()

    def written(x: Tensor) -> Tensor:
        kept = x.clone()
        kept.add_(1)
        return kept * 2

    module, _ = fused(returned, x)
    first, second = module(x)
    assert first.data_ptr() != second.data_ptr()
    fused(written, x)  # would change x


def test_views_that_are_written_through_stay_views() -> None:
    def through(x: Tensor) -> Tensor:
        (x * 2).view(HIDDEN, T).view(-1)[:3].zero_()
        flat = x.view(-1)
        flat[:3].zero_()
        return flat * 2

    module, _ = fused(through, randn(T, HIDDEN))
    assert "view" in calls(module)
    assert "zero_" in calls(module)


def test_parts_of_a_packed_layer_need_not_lie_together() -> None:
    """The parts are slices, of which some views cannot be taken."""
    x, first, second = randn(4, HIDDEN), randn(6, HIDDEN, seed=1), randn(3, HIDDEN, seed=2)

    def across_rows(x: Tensor) -> tuple[Tensor, Tensor]:
        return F.linear(x, first).view(8, 3), F.linear(x, second).view(-1)

    def by_strides(x: Tensor) -> tuple[Tensor, Tensor]:
        both = F.linear(x, first), F.linear(x, second)
        return both[0].as_strided((4, 3), (6, 2)), both[1]

    def for_others(x: Tensor) -> tuple[Tensor, Tensor]:
        return doubled(F.linear(x, first).view(4, 2, 3)), F.linear(x, second)

    for function in (across_rows, for_others):
        module, report = fused(function, x)
        assert report.fused == {"packing": 1, "linear": 1}
        assert all(result.is_contiguous() for result in module(x))
    assert_left(by_strides, x, reason={"packing": "a result is written into"})


def test_what_a_call_of_unknown_effect_may_write_is_not_moved_across_it() -> None:
    def of_halves(x: Tensor) -> Tensor:
        gate = F.silu(x[:, :8])
        return gate * x[:, 8:]

    x = randn(T, HIDDEN)
    module = traced(of_halves, x)
    (silu,) = (node for node in module.graph.nodes if "silu" in node.name)
    with module.graph.inserting_after(silu):
        module.graph.call_function(print, (next(iter(module.graph.nodes)),))
    assert fuse(module, OPS).refused["swiglu"] == ["memory is written into between slice_1 and mul"]


@pytest.mark.parametrize(("target", "packed"), [("cache", True), ("x", False)])
def test_writes_of_the_backend_are_known(target: str, packed: bool) -> None:
    """A KV write between two linear layers of one input keeps them apart only where it writes into this."""
    x, cache, first, second = randn(T, 16), randn(T, 16, seed=1), randn(3, 16, seed=2), randn(5, 16, seed=3)
    module = traced(lambda x, cache: (F.linear(x, first), F.linear(x, second)), x, cache)
    inputs = dict(zip(("x", "cache"), module.graph.nodes, strict=False))
    (later,) = (node for node in module.graph.nodes if node.name == "mm_1")
    with module.graph.inserting_before(later):
        module.graph.call_function(OPS.kv_write, (*[inputs["x"]] * 2, *[inputs[target]] * 2, inputs["x"]))
    assert fuse(module, OPS).fused == ({"packing": 1, "linear": 1} if packed else {"linear": 2})


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
