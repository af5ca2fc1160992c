"""The fusion pass for rotary embeddings: the halves of every head are rotated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from lopa_ascend.graph.fusion.nodes import aten, value
from lopa_ascend.graph.fusion.patterns import RESULT, Call, Either, Half, Match, Some
from lopa_ascend.graph.fusion.rewriter import Change, Fusion, Refused, Rewriter

X, COS, SIN = Some("x"), Some("cos"), Some("sin")
FIRST, SECOND = Half(X, 0), Half(X, 1)


def product(a: Any, b: Any) -> Call:
    return Call(aten.mul.Tensor, a, b, commutes=True)


ROTATED = Call(aten.cat.default, [Call(aten.neg.default, SECOND), FIRST], -1, name="rotated")
WHOLE = Call(aten.add.Tensor, product(ROTATED, SIN), product(X, COS), commutes=True)
IN_HALVES = Call(
    aten.cat.default,
    [
        Call(aten.sub.Tensor, product(FIRST, COS), product(SECOND, SIN)),
        Call(aten.add.Tensor, product(SECOND, COS), product(FIRST, SIN), commutes=True),
    ],
    -1,
)

# What gives for equal halves of its first argument equal halves, where it keeps the last dimension as it is.
ELEMENTWISE = frozenset({aten.cos.default, aten.sin.default, aten._to_copy.default})
SCALED = frozenset({aten.mul.Tensor, aten.mul.Scalar})
MOVED = frozenset({aten.reshape.default, aten.view.default, aten.unsqueeze.default, aten.expand.default})
TAKEN = frozenset({aten.index.Tensor, aten.index_select.default, aten.embedding.default, aten.slice.Tensor})


def has_equal_halves(rewriter: Rewriter, node: Node) -> bool:
    """Whether the halves of the last dimension are sure to be equal."""
    if node.op == "get_attr":
        first, second = rewriter.tensor(node).tensor_split(2, -1)
        return rewriter.memory.constant(node) and torch.equal(first, second)
    if node.op != "call_function":
        return False
    target, source = node.target, node.args[0]
    if target is aten.cat.default:
        assert isinstance(source, (list, tuple))
        return len(source) == 2 and source[0] is source[1] and node.args[1:] == (-1,)
    if not isinstance(source, Node):
        return False
    size, rank = value(source).shape[-1], value(source).dim()
    if target in SCALED and isinstance(node.args[1], Node):
        return False
    if target is aten.index.Tensor and len(node.args[1]) == rank:  # type: ignore[arg-type]
        return False
    if target is aten.index_select.default and node.args[1] in (-1, rank - 1):
        return False
    known = target in ELEMENTWISE | SCALED | MOVED | TAKEN
    return known and value(node).shape[-1] == size and has_equal_halves(rewriter, source)


def token_and_head_dims(x: Sequence[int], table: Sequence[int]) -> tuple[list[int], list[int]]:
    """Which dimensions of x but the last have a row of the table each, and which are repeated for: heads."""
    rows = [1] * (len(x) - len(table)) + list(table[:-1])
    if len(table) > len(x) or any(row not in (1, size) for row, size in zip(rows, x, strict=False)):
        raise Refused(f"cosines {list(table)} do not broadcast to {list(x)}")
    tokens = [i for i, row in enumerate(rows) if row == x[i]]
    return tokens, [i for i, row in enumerate(rows) if row != x[i]]


def permutation(node: Node) -> list[int] | None:
    args: tuple[Any, ...] = node.args
    rank = value(node).dim()
    if node.target is aten.permute.default:
        return [dim % rank for dim in args[1]]
    if node.target is aten.transpose.int:
        dims = list(range(rank))
        dims[args[1]], dims[args[2]] = dims[args[2]], dims[args[1]]
        return dims
    return None


def permuted(rewriter: Rewriter, x: Node, dims: list[int]) -> Node:
    """``x.permute(dims)``, without going there and back."""
    before, same = permutation(x), list(range(len(dims)))
    if before is not None and [before[dim] for dim in dims] == same:
        source = x.args[0]
        assert isinstance(source, Node)
        return source
    return x if dims == same else rewriter.call(aten.permute.default, x, dims)


def reshaped(rewriter: Rewriter, x: Node, shape: Sequence[int]) -> Node:
    return x if list(value(x).shape) == list(shape) else rewriter.call(aten.reshape.default, x, list(shape))


class Rope:
    """Both ways to write it become ``ops.rope``. Its tables are made once for all heads and layers that use the same
    cosines and sines, where these are computed."""

    def __init__(self) -> None:
        self._tables: dict[Any, tuple[Node, Node]] = {}
        self._fusion = Fusion(Either(WHOLE, IN_HALVES), self._build)

    def __call__(self, rewriter: Rewriter) -> list[Change]:
        return self._fusion(rewriter)

    def _build(self, rewriter: Rewriter, match: Match) -> Sequence[Node]:
        x, cos, sin = match["x"], match["cos"], match["sin"]
        shown = value(x)
        if not isinstance(cos, Node) or not isinstance(sin, Node) or value(cos).shape != value(sin).shape:
            raise Refused("cosines and sines are not of one shape")
        if {value(node).dtype for node in (x, cos, sin, match[RESULT])} != {shown.dtype}:
            raise Refused("it is not computed in the dtype of its input")
        in_halves = "rotated" not in match.bound
        if value(cos).shape[-1] != shown.shape[-1] // (2 if in_halves else 1):
            raise Refused("cosines are not for every pair of a head")
        if not in_halves and not (has_equal_halves(rewriter, cos) and has_equal_halves(rewriter, sin)):
            raise Refused(f"the halves of {cos.name} and {sin.name} are not known to be equal")
        memory = rewriter.memory
        if (memory.roots[cos] | memory.roots[sin]) & memory.written:
            raise Refused("cosines or sines are written into")
        tokens, heads = token_and_head_dims(shown.shape, value(cos).shape)
        sizes = [math.prod(shown.shape[i] for i in dims) for dims in (tokens, heads)]
        order = [*tokens, *heads, shown.dim() - 1]
        tables = self._tables_of(rewriter, cos, sin, sizes[0], shown.shape[-1] // 2)
        turned = permuted(rewriter, x, order)
        flat = reshaped(rewriter, turned, [*sizes, shown.shape[-1]])
        out = reshaped(rewriter, rewriter.call(rewriter.ops.rope, flat, *tables), value(turned).shape)
        back = sorted(range(len(order)), key=order.__getitem__)
        return [permuted(rewriter, out, back)]

    def _tables_of(self, rewriter: Rewriter, cos: Node, sin: Node, tokens: int, half: int) -> tuple[Node, Node]:
        key = (cos, sin, tokens)
        if key not in self._tables:
            order = rewriter.memory.order
            last = max(cos, sin, key=order.__getitem__)
            calls = (node for node in rewriter.graph.nodes if node.op not in ("placeholder", "get_attr"))
            place = last.next if last.op == "call_function" else next(calls)
            with rewriter.graph.inserting_before(place):
                rows = []
                for table in (cos, sin):
                    first = rewriter.call(aten.slice.Tensor, table, -1, 0, half)
                    rows.append(reshaped(rewriter, first, [tokens, half]))
                both = rewriter.call(rewriter.ops.rope_tables, *rows, value(cos).dtype)
                first_part, second_part = rewriter.parts(both, 2)
                self._tables[key] = first_part, second_part
        return self._tables[key]
