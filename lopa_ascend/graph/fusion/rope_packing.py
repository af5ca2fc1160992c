"""The fusion pass that makes one rope of several, over the parts of a packed linear layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from lopa_ascend.graph.fusion.nodes import aten, source_line, static, value
from lopa_ascend.graph.fusion.patterns import Match
from lopa_ascend.graph.fusion.rewriter import Change, NotFused, Rewriter


@dataclass(frozen=True)
class SplitPart:
    node: Node
    size: int
    rope: Node | None
    """The call that rotates it; None if it is not rotated."""

    @property
    def path(self) -> list[Node]:
        """The nodes from the part to its rope, each the first argument of the next."""
        found = [self.rope or self.node]
        while found[0] is not self.node:
            source = found[0].args[0]
            assert isinstance(source, Node)
            found.insert(0, source)
        return found


class RopePacking:
    """Rotates the whole before a split if several parts are rotated by the same tables.

    Parts that are not rotated, such as the values beside queries and keys, are rotated by an angle of 0: one kernel
    over all heads costs less than one for each part, and the tables with these angles are made once for all layers.
    """

    def __init__(self) -> None:
        self._tables: dict[tuple[object, ...], tuple[Node, Node]] = {}

    def __call__(self, rewriter: Rewriter) -> list[Change]:
        changes = []
        for split in rewriter.graph.find_nodes(op="call_function", target=aten.split_with_sizes.default):
            if split.args[2:] not in ((-1,), (value(split.args[0]).dim() - 1,)):  # not of the last dimension
                continue
            nodes = sorted(split.users, key=lambda node: node.args[1])
            parts = [SplitPart(node, value(node).shape[-1], rope_of(rewriter, node)) for node in nodes]
            names, line = tuple(part.rope.name for part in parts if part.rope), source_line(split)
            if len(names) > 1:
                try:
                    self._pack(rewriter, split, parts)
                    changes.append(Change(names, line=line))
                except NotFused as refusal:
                    changes.append(Change(names, str(refusal), line))
        return changes

    def _pack(self, rewriter: Rewriter, split: Node, parts: Sequence[SplitPart]) -> None:
        """Rotates what ``split`` divides, in place of its parts. NotFused if the parts are not heads of one size, or
        are not rotated by the same tables."""
        whole, ropes = split.args[0], [part.rope for part in parts if part.rope]
        assert isinstance(whole, Node)
        cos, sin = tables_of(ropes)
        tokens, _, size = static(value(ropes[0]).shape)
        heads = heads_of(parts, tokens, size)
        if sum(part.size for part in parts) != value(whole).shape[-1]:
            raise NotFused("a part is not used")

        def build(_: Match) -> Sequence[Node]:
            is_rotated: list[bool] = []  # by head
            for part, number in zip(parts, heads, strict=True):
                is_rotated += [part.rope is not None] * number
            tables = self._tables_for(rewriter, cos, sin, is_rotated)
            by_head = rewriter.call(aten.reshape.default, whole, [tokens, sum(heads), size])
            rotated = rewriter.call(rewriter.ops.rope, by_head, *tables)
            pieces = rewriter.parts(rewriter.call(aten.split_with_sizes.default, rotated, heads, 1), len(heads))
            return [
                piece if part.rope else rewriter.call(aten.reshape.default, piece, static(value(part.node).shape))
                for piece, part in zip(pieces, parts, strict=True)
            ]

        inside = (split, *(node for part in parts for node in part.path))
        outputs = [part.rope or part.node for part in parts]
        rewriter.rewrite(Match({"whole": whole, "cos": cos, "sin": sin}, inside), outputs, build)

    def _tables_for(self, rewriter: Rewriter, cos: Node, sin: Node, is_rotated: Sequence[bool]) -> tuple[Node, Node]:
        if all(is_rotated):
            return cos, sin
        key = (cos, sin, *is_rotated)
        if key not in self._tables:
            dtype, device = value(cos).dtype, value(cos).device
            keeps = rewriter.constant(~torch.tensor(is_rotated, device=device)[:, None])
            # Numbers in the code would be filled in by a kernel in each step.
            one, zero = (rewriter.constant(torch.full((1,), x, dtype=dtype, device=device)) for x in (1.0, 0.0))
            last = max(cos, sin)
            with rewriter.graph.inserting_after(last):
                wide_sin = rewriter.call(aten.where.self, keeps, zero, sin)
            with rewriter.graph.inserting_after(last):
                wide_cos = rewriter.call(aten.where.self, keeps, one, cos)
            self._tables[key] = wide_cos, wide_sin
        return self._tables[key]


def tables_of(ropes: Sequence[Node]) -> tuple[Node, Node]:
    """The cosines and sines by which all of these calls rotate. NotFused if they differ."""
    cos, sin = ropes[0].args[1:]
    assert isinstance(cos, Node)
    assert isinstance(sin, Node)
    if any(rope.args[1:] != (cos, sin) for rope in ropes):
        raise NotFused("parts are rotated by different tables")
    return cos, sin


def heads_of(parts: Sequence[SplitPart], tokens: int, size: int) -> list[int]:
    """Each part's number of heads of ``size``; -1 tokens if their number is unknown. NotFused if a part is not made of
    such heads, or is rotated as something else."""
    if any(part.size % size for part in parts):
        raise NotFused(f"not all parts, of sizes {[part.size for part in parts]}, are made of heads of {size}")
    heads = [part.size // size for part in parts]
    for part, number in zip(parts, heads, strict=True):
        if part.rope and static(value(part.rope).shape) != [tokens, number, size]:
            raise NotFused("the parts are not rotated as heads of one size")
    return heads


def rope_of(rewriter: Rewriter, part: Node) -> Node | None:
    """The rope that rotates a part of a split, if only reshapes lie between them."""
    while len(part.users) == 1:
        (user,) = part.users
        if user.target == rewriter.ops.rope and user.args[0] is part:
            return user
        if user.target is not aten.reshape.default:
            return None
        part = user
    return None
