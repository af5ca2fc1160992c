"""Replaces nodes of a graph by others if that changes nothing else."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import SymInt, Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node

from lopa_ascend.backend.interface import Ops
from lopa_ascend.graph.fusion.nodes import attribute, is_pure, nodes_in, source_line, value
from lopa_ascend.graph.fusion.patterns import RESULT, Match, matches


class NotFused(Exception):
    """A match that does not mean what the fused op computes; the message says why."""


@dataclass(frozen=True)
class Change:
    nodes: tuple[str, ...]
    """Replaced or, after a refusal, left."""
    refused: str | None = None
    line: str | None = None
    """Of the model, as "model.py:83", if the trace tells."""


class Rewriter:
    """A graph module under change. Unused attributes of the module are removed at once, so that weights take their
    memory once while they are packed. Calls go to methods of ``ops``."""

    def __init__(self, module: GraphModule, ops: Ops):
        self.module, self.graph, self.ops = module, module.graph, ops
        self._mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=_shape_env(module.graph))
        self._fakes: dict[Node, Any] = {}
        self._constants: dict[Any, str] = {}
        self._numbers = count()

    def call(self, target: Callable[..., Any], *args: Any) -> Node:
        """Inserts a call, together with its result for tensors without data."""
        node = self.graph.call_function(target, args)
        with self._mode:
            node.meta["val"] = self._fakes[node] = target(*torch.fx.map_arg(args, self._fake))
        return node

    def parts(self, node: Node, number: int) -> list[Node]:
        """Adds nodes for the first ``number`` elements of a node that gives several tensors."""
        return [self.call(operator.getitem, node, i) for i in range(number)]

    def _fake(self, node: Node) -> Any:
        if node not in self._fakes:
            x = value(node)
            with self._mode:
                self._fakes[node] = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
        return self._fakes[node]

    def constant(self, tensor: Tensor) -> Node:
        """Adds a node that reads this tensor, before all calls."""
        key = (tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        if key not in self._constants:
            name = f"fused_{next(self._numbers)}"
            self.module.register_buffer(name, tensor, persistent=False)
            self._constants[key] = name
        with self.graph.inserting_before(self.first_call()):
            node = self.graph.get_attr(self._constants[key])
        with self._mode:
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        node.meta["val"] = self._fakes[node] = fake
        return node

    def first_call(self) -> Node:
        found: Node = next(node for node in self.graph.nodes if node.op not in ("placeholder", "get_attr"))
        return found

    def tensor(self, node: Node) -> Tensor:
        held: Tensor = attribute(self.module, node)
        return held.detach()

    def rewrite(
        self, match: Match, outputs: Sequence[Node], build: Callable[[Match], Sequence[Node]]
    ) -> tuple[str, ...]:
        """Replaces ``outputs`` by the nodes that ``build`` makes before the first of them, one for each. Returns the
        outputs' names. NotFused by ``build``, or if an intermediate result is used elsewhere, or an input is computed
        later."""
        inside = set(match.inside)
        for node in match.inside:
            elsewhere = [user for user in node.users if user not in inside]
            if elsewhere and node not in outputs and node not in match.shared:
                raise NotFused(f"{node.name} is used by {elsewhere[0].name} too")
        target = min(outputs)  # nodes are ordered as in the graph
        inputs = [node for node in nodes_in(list(match.bound.values())) if node not in inside]
        late = [node.name for node in inputs if node > target]
        if late:
            raise NotFused(f"{late[0]} comes after {target.name}")
        with self.graph.inserting_before(target):
            made = build(match)
        names = tuple(node.name for node in outputs)
        for old, new in zip(outputs, made, strict=True):
            old.replace_all_uses_with(new)
            if "stack_trace" in old.meta:
                new.meta.setdefault("stack_trace", old.meta["stack_trace"])
        self.erase_unused(sorted(inside, reverse=True))
        return names

    def hoist(self, node: Node) -> None:
        """Moves a node, and what it is computed from, right after their inputs, unless a node has an effect."""
        moved = set[Node]()

        def move(node: Node) -> None:
            if node in moved or node.op != "call_function":
                return
            moved.add(node)
            for source in node.all_input_nodes:
                move(source)
            if not is_pure(node, self.ops):
                return
            calls = [source for source in node.all_input_nodes if source.op == "call_function"]
            if calls:
                max(calls).append(node)
            else:
                self.first_call().prepend(node)

        move(node)

    def sweep(self) -> None:
        """Removes nodes without effect."""
        self.erase_unused([node for node in reversed(self.graph.nodes) if is_pure(node, self.ops)])

    def erase_unused(self, nodes: Iterable[Node]) -> None:
        """Removes those of the nodes that have no users, and attributes of the module that only they read. Each node
        stands before the nodes that it uses, because removing it may leave those without users."""
        attributes: dict[Node, None] = {}
        for node in nodes:
            if node.users:
                continue
            attributes |= dict.fromkeys(x for x in [node, *node.all_input_nodes] if x.op == "get_attr")
            if node.op != "get_attr":
                self.graph.erase_node(node)
        for node in attributes:
            if not node.users:
                name = str(node.target)
                self.graph.erase_node(node)
                self._fakes.pop(node, None)
                if all(other.target != name for other in self.graph.find_nodes(op="get_attr")):
                    self._remove_attribute(name)

    def _remove_attribute(self, name: str) -> None:
        owner, _, own_name = name.rpartition(".")
        delattr(self.module.get_submodule(owner), own_name)
        # The address of freed memory may come back as that of another tensor.
        self._constants = {key: kept for key, kept in self._constants.items() if kept != name}


def _shape_env(graph: Graph) -> Any:
    """The ``ShapeEnv`` of the trace's symbolic sizes; None if all shapes are static."""
    for node in graph.nodes:
        found = node.meta.get("val")
        if isinstance(found, Tensor):
            for size in found.shape:
                if isinstance(size, SymInt):
                    return size.node.shape_env
    return None


@dataclass(frozen=True)
class Fusion:
    """A pass that rewrites everything that a pattern matches."""

    pattern: Any
    build: Callable[[Rewriter, Match], Sequence[Node]]
    """Makes a new node for each of ``outputs``; raises NotFused before it makes any."""
    outputs: tuple[str, ...] = (RESULT,)
    """Names in the pattern of the nodes to replace; RESULT is the whole match."""

    def __call__(self, rewriter: Rewriter) -> list[Change]:
        changes = []
        for node in reversed(list(rewriter.graph.nodes)):
            change = self._rewrite(rewriter, node)
            if change is not None:
                changes.append(change)
        return changes[::-1]

    def _rewrite(self, rewriter: Rewriter, node: Node) -> Change | None:
        if node._erased:  # by an earlier rewrite
            return None
        reason, line = None, source_line(node)
        for match in matches(self.pattern, node, Match({RESULT: node})):
            outputs = [match[name] for name in self.outputs]
            try:
                names = rewriter.rewrite(match, outputs, lambda found: self.build(rewriter, found))
            except NotFused as refusal:
                reason = reason or str(refusal)
            else:
                return Change(names, line=line)
        return None if reason is None else Change((node.name,), reason, line)
