"""The normal form of a graph, in which the passes look for their patterns: one way to write each thing.

Nodes without effect are removed, casts are ``_to_copy(x, dtype=...)``, views ``reshape``, dimensions count from the
end, SiLU is ``silu``, and products with a constant matrix are ``linear(x, weight, bias)`` with x of any rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from lopa_ascend.graph.fusion.nodes import arguments, aten, static, value
from lopa_ascend.graph.fusion.patterns import RESULT, Call, Cast, Either, Match, Some
from lopa_ascend.graph.fusion.rewriter import Fusion, NotFused, Rewriter

X, BIAS, WEIGHT = Some("x"), Some("bias"), Some("weight")

# Ops that may give their argument again, unchanged: see has_no_effect.
VIEWS = frozenset({aten.view.default, aten._unsafe_view.default, aten.reshape.default})
CASTS = frozenset({aten.to.dtype, torch.ops.prims.convert_element_type.default})
COPIES = frozenset({aten.clone.default, aten._to_copy.default, *CASTS})
SAME = frozenset(
    {aten.alias.default, aten.detach.default, aten.contiguous.default, aten.expand.default, aten.slice.Tensor}
)
WITH_DIMS = frozenset({aten.cat.default, aten.mean.dim})
"""Ops whose second argument is a dimension, or a list of dimensions."""


def normalise(rewriter: Rewriter) -> None:
    graph = rewriter.graph
    for node in [node for node in graph.nodes if node.op == "get_attr"]:
        next(iter(graph.nodes)).prepend(node)
    rewriter.sweep()
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        source = node.args[0] if node.args else None
        if isinstance(source, Node) and has_no_effect(node, source):
            node.replace_all_uses_with(source)
            graph.erase_node(node)
        elif node.target in CASTS:
            node.kwargs = {"dtype": arguments(node)[1]}
            node.args, node.target = (source,), aten._to_copy.default
        elif node.target is aten._to_copy.default:
            drop_same_place(node)
        elif node.target in VIEWS:
            # A view demands certain strides of its argument, which a fused op may not give.
            node.args, node.target = (source, static(value(node).shape)), aten.reshape.default
        elif node.target in WITH_DIMS:
            count_from_the_end(node)
    for rule in RULES:
        rule(rewriter)
    rewriter.sweep()


def join_reshapes(rewriter: Rewriter) -> None:
    """Makes successive reshapes one, and none if they lead back to the first shape."""
    for node in rewriter.graph.find_nodes(op="call_function", target=aten.reshape.default):
        source = node.args[0]
        while isinstance(source, Node) and source.target is aten.reshape.default:
            source = source.args[0]
        assert isinstance(source, Node)
        if static(value(source).shape) == static(value(node).shape):
            node.replace_all_uses_with(source)
        else:
            node.args = (source, *node.args[1:])
    rewriter.sweep()


def has_no_effect(node: Node, source: Node) -> bool:
    """Whether a node only gives its argument again. A copy does: nothing is written into."""
    if node.target not in VIEWS | SAME | COPIES:
        return False
    x, result = value(source), value(node)
    return (x.shape, x.stride(), x.dtype, x.device) == (result.shape, result.stride(), result.dtype, result.device)


def drop_same_place(node: Node) -> None:
    source = node.args[0]
    assert isinstance(source, Node)
    x, result = value(source), value(node)
    kept = dict(node.kwargs)
    for name in ("device", "layout"):
        if getattr(x, name) == getattr(result, name):
            kept.pop(name, None)
    node.kwargs = kept


def count_from_the_end(node: Node) -> None:
    given: list[Any] = list(node.args)
    if len(given) < 2:
        return
    first = given[0][0] if isinstance(given[0], (list, tuple)) else given[0]
    rank, dims = value(first).dim(), given[1]
    given[1] = [dim % rank - rank for dim in dims] if isinstance(dims, (list, tuple)) else dims % rank - rank
    node.args = tuple(given)


# The rules: each rewrites one way to write a thing to the normal way.


def rewrite_product(rewriter: Rewriter, match: Match) -> Sequence[Node]:
    """x [..., in] times a constant matrix [in, out]: a linear layer."""
    weight, bias = match["weight"], match.bound.get("bias")
    if weight.op != "get_attr":
        raise NotFused(f"{weight.name} is no constant of the graph")
    matrix = rewriter.tensor(weight)
    if matrix.dim() != 2 or value(match["x"]).dim() < 2:
        raise NotFused("no product with a matrix")
    if bias is not None and value(bias).shape != (matrix.shape[-1],):
        raise NotFused(f"{bias.name} is no bias")
    transposed = rewriter.constant(matrix.t())
    return [rewriter.call(aten.linear.default, match["x"], transposed, bias)]


def rewrite_transposed_constant(rewriter: Rewriter, match: Match) -> Sequence[Node]:
    """A constant with its dimensions in another order: a constant of that order."""
    node: Any = match[RESULT]
    if match["weight"].op != "get_attr":
        raise NotFused("no constant")
    return [rewriter.constant(node.target(rewriter.tensor(match["weight"]), *node.args[1:]))]


def drop_reshapes_around_linear(rewriter: Rewriter, match: Match) -> Sequence[Node]:
    """Drops a reshape to two dimensions before a linear layer, and the one back after it."""
    x, result = value(match["x"]), value(match[RESULT])
    if x.shape[:-1] != result.shape[:-1] or x.shape[-1] != value(match["weight"]).shape[-1]:
        raise NotFused("the reshapes do more than to flatten")
    return [rewriter.call(aten.linear.default, match["x"], match["weight"], match["bias"])]


def rewrite_silu(rewriter: Rewriter, match: Match) -> Sequence[Node]:
    """x * sigmoid(x), or SiLU between casts to and from float32: SiLU alone, which computes in float32 whatever the
    dtype of x."""
    x, result, inner = value(match["x"]), value(match[RESULT]), match["inner"]
    if result.dtype != x.dtype or value(inner).dtype != torch.float32 or match.dtypes - {x.dtype, torch.float32}:
        raise NotFused("not a SiLU in float32, rounded once")
    if inner is match[RESULT]:
        raise NotFused("a SiLU already")
    return [rewriter.call(aten.silu.default, match["x"])]


RULES = (
    Fusion(
        Either(
            Call(aten.t.default, WEIGHT),
            Call(aten.permute.default, WEIGHT, Some("dims")),
            Call(aten.transpose.int, WEIGHT, Some("first"), Some("second")),
        ),
        rewrite_transposed_constant,
    ),
    Fusion(Call(aten.addmm.default, BIAS, X, WEIGHT), rewrite_product),
    Fusion(Either(Call(aten.mm.default, X, WEIGHT), Call(aten.matmul.default, X, WEIGHT)), rewrite_product),
    Fusion(
        Call(
            aten.reshape.default,
            Call(aten.linear.default, Call(aten.reshape.default, X, Some("flat"), shared=True), WEIGHT, BIAS),
            Some("shape"),
        ),
        drop_reshapes_around_linear,
    ),
    Fusion(
        Cast(
            Either(
                Call(aten.mul.Tensor, Cast(X), Call(aten.sigmoid.default, Cast(X), name="inner"), commutes=True),
                Call(aten.silu.default, Cast(X), name="inner"),
            )
        ),
        rewrite_silu,
    ),
)
