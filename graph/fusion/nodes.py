"""What the nodes of an FX graph of aten ops read and write: their arguments, values and memory."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import SymInt, Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

aten = torch.ops.aten
TORCH = str(Path(torch.__file__).parent)

WRITES: Mapping[str, tuple[int, ...]] = {
    "stored": (),
    "linear": (),
    "rms_norm": (),
    "add_rms_norm": (1,),
    "rms_norm_quant": (),
    "add_rms_norm_quant": (1,),
    "rope_tables": (),
    "rope": (),
    "swiglu": (),
    "kv_write": (2, 3),
    "attention": (),
}
"""Methods of ``Ops`` that a graph may call, each with the positions of the arguments that it may write into."""

MAY_RETURN_ARGUMENTS = frozenset({"stored", "rope_tables"})
"""Methods of ``Ops`` whose results may lie in the memory of their arguments."""

NO_NODES: frozenset[Node] = frozenset()


def value(node: Node) -> Tensor:
    """The result that a node had when the graph was traced: a tensor without data."""
    found: Tensor = node.meta["val"]
    return found


def static(shape: Sequence[int | SymInt]) -> list[int]:
    """A shape as the argument of a reshape: the one size that may be unknown, the number of tokens, is -1."""
    return [size if isinstance(size, int) else -1 for size in shape]


def attribute(module: GraphModule, node: Node) -> Any:
    """The attribute of the module that a get_attr node reads."""
    return operator.attrgetter(str(node.target))(module)


def source_line(node: Node) -> str | None:
    """The line of the model that a node was traced from, as "model.py:83"; None if the trace does not tell. Lines of
    torch's own modules, and of code that torch has made, are left out."""
    frames = re.findall(r'File "(.+)", line (\d+)', node.meta.get("stack_trace") or "")
    own = [(Path(file).name, number) for file, number in frames if not file.startswith((TORCH, "<"))]
    return ":".join(own[-1]) if own else None


def method_of(target: Any, ops: object) -> str | None:
    """The name of the method of ``ops`` that a node calls; None if it calls something else."""
    name = target.__name__ if getattr(target, "__self__", None) is ops else None
    return name if name in WRITES else None


@cache
def arguments_of(target: OpOverload) -> tuple[tuple[str, Any], ...]:
    """(name, default) of each argument of an op."""
    return tuple((argument.name, argument.default_value) for argument in target._schema.arguments)


def arguments(node: Node) -> list[Any]:
    """All arguments of a call in the order of the op's schema; defaults stand for arguments that were left out."""
    if not isinstance(node.target, OpOverload):
        return [*node.args, *node.kwargs.values()]
    given = list(node.args)
    return given + [node.kwargs.get(name, default) for name, default in arguments_of(node.target)[len(given) :]]


@cache
def aliases_of(target: OpOverload) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(positions of the arguments whose memory a result may share, positions of the arguments that are written)."""
    schema = target._schema
    returned = any(result.alias_info is not None for result in schema.returns)
    infos = [(i, argument.alias_info) for i, argument in enumerate(schema.arguments) if argument.alias_info]
    # The result of as_strided depends on how its argument lies in memory; as a write it prevents every rewrite.
    written = tuple(i for i, info in infos if info.is_write or target is aten.as_strided.default)
    return tuple(i for i, _ in infos) if returned else (), written


def nodes_in(argument: Any) -> list[Node]:
    """The nodes in an argument, which may be a list."""
    found: list[Node] = []
    torch.fx.map_arg(argument, found.append)
    return found


class Memory:
    """Which results of a graph share memory, and which nodes write into it.

    Inputs of the graph count as disjoint. A call that is neither an aten op nor a method of ``ops`` may write into all
    its arguments, and return them.
    """

    order: Mapping[Node, int]
    """Position of every node in the graph."""
    roots: Mapping[Node, frozenset[Node]]
    """For every node, the nodes whose memory its result may lie in."""
    writes: Mapping[Node, frozenset[Node]]
    """For every node that writes, the roots that it writes into."""
    written: frozenset[Node]
    """The roots that any node writes into."""
    returned: frozenset[Node]
    """The roots that the graph returns."""

    def __init__(self, module: GraphModule, ops: object):
        self.order = {node: i for i, node in enumerate(module.graph.nodes)}
        roots: dict[Node, frozenset[Node]] = {}
        writes: dict[Node, frozenset[Node]] = {}
        self.roots, self.writes = roots, writes
        storages: dict[int, Node] = {}
        for node in module.graph.nodes:
            if node.op == "get_attr":
                held = attribute(module, node)
                key = held.untyped_storage()._cdata if isinstance(held, Tensor) else id(held)
                roots[node] = frozenset({storages.setdefault(key, node)})
                continue
            shared, written = self._aliases(node, ops)
            roots[node] = shared or frozenset({node})
            if written:
                writes[node] = written
        self.written = self._union(writes.values())
        self.returned = self._union(roots[node] for node in self.order if node.op == "output")

    def _aliases(self, node: Node, ops: object) -> tuple[frozenset[Node], frozenset[Node]]:
        """(roots whose memory the result may share, or none if it has its own; roots that are written)."""
        target = node.target
        if node.op == "placeholder":
            return NO_NODES, NO_NODES
        if node.op == "output" or target is operator.getitem:
            return self._of(node.args[0]), NO_NODES
        if isinstance(target, OpOverload):
            shared, written = aliases_of(target)
            if not shared and not written:
                return NO_NODES, NO_NODES
            given = arguments(node)
            return self._of([given[i] for i in shared]), self._of([given[i] for i in written])
        method = method_of(target, ops)
        if method is None or node.kwargs:
            everything = self._of([node.args, node.kwargs])
            return everything | {node}, everything
        returned = self._of(node.args) | {node} if method in MAY_RETURN_ARGUMENTS else NO_NODES
        return returned, self._of([node.args[i] for i in WRITES[method]])

    def _of(self, argument: Any) -> frozenset[Node]:
        """The roots of all nodes in an argument."""
        return self._union(self.roots[node] for node in nodes_in(argument))

    @staticmethod
    def _union(sets: Iterable[frozenset[Node]]) -> frozenset[Node]:
        return NO_NODES.union(*sets)

    def is_constant(self, node: Any) -> bool:
        """Whether a node reads an attribute of the module that the graph never writes into."""
        return isinstance(node, Node) and node.op == "get_attr" and not self.roots[node] & self.written

    def is_written_between(self, nodes: Iterable[Node], first: Node, last: Node, but: Iterable[Node]) -> bool:
        """Whether a node after ``first`` and before ``last``, other than those in ``but``, writes into the memory of
        ``nodes``."""
        watched = self._union(self.roots[node] for node in nodes)
        begin, end, own = self.order[first], self.order[last], set(but)
        return any(
            begin < self.order[writer] < end and writer not in own and watched & roots
            for writer, roots in self.writes.items()
        )

    def dies_at(self, node: Node, reader: Node) -> bool:
        """Whether the result of a node lies in memory that the graph allocates and that nothing reads after
        ``reader``."""
        roots = self.roots[node]
        if any(root.op != "call_function" for root in roots):
            return False
        sharing = {other for other, its_roots in self.roots.items() if its_roots & roots and other.op != "output"}
        users = set[Node]().union(*(other.users for other in sharing)) - sharing
        return all(self.order[user] <= self.order[reader] for user in users)


def is_pure(node: Node, ops: object) -> bool:
    """Whether a node may be removed if nothing uses its result. Ops that return nothing are checks, and stay, except
    for checks of metadata, which do not change after the trace."""
    target = node.target
    if node.op != "call_function":
        return node.op == "get_attr"
    if isinstance(target, OpOverload):
        useful = target._schema.returns or target is aten._assert_tensor_metadata.default
        return bool(useful) and not target._schema.is_mutable and torch.Tag.nondeterministic_seeded not in target.tags
    method = method_of(target, ops)
    return target is operator.getitem or (method is not None and not WRITES[method])
