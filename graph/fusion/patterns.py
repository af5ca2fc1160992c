"""Expressions over FX nodes.

A pattern is matched against a node from its result down to its inputs. There may be several matches: arguments of what
commutes are tried both ways, and what may be left out, both with and without.
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
    """``bound``: what the pattern's names stand for; ``inside``: the nodes that the pattern spells out; ``shared``:
    those of them that may be used elsewhere too, and are then computed for that."""

    bound: dict[str, Any] = field(default_factory=dict)
    inside: tuple[Node, ...] = ()
    shared: frozenset[Node] = frozenset()

    def __getitem__(self, name: str) -> Any:
        return self.bound[name]

    def bind(self, name: str, found: Any) -> Iterator[Match]:
        if name not in self.bound:
            yield Match({**self.bound, name: found}, self.inside, self.shared)
        elif self.bound[name] is found:
            yield self

    @property
    def dtypes(self) -> set[torch.dtype]:
        """Those of all results inside that are tensors."""
        values = [value(node) for node in self.inside]
        return {x.dtype for x in values if isinstance(x, Tensor)}

    def enter(self, node: Node, shared: bool) -> Match:
        return Match(self.bound, (*self.inside, node), self.shared | {node} if shared else self.shared)


class Pattern(ABC):
    @abstractmethod
    def match(self, found: Any, so_far: Match) -> Iterator[Match]:
        """All ways to match an argument of a node, given what is matched so far."""


def matches(pattern: Any, found: Any, so_far: Match) -> Iterator[Match]:
    """``pattern``: a Pattern, a list of them, or a literal."""
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
    """Anything that passes the test; where the name comes again, the same."""

    name: str
    test: Callable[[Any], bool] | None = None

    def match(self, found: Any, so_far: Match) -> Iterator[Match]:
        if self.test is None or self.test(found):
            yield from so_far.bind(self.name, found)


class Call(Pattern):
    """A call with these arguments; those that are not given have the op's defaults."""

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
    """What is inside, cast to another dtype or as it is."""

    def __init__(self, inside: Any):
        self.inside = inside

    def match(self, found: Any, so_far: Match) -> Iterator[Match]:
        if isinstance(found, Node) and found.target is aten._to_copy.default and set(found.kwargs) == {"dtype"}:
            yield from matches(self.inside, found.args[0], so_far.enter(found, shared=True))
        yield from matches(self.inside, found, so_far)


SPLITS = (aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default)


class Half(Pattern):
    """The first (0) or second (1) half of the last dimension."""

    def __init__(self, inside: Any, index: int):
        self.inside, self.index = inside, index

    def match(self, found: Any, so_far: Match) -> Iterator[Match]:
        if not isinstance(found, Node) or found.op != "call_function":
            return
        whole = found.args[0]
        if found.target is operator.getitem and isinstance(whole, Node):
            if whole.target in SPLITS and found.args[1] == self.index and is_half(found, whole.args[0]):
                entered = so_far.enter(found, shared=True).enter(whole, shared=True)
                yield from matches(self.inside, whole.args[0], entered)
        elif found.target is aten.slice.Tensor and is_half(found, whole):
            size, (_, _, begin, _, step) = value(found).shape[-1], arguments(found)
            if step == 1 and (begin or 0) % (2 * size) == self.index * size:
                yield from matches(self.inside, whole, so_far.enter(found, shared=True))


def is_half(part: Node, whole: Any) -> bool:
    """Whether a part of a tensor has half of its last dimension; so it is that which was split."""
    return 2 * value(part).shape[-1] == value(whole).shape[-1]
