"""Fusion: rewrites a graph of aten ops, traced from a model in plain torch, to the fused ops of a backend."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule

from lopa_ascend.backend.interface import Ops
from lopa_ascend.graph.fusion.nodes import aten, value
from lopa_ascend.graph.fusion.normal import join_reshapes, normalise
from lopa_ascend.graph.fusion.passes import passes
from lopa_ascend.graph.fusion.rewriter import Change, Rewriter


@dataclass(frozen=True)
class Report:
    changes: Mapping[str, tuple[Change, ...]]
    """By pass, in order: what was rewritten, and what resembled the pattern and was left. Nodes have the names that
    they had when the pass ran."""

    @property
    def fused(self) -> dict[str, int]:
        counts = {name: _num_fused(changes) for name, changes in self.changes.items()}
        return {name: count for name, count in counts.items() if count}

    @property
    def refused(self) -> dict[str, list[str]]:
        """By pass, why something that resembled its pattern was left."""
        reasons = {
            name: [change.refused for change in changes if change.refused] for name, changes in self.changes.items()
        }
        return {name: found for name, found in reasons.items() if found}

    def summary(self) -> str:
        """One line. Refusals at the same line of the model are counted, with the first one's reason."""
        fused = ", ".join(f"{name} {count}" for name, count in self.fused.items())
        left: Counter[tuple[str, str | None]] = Counter()
        reasons: dict[tuple[str, str | None], str] = {}
        for name, changes in self.changes.items():
            for change in changes:
                if change.refused:
                    left[name, change.line] += 1
                    reasons.setdefault((name, change.line), change.refused)
        places = []
        for (name, line), count in left.items():
            where = f"{line}: " if line else ""
            places.append(f"{name} {count} ({where}{reasons[name, line]})")
        return f"fused {fused or 'nothing'}; left {'; '.join(places) or 'nothing'}"

    def __str__(self) -> str:
        lines = []
        for name, changes in self.changes.items():
            lines.append(f"{name}: {_num_fused(changes)}")
            for change in changes:
                place = f" ({change.line})" if change.line else ""
                why = f": left, {change.refused}" if change.refused else ""
                lines.append(f"  {', '.join(change.nodes)}{place}{why}")
        return "\n".join(lines)


def _num_fused(changes: Sequence[Change]) -> int:
    return sum(not change.refused for change in changes)


def fuse(module: GraphModule, ops: Ops) -> Report:
    """Rewrites ``module`` in place to call methods of ``ops``; its results stay the same but for rounding.

    Args:
        module: aten ops in functional form, for inference, as ``make_fx``, ``torch.export`` (its
            ``run_decompositions({}).module()``) or AOT autograd give them, on the device of ``ops``. Shapes are static
            except for one size, the number of tokens, which may be unknown. A linear layer is rewritten if its weight
            is an attribute of the module; weights that are stacked or stored in another form are removed from the
            module as soon as nothing uses them.

    Raises:
        ValueError: a node does not say what it computed when it was traced, more than one of its sizes is unknown, or
            it writes into memory or depends on how a tensor lies there.
    """
    check(module)
    rewriter = Rewriter(module, ops)
    normalise(rewriter)
    changes = {}
    for name, run in passes(ops).items():
        changes[name] = tuple(run(rewriter))
        rewriter.sweep()  # a node without effect would count as a user of its arguments
    join_reshapes(rewriter)
    module.graph.lint()
    module.recompile()
    return Report(changes)


def check(module: GraphModule) -> None:
    """Raises ValueError for a graph that ``fuse`` cannot work on."""
    for node in module.graph.nodes:
        if node.users and "val" not in node.meta:
            raise ValueError(f"{node.name}: the graph does not say what it gives; trace with make_fx or torch.export")
        if isinstance(node.target, OpOverload) and node.target._schema.is_mutable:
            raise ValueError(f"{node.name}: {node.target} writes into its argument; trace to a functional graph")
        if node.target is aten.as_strided.default:
            raise ValueError(f"{node.name}: as_strided depends on how a tensor lies in memory")
        found = node.meta.get("val")
        if isinstance(found, Tensor) and sum(not isinstance(size, int) for size in value(node).shape) > 1:
            raise ValueError(f"{node.name}: shape {tuple(found.shape)} is not static: only one size may be unknown")
