"""Finds stop strings in text that comes in pieces, in one pass whose work does not depend on their number."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple


class StopAutomaton:
    """The automaton of Aho and Corasick for some strings.

    Its states are the beginnings of the strings. After some text the automaton is in the state of the longest
    beginning with which the text ends, so the state also says how much of the text a stop string may still claim.

    Args:
        stops: non-empty strings.
    """

    START = 0
    """The state before any text."""

    def __init__(self, stops: Sequence[str]):
        self._next: list[dict[str, int]] = [{}]
        """For each state the states that one more character of a stop string leads to."""
        self._found: list[str | None] = [None]
        """For each state the longest stop string with which the text ends."""
        for stop in stops:
            self._add(stop)
        self._fallback = [0] * len(self._next)
        """For each state the one that is tried when no character fits: that of the longest proper ending of its text
        which also begins a stop string."""
        self._pending = [0] * len(self._next)
        """For each state how many of the text's last characters may begin a stop string that is not complete yet."""
        self._link()

    def _add(self, stop: str) -> None:
        state = self.START
        for character in stop:
            following = self._next[state].setdefault(character, len(self._next))
            if following == len(self._next):
                self._next.append({})
                self._found.append(None)
            state = following
        self._found[state] = stop

    def _link(self) -> None:
        """Fills ``_fallback`` and ``_pending``, and completes ``_found``; states of short beginnings come first."""
        waiting = deque((state, 1) for state in self._next[self.START].values())
        while waiting:
            state, length = waiting.popleft()
            fallback = self._fallback[state]
            self._found[state] = self._found[state] or self._found[fallback]
            self._pending[state] = length if self._next[state] else self._pending[fallback]
            for character, following in self._next[state].items():
                self._fallback[following] = self.step(fallback, character)
                waiting.append((following, length + 1))

    def step(self, state: int, character: str) -> int:
        """The state after one more character."""
        while (following := self._next[state].get(character)) is None and state != self.START:
            state = self._fallback[state]
        return self.START if following is None else following

    def found(self, state: int) -> str | None:
        """The longest stop string with which the text ends."""
        return self._found[state]

    def pending(self, state: int) -> int:
        """How many of the text's last characters may begin a stop string that is not complete yet."""
        return self._pending[state]


@lru_cache(maxsize=8)
def stop_automaton(stops: tuple[str, ...]) -> StopAutomaton:
    """The automaton for some stop strings; one for all choices of a request, which follow one another."""
    return StopAutomaton(stops)


class FoundStop(NamedTuple):
    """A stop string in a text."""

    start: int
    """Index of its first character in the text."""
    stop: str


class StopSearch:
    """Searches a growing text for the stop string that ends it: the one that begins first, and of several at one place
    the longest. Each character is looked at once.

    Args:
        stops: non-empty strings.
    """

    def __init__(self, stops: tuple[str, ...]):
        self.found: FoundStop | None = None
        """The stop string that ends the text, unless a better one follows."""
        self.length = 0
        """Characters of the text that were searched."""
        self._automaton = stop_automaton(stops)
        self._state = StopAutomaton.START

    @property
    def open_start(self) -> int:
        """Index of the first character that may begin a stop string whose end has not come yet; ``length`` if none
        does."""
        return self.length - self._automaton.pending(self._state)

    @property
    def is_decided(self) -> bool:
        """Whether a stop string was found that nothing can replace any more. One that begins earlier, or at the same
        place and is longer, would replace it."""
        return self.found is not None and self.open_start > self.found.start

    def search(self, text: str, min_end: int) -> None:
        """Searches the next characters of the text, up to the one that decides.

        Args:
            text: the next characters.
            min_end: a stop string counts only if it ends after so many characters of the whole text.
        """
        for character in text:
            if self.is_decided:
                return
            self._state = self._automaton.step(self._state, character)
            self.length += 1
            stop = self._automaton.found(self._state)
            if stop is not None and self.length > min_end:
                start = self.length - len(stop)
                if self.found is None or start <= self.found.start:
                    self.found = FoundStop(start, stop)
