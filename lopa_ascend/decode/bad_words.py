"""Which tokens may not be filled in, so that an answer never contains certain words.

Positions are filled in any order, so a word's first tokens may come later than its last one. Therefore the last token
of a word is banned from a position as long as the positions before it hold the beginning of the word, or could still
hold it because they are masked. So no order of fills, and no number of them in one pass, completes the word.
"""

from __future__ import annotations

from collections.abc import Sequence

Word = Sequence[int]
"""Token ids."""


def banned_tokens(words: Sequence[Word], answer: Sequence[int], place: int, mask: int) -> list[int]:
    """The tokens that may not be filled into one place of an answer.

    Args:
        words: what the answer may not contain.
        answer: token ids of the answer of one branch, masks included.
        place: index in ``answer``.
        mask: token id of the mask.
    """
    return [word[-1] for word in words if _may_end_at(word, answer, place, mask)]


def _may_end_at(word: Word, answer: Sequence[int], place: int, mask: int) -> bool:
    """Whether all tokens of the word but the last one may stand right before a place."""
    start = place - (len(word) - 1)
    if start < 0:
        return False
    return all(held in (token, mask) for token, held in zip(word[:-1], answer[start:place], strict=True))
