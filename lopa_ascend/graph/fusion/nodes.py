"""The nodes of an FX graph of aten ops: their arguments, values and memory."""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import SymInt, Tensor
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node

aten = torch.ops.aten
TORCH = str(Path(torch.__file__).parent)

METHODS = frozenset({"linear", "rms_norm", "add_rms_norm", "rope_tables", "rope", "swiglu"})


def value(node: Node) -> Tensor:
    """A node's result when the graph was traced: a tensor without data."""
    found: Tensor = node.meta["val"]
    return found


def static(shape: Sequence[int | SymInt]) -> list[int]:
    """A shape as the argument of a reshape: the one size that may be unknown, the number of tokens, is -1."""
    return [size if isinstance(size, int) else -1 for size in shape]


def attribute(module: GraphModule, node: Node) -> Any:
    return operator.attrgetter(str(node.target))(module)


def source_line(node: Node) -> str | None:
    """The line of the model that a node was traced from, as "model.py:83"; None if unknown. Lines of torch's own
    modules, and of code that torch has made, are left out."""
    frames = re.findall(r'File "(.+)", line (\d+)', node.meta.get("stack_trace") or "")
    own = [(Path(file).name, number) for file, number in frames if not file.startswith((TORCH, "<"))]
    return ":".join(own[-1]) if own else None


def method_of(target: Any, ops: object) -> str | None:
    """The name of the method of ``ops`` that a node calls; None if it calls something else."""
    name = target.__name__ if getattr(target, "__self__", None) is ops else None
    return name if name in METHODS else None


@cache
def arguments_of(target: OpOverload) -> tuple[tuple[str, Any], ...]:
    return tuple((argument.name, argument.default_value) for argument in target._schema.arguments)


def arguments(node: Node) -> list[Any]:
    """All arguments of a call in the order of the op's schema, with defaults."""
    if not isinstance(node.target, OpOverload):
        return [*node.args, *node.kwargs.values()]
    given = list(node.args)
    return given + [node.kwargs.get(name, default) for name, default in arguments_of(node.target)[len(given) :]]


@cache
def aliased_arguments(target: OpOverload) -> tuple[int, ...]:
    """Positions of the arguments whose memory a result may share."""
    if all(result.alias_info is None for result in target._schema.returns):
        return ()
    return tuple(i for i, argument in enumerate(target._schema.arguments) if argument.alias_info)


def nodes_in(argument: Any) -> list[Node]:
    found: list[Node] = []
    torch.fx.map_arg(argument, found.append)
    return found


def memory_roots(graph: Graph, ops: object) -> dict[Node, frozenset[Node]]:
    """For every node of a graph in functional form, the nodes whose memory may hold its result."""
    roots: dict[Node, frozenset[Node]] = {}

    def roots_of(argument: Any) -> frozenset[Node]:
        return frozenset[Node]().union(*(roots[node] for node in nodes_in(argument)))

    for node in graph.nodes:
        shared = frozenset[Node]()
        if node.op == "output" or node.target is operator.getitem:
            shared = roots_of(node.args[0])
        elif isinstance(node.target, OpOverload):
            given = arguments(node)
            shared = roots_of([given[i] for i in aliased_arguments(node.target)])
        elif method_of(node.target, ops) == "rope_tables":
            shared = roots_of(node.args)
        roots[node] = shared or frozenset({node})
    return roots


def is_pure(node: Node, ops: object) -> bool:
    """Whether a node may be removed if nothing uses its result. Ops that return nothing are checks, and stay, except
    for checks of metadata, which do not change after the trace."""
    target = node.target
    if node.op != "call_function":
        return node.op == "get_attr"
    if isinstance(target, OpOverload):
        useful = target._schema.returns or target is aten._assert_tensor_metadata.default
        return bool(useful) and not target._schema.is_mutable and torch.Tag.nondeterministic_seeded not in target.tags
    return target is operator.getitem or method_of(target, ops) is not None
