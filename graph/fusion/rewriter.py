"""How what a pattern matches is put in another form, where that changes nothing else."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node

from lopa_ascend.backend import Ops
from lopa_ascend.graph.fusion.nodes import Memory, attribute, is_pure, nodes_in, value
from lopa_ascend.graph.fusion.patterns import RESULT, Match, matches


class Refused(Exception):
    """What matched does not mean what the op does; the message says why."""


@dataclass(frozen=True)
class Change:
    """The names of nodes that were replaced, or that stay for the reason in ``refused``."""

    nodes: tuple[str, ...]
    refused: str | None = None


class Rewriter:
    """Puts nodes in the place of others in a graph module, whose attributes include its constants."""

    def __init__(self, module: GraphModule, ops: Ops):
        self.module, self.graph, self.ops = module, module.graph, ops
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._fakes: dict[Node, Any] = {}
        self._constants: dict[Any, str] = {}
        self._held = self._attributes()
        self._memory: Memory | None = None

    @property
    def memory(self) -> Memory:
        if self._memory is None:
            self._memory = Memory(self.module, self.ops)
        return self._memory

    def changed(self) -> None:
        self._memory = None

    def call(self, target: Callable[..., Any], *args: Any) -> Node:
        """A call where nodes are being inserted, with what it gives for tensors without data."""
        node = self.graph.call_function(target, args)
        with self._mode:
            node.meta["val"] = self._fakes[node] = target(*torch.fx.map_arg(args, self._fake))
        self.changed()
        return node

    def parts(self, node: Node, count: int) -> list[Node]:
        return [self.call(operator.getitem, node, i) for i in range(count)]

    def _fake(self, node: Node) -> Any:
        if node not in self._fakes:
            x = value(node)
            with self._mode:
                self._fakes[node] = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
        return self._fakes[node]

    def constant(self, tensor: Tensor) -> Node:
        """A node of this tensor, before all calls."""
        key = (tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        if key not in self._constants:
            name = f"fused_{len(self._constants)}"
            self.module.register_buffer(name, tensor, persistent=False)
            self._constants[key] = name
        first = next(node for node in self.graph.nodes if node.op not in ("placeholder", "get_attr"))
        with self.graph.inserting_before(first):
            node = self.graph.get_attr(self._constants[key])
        with self._mode:
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        node.meta["val"] = self._fakes[node] = fake
        self.changed()
        return node

    def tensor(self, node: Node) -> Tensor:
        """That of a constant."""
        held: Tensor = attribute(self.module, node)
        return held.detach()

    def rewrite(
        self, match: Match, outputs: Sequence[Node], build: Callable[[Match], Sequence[Node]]
    ) -> tuple[str, ...]:
        """Puts what ``build`` makes in the place of ``outputs``, before the first of them, and gives their names.

        Raises:
            Refused: by ``build``, or because an intermediate result is used elsewhere, or because memory that is read
                is written into meanwhile.
        """
        inside, order = set(match.inside), self.memory.order
        for node in match.inside:
            elsewhere = [user for user in node.users if user not in inside]
            if elsewhere and node not in outputs and node not in match.shared:
                raise Refused(f"{node.name} is used by {elsewhere[0].name} too")
        touched = sorted({*inside, *outputs}, key=order.__getitem__)
        target = min(outputs, key=order.__getitem__)
        inputs = [node for node in nodes_in(list(match.bound.values())) if node not in inside]
        late = [node.name for node in inputs if order[node] > order[target]]
        if late:
            raise Refused(f"{late[0]} comes after {target.name}")
        if self.memory.is_written_between([*inside, *inputs], touched[0], touched[-1], but=inside):
            raise Refused(f"memory is written into between {touched[0].name} and {touched[-1].name}")
        with self.graph.inserting_before(target):
            made = build(match)
        names = tuple(node.name for node in outputs)
        for old, new in zip(outputs, made, strict=True):
            old.replace_all_uses_with(new)
        for node in sorted(inside, key=order.__getitem__, reverse=True):
            if not node.users:
                self.graph.erase_node(node)
        self.changed()
        return names

    def sweep(self) -> None:
        """Takes out what has no effect."""
        for node in reversed(self.graph.nodes):
            if not node.users and is_pure(node, self.ops):
                self.graph.erase_node(node)
        self.changed()

    def _attributes(self) -> set[str]:
        return {str(node.target) for node in self.graph.nodes if node.op == "get_attr"}

    def take_off_unused(self) -> None:
        """Takes attributes off the module that the graph used and no longer uses."""
        for name in (self._held | set(self._constants.values())) - self._attributes():
            owner, _, own_name = name.rpartition(".")
            delattr(self.module.get_submodule(owner), own_name)


@dataclass(frozen=True)
class Fusion:
    """Rewrites everything that a pattern matches.

    ``build`` gives new nodes for those that the pattern names in ``outputs``, RESULT being what it matches as a whole;
    it raises Refused before it makes any.
    """

    pattern: Any
    build: Callable[[Rewriter, Match], Sequence[Node]]
    outputs: tuple[str, ...] = (RESULT,)

    def __call__(self, rewriter: Rewriter) -> list[Change]:
        changes = []
        for node in reversed(list(rewriter.graph.nodes)):
            change = self._rewrite(rewriter, node)
            if change is not None:
                changes.append(change)
        return changes[::-1]

    def _rewrite(self, rewriter: Rewriter, node: Node) -> Change | None:
        if node not in rewriter.memory.order:  # gone by now
            return None
        reason = None
        for match in matches(self.pattern, node, Match({RESULT: node})):
            outputs = [match[name] for name in self.outputs]
            try:
                return Change(rewriter.rewrite(match, outputs, lambda found: self.build(rewriter, found)))
            except Refused as refusal:
                reason = reason or str(refusal)
        return None if reason is None else Change((node.name,), reason)
