"""What a model thinks before it answers: <think>...</think> at the beginning of its text, or opened by the prompt."""

from __future__ import annotations

from lopa_ascend.text.stream import start_of_stop
from lopa_ascend.types import GenerationOutput, Thinking

OPEN, CLOSE = "<think>", "</think>"


class ReasoningReader:
    """Splits the growing text of an answer into what the model thinks and what it says after that.

    White space around each is left out. Marks that come after the answer has begun are part of it. ``begin`` is where
    the answer begins in the text; None while that is not known.
    """

    def __init__(self, thinking: Thinking):
        self.begin: int | None = None
        self.has_thought = self._is_open = thinking.is_open
        self._has_words = False
        """Something of the open block has been said."""
        self._read = 0
        """Characters that are settled."""

    def push(self, text: str, *, is_final: bool) -> str:
        """What the model has thought, as far as it is new. ``text`` is the whole so far."""
        said = list[str]()
        while self.begin is None and (self._think if self._is_open else self._decide)(text, is_final, said):
            pass
        return "".join(said)

    def _think(self, text: str, is_final: bool, said: list[str]) -> bool:
        """Takes what is new of an open block; returns whether it has ended."""
        if not self._has_words:
            self._read = _after_space(text, self._read)
            if text.startswith(OPEN, self._read):  # after a prompt that has it already
                self._read += len(OPEN)
                return True
            if not is_final and OPEN.startswith(text[self._read :]):
                return False
        end = text.find(CLOSE, self._read)
        known = end if end >= 0 else len(text) if is_final else start_of_stop(text, (CLOSE,))
        piece = text[self._read : known]
        if end >= 0 or not is_final:
            piece = piece.rstrip()
        said.append(piece)
        self._has_words = self._has_words or bool(piece)
        self._read += len(piece)
        if end >= 0:
            self._read, self._is_open, self._has_words = end + len(CLOSE), False, False
        return end >= 0

    def _decide(self, text: str, is_final: bool, said: list[str]) -> bool:
        """Before the answer and outside of a block: finds out whether one begins here."""
        self._read = _after_space(text, self._read)
        if text.startswith(OPEN, self._read):
            self._is_open = True
            if self.has_thought:
                said.append("\n\n")
            self.has_thought = True
            return True
        if is_final or not OPEN.startswith(text[self._read :]):
            self.begin = self._read if self.has_thought else 0
        return False


def _after_space(text: str, begin: int) -> int:
    while begin < len(text) and text[begin].isspace():
        begin += 1
    return begin


def num_reasoning_tokens(thinking: Thinking, output: GenerationOutput) -> int:
    """How many tokens of an answer are what the model thought first, with its marks."""
    text, tokens = output.text or "", output.token_ids
    if not thinking.is_open and not text.lstrip().startswith(OPEN):
        return 0
    length = len(thinking.close)
    ends = (i + length for i in range(len(tokens) - length + 1) if tuple(tokens[i : i + length]) == thinking.close)
    return next(ends, len(tokens))
