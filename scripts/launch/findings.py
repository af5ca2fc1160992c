"""What the checks of a launch find: one line each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    verdict: str
    """"ok", "note" (the launch may well work) or "FAIL" (it cannot)."""
    text: str
    """What was looked at: what was found."""

    def __str__(self) -> str:
        return f"{self.verdict:<5} {self.text}"


def ok(text: str) -> Finding:
    return Finding("ok", text)


def note(text: str) -> Finding:
    return Finding("note", text)


def fail(what: str, remedy: str) -> Finding:
    """A failure: what is wrong, and what to do."""
    return Finding("FAIL", f"{what}; {remedy}")
