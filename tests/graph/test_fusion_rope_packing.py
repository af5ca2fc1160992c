"""One rope for queries and keys, and tables that are made once: the graph after fusion, and what is left."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.graph.plain import rope
from tests.graph.tracing import DTYPES, OPS, assert_fuses, assert_left, calls, fused, randn, traced

T, HIDDEN, D = 5, 16, 8
POSITIONS = torch.tensor([3, 1, 4, 1, 5])
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def table(seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Cosines [32, 1, D] of some angles, with equal halves."""
    return randn(32, 1, D // 2, seed=seed).cos().repeat(1, 1, 2).to(dtype)


def heads(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight).unflatten(-1, (-1, D))


def weights(*counts: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Projections to so many heads."""
    return [randn(count * D, HIDDEN, dtype=dtype, seed=count) for count in counts]


@dtypes
def test_queries_and_keys_are_rotated_with_the_values_beside_them(dtype: torch.dtype) -> None:
    x, cos, sin = randn(T, HIDDEN, dtype=dtype), table(1, dtype), table(2, dtype)
    q_weight, k_weight, v_weight = weights(4, 2, 3, dtype=dtype)

    def layer(x: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        q, k, v = (heads(x, weight) for weight in (q_weight, k_weight, v_weight))
        at, to = cos[positions], sin[positions]
        return rope(q, at, to), rope(k, at, to), v * 2

    module, report = fused(layer, x, POSITIONS)
    assert report.fused == {"rope": 2, "packing": 1, "rope_packing": 1, "linear": 1}
    tables = ["index_select", "index_select", "where", "where"]
    assert calls(module) == [*tables, "ops.linear", "reshape", "ops.rope", "split_with_sizes", "mul"]
    for ours, theirs in zip(module(x, POSITIONS), layer(x, POSITIONS), strict=True):
        assert ours.shape == theirs.shape
    assert torch.equal(module(x, POSITIONS)[2], layer(x, POSITIONS)[2])  # an angle of 0 rounds nothing


def test_layers_that_look_the_cosines_up_again_share_them() -> None:
    """In each of them, cast and with a dimension for the heads; the values' projection comes first."""
    x, cos, sin = randn(T, HIDDEN).bfloat16(), table(1)[:, 0], table(2)[:, 0]
    layers = [weights(4, 2, 2, dtype=torch.bfloat16), weights(4, 2, 2, dtype=torch.bfloat16)]

    def model(x: Tensor, positions: Tensor) -> Tensor:
        for q_weight, k_weight, v_weight in layers:
            at, to = (part[positions].to(x.dtype)[:, None] for part in (cos, sin))
            v, k, q = heads(x, v_weight), heads(x, k_weight), heads(x, q_weight)
            x = x + (rope(q, at, to)[:, :2] * rope(k, at, to) * v).flatten(1)
        return x

    module, report = fused(model, x, POSITIONS)
    assert report.fused == {"rope": 4, "packing": 2, "rope_packing": 2, "linear": 2}
    for op, number in (("index_select", 2), ("where", 2), ("ops.rope", 2), ("index", 0)):
        assert calls(module).count(op) == number


def test_cosines_that_the_graph_computes_come_before_the_projections() -> None:
    x, frequencies = randn(T, HIDDEN), randn(D // 2, seed=3)
    q_weight, k_weight, v_weight = weights(4, 2, 3)

    def layer(x: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        angles = torch.outer(positions.float(), frequencies).repeat(1, 2)
        v = heads(x, v_weight).transpose(0, 1)

        def turned(x: Tensor) -> Tensor:
            whole = torch.cat((angles[:, : D // 2],) * 2, -1)
            return rope(x, whole.cos().unsqueeze(1), whole.sin().unsqueeze(1))

        return turned(heads(x, q_weight)), turned(heads(x, k_weight)), v

    module, report = fused(layer, x, POSITIONS)
    assert report.fused["rope_packing"] == 1
    assert calls(module).count("ops.rope") == 1
    assert calls(module).index("ops.rope_tables") < calls(module).index("ops.linear")


def test_parts_that_are_all_rotated_need_no_other_tables() -> None:
    x, cos, sin = randn(T, HIDDEN), table(1), table(2)
    both = weights(4, 2)

    def layer(x: Tensor, positions: Tensor) -> list[Tensor]:
        return [rope(heads(x, weight), cos[positions], sin[positions]) for weight in both]

    module, _ = fused(layer, x, POSITIONS)
    assert calls(module) == [
        "index_select", "index_select", "ops.linear", "reshape", "ops.rope", "split_with_sizes",
    ]  # fmt: skip


def test_a_model_that_packs_by_itself_gets_one_rope_too() -> None:
    x, cos, sin = randn(T, HIDDEN), table(1), table(2)
    (weight,) = weights(8)

    def layer(x: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        q, k, v = F.linear(x, weight).split([4 * D, 2 * D, 2 * D], -1)
        at, to = cos[positions], sin[positions]
        return rope(q.reshape(T, 4, D), at, to), rope(k.reshape(T, 2, D), at, to), v * 2

    module, report = fused(layer, x, POSITIONS)
    assert report.fused == {"rope": 2, "rope_packing": 1, "linear": 1}
    assert calls(module).count("ops.rope") == 1


def test_parts_are_rotated_by_themselves_where_that_is_something_else() -> None:
    x, cos, sin = randn(T, HIDDEN), table(1)[:T], table(2)[:T]
    q_weight, k_weight, v_weight = weights(4, 2, 3)
    odd_weight = v_weight[: D + 3].clone()

    def by_other_tables(x: Tensor) -> tuple[Tensor, ...]:
        return rope(heads(x, q_weight), cos, sin), rope(heads(x, k_weight), sin, cos), heads(x, v_weight)

    def beside_other_heads(x: Tensor) -> tuple[Tensor, ...]:
        odd = F.linear(x, odd_weight)
        return rope(heads(x, q_weight), cos, sin), rope(heads(x, k_weight), cos, sin), odd

    def used_as_they_are(x: Tensor) -> tuple[Tensor, ...]:
        q = heads(x, q_weight)
        return rope(q, cos, sin), rope(heads(x, k_weight), cos, sin), q * 2

    def normed(x: Tensor) -> tuple[Tensor, ...]:
        q, k = (heads(x, weight).tanh() for weight in (q_weight, k_weight))
        return rope(q, cos, sin), rope(k, cos, sin)

    assert_left(by_other_tables, x, reason={"rope_packing": "rotated by different tables"})
    assert_left(beside_other_heads, x, reason={"rope_packing": "not all parts, of sizes [11, 32, 16], are made of"})
    for function in (used_as_they_are, normed):
        assert_left(function, x, reason={"rope_packing": ""})


def test_a_summary_counts_what_was_left_by_line() -> None:
    class Gated(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gates = torch.nn.ParameterList(randn(4, HIDDEN, seed=n) for n in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for gate in self.gates:
                x = x + (F.silu(F.linear(x, gate)) * x[:, :4]).repeat(1, 4)
            return x

    gated, x = Gated(), randn(T, HIDDEN)
    with torch.no_grad():
        module = torch.export.export(gated, (x,)).run_decompositions({}).module()
    report = assert_fuses(module, gated, x)
    words = r"fused linear 3; left swiglu 3 (test_fusion_rope_packing.py:"
    assert report.summary().startswith(words), report.summary()
    assert report.summary().endswith(": gate and up are not the halves of one tensor)")
    assert "swiglu: 0\n  mul (test_fusion_rope_packing.py:" in str(report)
    assert not traced(lambda x: x * 2, x).graph.find_nodes(op="call_function", target=OPS.linear)
