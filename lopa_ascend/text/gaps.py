"""A text with gaps: its parts, as a prompt and the canvas that follows it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lopa_ascend.config import ParameterError
from lopa_ascend.config.errors import FieldPath
from lopa_ascend.types import GappedText


@dataclass(frozen=True, slots=True)
class Gap:
    """A place to fill in a text; what ends an answer ends it too. Raises ParameterError for two lengths, or one below
    1."""

    tokens: int | None = None
    max_tokens: int | None = None
    """The most that its length, which is found, can be. With ``tokens`` None too: ``max_new_tokens``."""

    def __post_init__(self) -> None:
        if self.tokens is not None and self.max_tokens is not None:
            raise ParameterError("max_tokens", "cannot be with tokens, which is the length of the gap")
        for name in ("tokens", "max_tokens"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ParameterError(name, f"must be an integer of 1 or more, got {value!r:.100}")

    def size(self, longest: int) -> int:
        """Most tokens that it can have, if ``max_new_tokens`` is ``longest``."""
        return self.tokens or self.max_tokens or longest


Piece = list[int] | Gap
"""What is given, as token ids, or a gap."""


def pieces_of(
    parts: Sequence[str | Sequence[int] | Gap], encode: Callable[[str | Sequence[int], FieldPath], list[int]]
) -> tuple[list[int], list[Piece]]:
    """The prompt of a text with gaps, and what follows it. ``encode`` gives the token ids of a part, by its field."""
    pieces = list[Piece]()
    for index, part in enumerate(parts):
        is_gap = isinstance(part, Gap)
        if is_gap and not index:
            raise ParameterError(("parts", 0), "must be given: a gap is predicted from what is before it")
        if is_gap and isinstance(parts[index - 1], Gap):
            raise ParameterError(("parts", index), "is a gap directly behind another one; make them one")
        pieces.append(part if isinstance(part, Gap) else encode(part, ("parts", index)))
    prompt, *rest = pieces or [[]]
    if not any(isinstance(piece, Gap) for piece in rest):
        raise ParameterError("parts", "has no gap; /v1/completions continues a text")
    assert isinstance(prompt, list)
    return prompt, rest


def gapped_text(pieces: Sequence[Piece], longest: int, mask: int) -> GappedText:
    """What follows the prompt. A gap that names no size has ``longest`` tokens at most."""
    tokens, flexible, num_gaps = list[int](), list[int](), 0
    for piece in pieces:
        if isinstance(piece, list):
            tokens += piece
            continue
        tokens += [mask] * piece.size(longest)
        flexible += [num_gaps] if piece.tokens is None else []
        num_gaps += 1
    given = sum(len(piece) for piece in pieces if isinstance(piece, list))
    return GappedText(tuple(tokens), tuple(flexible), num_gaps, given)


def whole_text(parts: Sequence[str | Sequence[int] | Gap], texts: Sequence[str | None]) -> str | None:
    """The parts with their gaps filled by ``texts``; None if one of them is no text."""
    filled = iter(texts)
    pieces = [next(filled) if isinstance(part, Gap) else part for part in parts]
    known = [piece for piece in pieces if isinstance(piece, str)]
    return "".join(known) if len(known) == len(pieces) else None
