"""How a model thinks before it answers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Thinking:
    """The marks around a model's thoughts, as token ids, and whether they have begun."""

    is_open: bool
    """By the prompt. Otherwise the answer may open them."""
    open: tuple[int, ...]
    close: tuple[int, ...]
    max_tokens: int | None = None
    """Between the marks."""
