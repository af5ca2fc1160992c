"""Regular expressions in the files of a checkpoint, compared with the names of layers."""

from __future__ import annotations

import time

import regex

from lopa_ascend.config.files import shown

MAX_PATTERN = 10_000
"""Characters of the longest regular expression."""
TIME = 0.5
"""Seconds of processor time for all regular expressions of a file. They take milliseconds, unless one of them tries
exponentially many ways to match."""


class PatternError(ValueError):
    """A regular expression that is wrong, too long or too slow."""


class Patterns:
    """The regular expressions of one file, which share ``TIME``."""

    def __init__(self) -> None:
        self._compiled: dict[str, regex.Pattern[str]] = {}
        """By text."""
        self._seconds_left = TIME

    def begins(self, pattern: str, name: str) -> bool:
        """Whether a regular expression matches the beginning of a name.

        Raises:
            PatternError: it is wrong or too long, or the time is over.
        """
        return self._find(pattern, name, is_whole=False)

    def matches(self, pattern: str, name: str) -> bool:
        """Whether a regular expression matches a whole name.

        Raises:
            PatternError: it is wrong or too long, or the time is over.
        """
        return self._find(pattern, name, is_whole=True)

    def _find(self, pattern: str, name: str, *, is_whole: bool) -> bool:
        if len(pattern) > MAX_PATTERN:
            raise PatternError(f"{shown(pattern)} has {len(pattern)} characters, expected at most {MAX_PATTERN}")
        begin = time.process_time()
        try:
            if pattern not in self._compiled:
                self._compiled[pattern] = regex.compile(pattern)
            compiled = self._compiled[pattern]
            compare = compiled.fullmatch if is_whole else compiled.match
            found = compare(name, timeout=max(self._seconds_left, 0.001)) is not None
        except TimeoutError:
            raise self._slow(pattern) from None
        except (regex.error, RecursionError, OverflowError, ValueError, RuntimeError) as error:
            raise PatternError(f"{shown(pattern)} is not a regular expression: {error}") from error
        self._seconds_left -= time.process_time() - begin
        if self._seconds_left < 0:
            raise self._slow(pattern)
        return found

    def _slow(self, pattern: str) -> PatternError:
        return PatternError(
            f"{shown(pattern)} takes more than {TIME:g} s to compare with the names of the model's layers, "
            "expected a regular expression without nested repetitions, or a list of names"
        )
