"""Patterns over FX nodes.

A pattern is matched against a node, from its result down to its inputs. There may be several matches: the arguments of
a commuting op are tried in both orders, and optional parts both with and without.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from lopa_ascend.graph.fusion.nodes import arguments, arguments_of, aten, value

RESULT = "result"


@dataclass(frozen=True)
class Match:
    """What a pattern was found to stand for."""

    bound: dict[str, Any] = field(default_factory=dict)
    inside: tuple[Node, ...] = ()
    """The nodes that the pattern spells out."""
    shared: frozenset[Node] = frozenset()
    """Nodes of ``inside`` that may be used elsewhere too; they stay in the graph for those users."""

    def __getitem__(self, name: str) -> Any:
        return self.bound[name]

    def bind(self, name: str, found: Any) -> Iterator[Match]:
        """The match with one more name; none if the name already stands for something else."""
        if name not in self.bound:
            yield Match({**self.bound, name: found}, self.inside, self.shared)
        elif self.bound[name] is found:
            yield self

    @property
    def dtypes(self) -> set[torch.dtype]:
        values = [value(node) for node in self.inside]
        return {x.dtype for x in values if isinstance(x, Tensor)}

    def enter(self, node: Node, shared: bool) -> Match:
        return Match(self.bound, (*self.inside, node), self.shared | {node} if shared else self.shared)


class Pattern(ABC):
    """What an argument of a node may look like."""

    @abstractmethod
    def match(self, found: Any, so_far: Match) -> Iterator[Match]:
        """All ways to match an argument that extend the match ``so_far``."""


def matches(pattern: Any, found: Any, so_far: Match) -> Iterator[Match]:
    """As ``Pattern.match``, for a pattern that may also be a literal or a list of patterns."""
    if isinstance(pattern, (list, tuple)):
        if isinstance(found, (list, tuple)) and len(found) == len(pattern):
            yield from _match_all(pattern, found, so_far)
    elif isinstance(pattern, Pattern):
        yield from pattern.match(found, so_far)
    elif not isinstance(found, Node) and type(found) in (type(pattern), int, float) and found == pattern:
        yield so_far


def _match_all(patterns: Sequence[Any], found: Sequence[Any], so_far: Match) -> Iterator[Match]:
    if not patterns:
        yield so_far
        return
    for first in matches(patterns[0], found[0], so_far):
        yield from _match_all(patterns[1:], found[1:], first)


@dataclass(frozen=True)
class Some(Pattern):
    """Anything that passes a test; a name stands for the same thing everywhere in a pattern."""

    name: str
    test: Callable[[Any], bool] | None = None

    def match(self, found: Any, so_far: Match) -> Iterator[Match]:
        if self.test is None or self.test(found):
            yield from so_far.bind(self.name, found)


class Call(Pattern):
    """A call of the op ``target``, or of any in a tuple. Arguments after ``args`` must have the op's defaults. ``name``
    binds the node; ``commutes``: the first two arguments may be exchanged; ``shared``: the node may be used elsewhere
    too."""

    def __init__(self, target: Any, *args: Any, name: str | None = None, commutes: bool = False, shared: bool = False):
        self.targets = target if isinstance(target, tuple) else (target,)
        self.args, self.name, self.commutes, self.shared = args, name, commutes, shared

    def match(self, found: Any, so_far: Match) -> Iterator[Match]:
        if not isinstance(found, Node) or found.op != "call_function" or found.target not in self.targets:
            return
        given = arguments(found)
        here, rest = given[: len(self.args)], given[len(self.args) :]
        if rest and rest != [default for _, default in arguments_of(found.target)][len(self.args) :]:
            return
        inside = so_far.enter(found, self.shared)
        for start in inside.bind(self.name, found) if self.name else (inside,):
            yield from _match_all(self.args, here, start)
            if self.commutes:
                yield from _match_all(self.args, [here[1], here[0], *here[2:]], start)


class Either(Pattern):
    def __init__(self, *patterns: Any):
        self.patterns = patterns

    def match(self, found: Any, so_far: Match) -> Iterator[Match]:
        for pattern in self.patterns:
            yield from matches(pattern, found, so_far)


class Cast(Pattern):
    def __init__(self, inside: Any):
        self.inside = inside

    def match(self, found: Any, so_far: Match) -> Iterator[Match]:
        if isinstance(found, Node) and found.target is aten._to_copy.default and set(found.kwargs) == {"dtype"}:
            yield from matches(self.inside, found.args[0], so_far.enter(found, shared=True))
        yield from matches(self.inside, found, so_far)


SPLITS = (aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default)


class Half(Pattern):
    """The first (index 0) or second (index 1) half of the last dimension."""

    def __init__(self, inside: Any, index: int):
        self.inside, self.index = inside, index

    def match(self, found: Any, so_far: Match) -> Iterator[Match]:
        if not isinstance(found, Node) or found.op != "call_function":
            return
        whole = found.args[0]
        if found.target is operator.getitem and isinstance(whole, Node):
            # The second of more than two parts need not begin in the middle.
            is_part_of_two = whole.target in SPLITS and found.args[1] == self.index and len(whole.meta["val"]) == 2
            if is_part_of_two and is_half(found, whole.args[0]):
                entered = so_far.enter(found, shared=True).enter(whole, shared=True)
                yield from matches(self.inside, whole.args[0], entered)
        elif found.target is aten.slice.Tensor and is_half(found, whole):
            size, (_, _, begin, _, step) = value(found).shape[-1], arguments(found)
            if step == 1 and (begin or 0) % (2 * size) == self.index * size:
                yield from matches(self.inside, whole, so_far.enter(found, shared=True))


def is_half(part: Node, whole: Any) -> bool:
    """Whether a part of a tensor is half as long in the last dimension; then that dimension was split."""
    return 2 * value(part).shape[-1] == value(whole).shape[-1]
