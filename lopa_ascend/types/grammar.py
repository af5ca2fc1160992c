"""A grammar that an answer keeps to."""

from __future__ import annotations

from dataclasses import dataclass, field

from lopa_ascend.types.thinking import Thinking


@dataclass(frozen=True, slots=True)
class Grammar:
    """Which texts an answer may be, as a request states it. ``text.grammars`` compiles it."""

    kind: str
    """"json" (text: a JSON schema), "json_object" (text: empty), "regex", "choice" (text: a JSON list of strings),
    "grammar" (text: in Lark's syntax), or "any" (text: empty; no request names it), which limits ``thinking`` alone."""
    text: str
    thinking: Thinking | None = field(default=None, compare=False)
    """What may come before the answer; the grammar begins after that."""
    source: str = field(default="", compare=False)
    """What llguidance compiles, once the guard has let the grammar pass."""
    compiled_bytes: int = field(default=0, compare=False)
    """Memory that compiling it takes, as the guard has measured."""

    def __str__(self) -> str:
        return self.kind

    @property
    def is_any(self) -> bool:
        return self.kind == "any"


class GrammarError(ValueError):
    """A grammar cannot be followed any further: no token fits, or that is too hard to find out."""
