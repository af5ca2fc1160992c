"""How a model thinks before it answers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Thinking:
    """What stands around the thoughts of a model, and whether they have begun."""

    is_open: bool
    """The prompt has opened them. Otherwise the answer may."""
    open: tuple[int, ...]
    """Token ids of the opening mark."""
    close: tuple[int, ...]
    """Token ids of the closing mark."""
    max_tokens: int | None = None
    """Most tokens between the marks."""
