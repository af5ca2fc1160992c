"""Fusion: a graph of aten ops, from a model in plain torch, is rewritten to the fused ops of a backend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor
from torch.fx import GraphModule

from lopa_ascend.backend import Ops
from lopa_ascend.graph.fusion.normal import normalise
from lopa_ascend.graph.fusion.passes import passes
from lopa_ascend.graph.fusion.rewriter import Change, Rewriter


@dataclass(frozen=True)
class Report:
    """By pass, in the order in which they ran: what was rewritten, and what looked like it and was not. Nodes have the
    names that they had when the pass ran."""

    changes: Mapping[str, tuple[Change, ...]]

    @property
    def fused(self) -> dict[str, int]:
        """How often each pass rewrote something, where it did."""
        counts = {name: sum(not change.refused for change in changes) for name, changes in self.changes.items()}
        return {name: count for name, count in counts.items() if count}

    @property
    def refused(self) -> dict[str, list[str]]:
        """Why each pass left what looked like it, where there was something."""
        return {
            name: [change.refused for change in changes if change.refused]
            for name, changes in self.changes.items()
            if any(change.refused for change in changes)
        }

    def __str__(self) -> str:
        lines = []
        for name, changes in self.changes.items():
            lines.append(f"{name}: {sum(not change.refused for change in changes)}")
            for change in changes:
                why = f": left, {change.refused}" if change.refused else ""
                lines.append(f"  {', '.join(change.nodes)}{why}")
        return "\n".join(lines)


def fuse(module: GraphModule, ops: Ops) -> Report:
    """Rewrites ``module`` in place to call methods of ``ops``; what it computes stays the same but for rounding.

    ``module``: aten ops in functional form, of static shapes, for inference, as ``make_fx``, ``torch.export`` (its
    ``run_decompositions({}).module()``) or AOT autograd give them, on the device of ``ops``. Its inputs must not share
    memory. A linear layer takes part if its weight is an attribute of the module; weights that nothing uses any more,
    once stacked or stored otherwise, are taken off the module.

    Raises:
        ValueError: a node does not say what it computed when it was traced, or a shape is not static.
    """
    check(module)
    rewriter = Rewriter(module, ops)
    normalise(rewriter)
    report = Report({name: tuple(run(rewriter)) for name, run in passes(ops).items()})
    rewriter.sweep()
    rewriter.take_off_unused()
    module.graph.lint()
    module.recompile()
    return report


def check(module: GraphModule) -> None:
    for node in module.graph.nodes:
        found = node.meta.get("val")
        if node.users and "val" not in node.meta:
            raise ValueError(f"{node.name}: the graph does not say what it gives; trace with make_fx or torch.export")
        if isinstance(found, Tensor) and not all(isinstance(size, int) for size in found.shape):
            raise ValueError(f"{node.name}: shape {tuple(found.shape)} is not static")
