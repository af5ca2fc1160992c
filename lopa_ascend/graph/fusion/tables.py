"""What is known of the cosines and sines of a graph: where they come from, and which are equal."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from lopa_ascend.graph.fusion.nodes import aten, is_pure, static, value
from lopa_ascend.graph.fusion.rewriter import Rewriter

# If the halves of the first argument are equal, so are those of the result, as long as the last dimension stays whole.
ELEMENTWISE = frozenset({aten.cos.default, aten.sin.default, aten._to_copy.default})
SCALED = frozenset({aten.mul.Tensor, aten.mul.Scalar})
MOVED = frozenset({aten.reshape.default, aten.view.default, aten.unsqueeze.default, aten.expand.default})
TAKEN = frozenset({aten.index.Tensor, aten.index_select.default, aten.embedding.default, aten.slice.Tensor})


def has_equal_halves(rewriter: Rewriter, node: Node) -> bool:
    """Whether the halves of the last dimension are known to be equal."""
    if node.op == "get_attr":
        first, second = rewriter.tensor(node).tensor_split(2, -1)
        return torch.equal(first, second)
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
    if target is aten.index.Tensor:
        indices = node.args[1]
        assert isinstance(indices, (list, tuple))
        if len(indices) == rank:  # the last dimension is indexed too
            return False
    if target is aten.index_select.default and node.args[1] in (-1, rank - 1):
        return False
    known = target in ELEMENTWISE | SCALED | MOVED | TAKEN
    return known and value(node).shape[-1] == size and has_equal_halves(rewriter, source)


def rows_of_constant(rewriter: Rewriter, node: Node) -> tuple[Tensor, Node] | None:
    """(table [positions, D], indices [T]) if a node gives rows of a constant table, perhaps cast and with dimensions of
    size 1 besides; the table is cast here. None if the node gives something else."""
    casts: list[torch.dtype] = []
    while node.target in MOVED or node.target is aten._to_copy.default:
        source = node.args[0]
        if not isinstance(source, Node) or _without_ones(source) != _without_ones(node):
            return None
        if node.target is aten._to_copy.default:
            if set(node.kwargs) != {"dtype"}:
                return None
            casts.insert(0, value(node).dtype)
        node = source
    constant, indices = _table_and_indices(node)
    if not isinstance(indices, Node) or value(indices).dim() != 1 or constant.op != "get_attr":
        return None
    table = rewriter.tensor(constant)
    if math.prod(table.shape[1:-1]) != 1:
        return None
    table = table.reshape(table.shape[0], table.shape[-1])
    for dtype in casts:
        table = table.to(dtype)
    return table, indices


def _table_and_indices(node: Node) -> tuple[Any, Any]:
    """(table, indices) of a node that takes rows of a table; otherwise (None, None)."""
    args: tuple[Any, ...] = node.args
    if node.target is aten.index.Tensor and len(args[1]) == 1:
        return args[0], args[1][0]
    if node.target is aten.index_select.default and args[1] == 0:
        return args[0], args[2]
    if node.target is aten.embedding.default:
        return args[0], args[1]
    return None, None


def _without_ones(node: Node) -> list[int]:
    return [size for size in static(value(node).shape) if size != 1]


def first_equals(rewriter: Rewriter) -> dict[Node, Node]:
    """For every node, the first node that surely has the same result: the same op of the same arguments."""
    firsts: dict[Node, Node] = {}
    known: dict[Hashable, Node] = {}
    for node in rewriter.graph.nodes:
        firsts[node] = node
        if is_pure(node, rewriter.ops):
            firsts[node] = known.setdefault((node.target, _key(node.args, firsts), _key(node.kwargs, firsts)), node)
    return firsts


def _key(argument: Any, firsts: dict[Node, Node]) -> Hashable:
    """Equal for two arguments that surely have the same value."""
    if isinstance(argument, (list, tuple)):
        return tuple(_key(part, firsts) for part in argument)
    if isinstance(argument, dict):
        return tuple((name, _key(part, firsts)) for name, part in argument.items())
    if isinstance(argument, Node):
        return firsts[argument]
    return type(argument), str(argument)
