"""The fusion pass for rotary embeddings, which rotate the two halves of every head."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.fx import Node

from lopa_ascend.graph.fusion.nodes import aten, static, value
from lopa_ascend.graph.fusion.patterns import RESULT, Call, Either, Half, Match, Some
from lopa_ascend.graph.fusion.rewriter import Change, Fusion, NotFused, Rewriter
from lopa_ascend.graph.fusion.tables import first_equals, has_equal_halves, rows_of_constant

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


def token_and_head_dims(x: Sequence[int], table: Sequence[int]) -> tuple[list[int], list[int]]:
    """The dimensions of x, without the last one, in which the table has a row for each index, and those in which it
    repeats: heads."""
    rows = [1] * (len(x) - len(table)) + list(table[:-1])
    if len(table) > len(x) or any(row not in (1, size) for row, size in zip(rows, x, strict=False)):
        raise NotFused(f"cosines {list(table)} do not broadcast to {list(x)}")
    tokens = [i for i, row in enumerate(rows) if row == x[i]]
    return tokens, [i for i, row in enumerate(rows) if row != x[i]]


def permutation(node: Node) -> list[int] | None:
    """The order into which a node brings its argument's dimensions; None if it does something else."""
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
    """``x.permute(dims)``, without a call if ``dims`` changes nothing or undoes a permutation."""
    before, same = permutation(x), list(range(len(dims)))
    if before is not None and [before[dim] for dim in dims] == same:
        source = x.args[0]
        assert isinstance(source, Node)
        return source
    return x if dims == same else rewriter.call(aten.permute.default, x, dims)


def reshaped(rewriter: Rewriter, x: Node, shape: Sequence[int]) -> Node:
    return x if static(value(x).shape) == static(shape) else rewriter.call(aten.reshape.default, x, static(shape))


class Rope:
    """Makes both ways to write a rotary embedding ``ops.rope``.

    The op's tables are made once for all heads and layers that use the same cosines and sines. If these are rows of
    constant tables, the constants are brought into the op's form here, and only the gather of rows is left to the
    graph; otherwise the graph forms the tables where it computes the cosines.
    """

    def __init__(self) -> None:
        self._tables: dict[Any, tuple[Node, Node]] = {}
        self._first: dict[Node, Node] = {}
        self._fusion = Fusion(Either(WHOLE, IN_HALVES), self._build)

    def __call__(self, rewriter: Rewriter) -> list[Change]:
        self._first = first_equals(rewriter)
        return self._fusion(rewriter)

    def _check(self, rewriter: Rewriter, match: Match) -> None:
        """Raises NotFused for a match that is no rotation of pairs of one head, or is computed in another dtype."""
        x, cos, sin = match["x"], match["cos"], match["sin"]
        x_value = value(x)
        if not isinstance(cos, Node) or not isinstance(sin, Node) or value(cos).shape != value(sin).shape:
            raise NotFused("cosines and sines are not of one shape")
        if {value(node).dtype for node in (x, cos, sin, match[RESULT])} != {x_value.dtype}:
            raise NotFused("it is not computed in the dtype of its input")
        in_halves = "rotated" not in match.bound
        if value(cos).shape[-1] != x_value.shape[-1] // (2 if in_halves else 1):
            raise NotFused("cosines are not for every pair of a head")
        if not in_halves and not (has_equal_halves(rewriter, cos) and has_equal_halves(rewriter, sin)):
            raise NotFused(f"the halves of {cos.name} and {sin.name} are not known to be equal")

    def _build(self, rewriter: Rewriter, match: Match) -> Sequence[Node]:
        self._check(rewriter, match)
        x, cos, sin = match["x"], match["cos"], match["sin"]
        x_value = value(x)
        tokens, heads = token_and_head_dims(x_value.shape, value(cos).shape)
        num_tokens, num_heads = (math.prod(x_value.shape[i] for i in dims) for dims in (tokens, heads))
        head_dim = x_value.shape[-1]
        order = [*tokens, *heads, x_value.dim() - 1]
        tables = self._tables_of(rewriter, self._first[cos], self._first[sin], num_tokens, head_dim // 2)
        heads_last = permuted(rewriter, x, order)
        flat = reshaped(rewriter, heads_last, [num_tokens, num_heads, head_dim])
        out = reshaped(rewriter, rewriter.call(rewriter.ops.rope, flat, *tables), value(heads_last).shape)
        back = sorted(range(len(order)), key=order.__getitem__)
        return [permuted(rewriter, out, back)]

    def _tables_of(self, rewriter: Rewriter, cos: Node, sin: Node, tokens: int, half: int) -> tuple[Node, Node]:
        key = (cos, sin, str(tokens))
        if key not in self._tables:
            cos_rows, sin_rows = rows_of_constant(rewriter, cos), rows_of_constant(rewriter, sin)
            if cos_rows and sin_rows and cos_rows[1] is sin_rows[1]:
                (cos_table, indices), (sin_table, _) = cos_rows, sin_rows
                self._tables[key] = self._gathered(rewriter, cos_table, sin_table, indices, half)
            else:
                self._tables[key] = self._formed(rewriter, cos, sin, tokens, half)
        return self._tables[key]

    def _gathered(self, rewriter: Rewriter, cos: Tensor, sin: Tensor, indices: Node, half: int) -> tuple[Node, Node]:
        constants = [rewriter.constant(x) for x in rewriter.ops.rope_tables(cos[:, :half], sin[:, :half], cos.dtype)]
        place = indices.next if indices.op == "call_function" else rewriter.first_call()
        with rewriter.graph.inserting_before(place):
            first, second = (rewriter.call(aten.index_select.default, x, 0, indices) for x in constants)
        return first, second

    def _formed(self, rewriter: Rewriter, cos: Node, sin: Node, tokens: int, half: int) -> tuple[Node, Node]:
        last = max(cos, sin)
        with rewriter.graph.inserting_before(last.next if last.op == "call_function" else rewriter.first_call()):
            rows = []
            for table in (cos, sin):
                first_half = rewriter.call(aten.slice.Tensor, table, -1, 0, half)
                rows.append(reshaped(rewriter, first_half, [tokens, half]))
            both = rewriter.call(rewriter.ops.rope_tables, *rows, value(cos).dtype)
            first_part, second_part = rewriter.parts(both, 2)
        rewriter.hoist(second_part)
        rewriter.hoist(first_part)
        return first_part, second_part
