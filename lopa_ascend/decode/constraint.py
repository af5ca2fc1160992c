"""Which tokens may follow a beginning of the answer, so that the answer keeps to a grammar.

Positions are filled in any order, but a grammar reads from left to right. So it is followed along each branch up to the
first mask, where only allowed tokens can be chosen. What was filled further ahead is checked once the beginning reaches
it.

A set of tokens is an integer: bit i stands for token id i.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from lopa_ascend.types import GrammarError


class Matcher(Protocol):
    """Follows a text token by token. The tokens that end an answer are not its concern."""

    def allowed(self) -> int:
        """The set of tokens that may come next; empty if the text can only end."""

    def accept(self, tokens: Sequence[int]) -> int:
        """Takes as many of these tokens as may come next, one after the other; returns how many."""

    def roll_back(self, count: int) -> None:
        """Takes back the last ``count`` tokens."""

    @property
    def is_complete(self) -> bool:
        """Whether the text may end here."""

    @property
    def is_over(self) -> bool:
        """Whether nothing may come next."""

    def forced(self) -> Sequence[int]:
        """The tokens of the text that must come next, as far as there is only one."""

    @property
    def takes_any(self) -> bool:
        """Whether any token may come next, but for one or two: then the decoding alone decides where to fill."""

    def ahead(self) -> Sequence[tuple[int, int]]:
        """Tokens that come later unless what is between makes them unfit: (number of tokens between, token)."""


class Constraint:
    """The grammar of one request, asked about beginnings of any branch. Its methods may raise GrammarError. ``matcher``
    is at the beginning of the answer. ``ends`` are token ids that end the answer, the usual one first; they are allowed
    exactly where the text may end."""

    def __init__(self, matcher: Matcher, ends: Sequence[int]):
        self._matcher = matcher
        self._ends = tuple(ends)
        self._end_set = sum(1 << token for token in set(ends))
        self._taken: tuple[int, ...] = ()
        """What ``matcher`` has read."""

    def admitted(self, beginning: Sequence[int]) -> int:
        """How many tokens of a beginning, from the first on, fit. What follows an end fits."""
        end = next((index for index, token in enumerate(beginning) if token in self._ends), None)
        text = tuple(beginning[:end])
        num_common = _num_common(text, self._taken)
        if num_common < len(self._taken):
            self._matcher.roll_back(len(self._taken) - num_common)
            self._taken = text[:num_common]
        self._taken = text[: num_common + self._matcher.accept(text[num_common:])]
        if end is None or len(self._taken) < end or not self._matcher.is_complete:
            return len(self._taken)
        return len(beginning)

    def allowed(self, beginning: Sequence[int]) -> int:
        """The set of tokens that may follow a beginning that fits."""
        matcher = self._at(beginning)
        allowed = 0 if matcher.is_over else matcher.allowed() & ~self._end_set
        if matcher.is_complete:
            allowed |= self._end_set
        if not allowed:  # the usual token of what must follow ends answers, so others write it
            allowed = sum(1 << token for token in self.forced(beginning)[:1])
        if not allowed:
            raise GrammarError("no token fits the grammar here")
        return allowed

    def forced(self, beginning: Sequence[int]) -> list[int]:
        """What must follow a beginning that fits; an end too, if nothing else may follow."""
        matcher = self._at(beginning)
        if matcher.is_over and matcher.is_complete:
            return list(self._ends[:1])
        tokens = () if matcher.is_complete else matcher.forced()
        end = next((index for index, token in enumerate(tokens) if token in self._ends), None)
        # What must follow is what ``admitted`` takes, whatever the matcher says.
        forced = list(tokens[: matcher.accept(tokens[:end])])
        self._taken += tuple(forced)
        return forced

    def takes_any(self, beginning: Sequence[int]) -> bool:
        return self._at(beginning).takes_any

    def ahead(self, beginning: Sequence[int]) -> Sequence[tuple[int, int]]:
        return self._at(beginning).ahead()

    def _at(self, beginning: Sequence[int]) -> Matcher:
        num_fitting = self.admitted(beginning)
        assert num_fitting == len(beginning), "the caller has masked what does not fit"
        return self._matcher


def _num_common(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    """The length of the common beginning."""
    shortest = min(len(left), len(right))
    if left[:shortest] == right[:shortest]:
        return shortest
    return next(index for index in range(shortest) if left[index] != right[index])
