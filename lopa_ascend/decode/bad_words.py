"""Which tokens may not be filled in, so that an answer never contains certain words.

Positions are filled in any order, so a word's first tokens may come later than its last one. Therefore the last token
of a word is banned from a position as long as the positions before it hold the beginning of the word, or could still
hold it because they are masked. So no order of fills, and no number of them in one pass, completes the word.
"""

from __future__ import annotations

from collections.abc import Sequence

Word = Sequence[int]
"""Token ids."""


class BadWords:
    """The words that one request bans, prepared so that a forward pass costs no comparison per word.

    All words lie one behind the other, and each of their tokens has a bit in an integer ("shift-and" matching). While
    an answer is read from left to right, a bit is set if the word up to its token may end at the position just read.

    Args:
        words: what the answer may not contain.
        mask: token id of the mask.
    """

    def __init__(self, words: Sequence[Word], mask: int):
        self._mask = mask
        self._longest = max(map(len, words))
        self._first_tokens = 0
        """Bits of the words' first tokens."""
        self._last_tokens: dict[int, int] = {}
        """Token id by the bit of each word's last token."""
        self._equal: dict[int, int] = {}
        """Bits of the words' tokens by token id."""
        first = 1
        for word in words:
            self._first_tokens |= first
            for place, token in enumerate(word):
                self._equal[token] = self._equal.get(token, 0) | first << place
            self._last_tokens[first << len(word) - 1] = word[-1]
            first <<= len(word)

    def banned_tokens(self, answer: Sequence[int], first: int) -> list[list[int]]:
        """The tokens that may not be filled into each place of an answer, from one place to the end.

        Args:
            answer: token ids of the answer of one branch, masks included.
            first: index in ``answer``.
        """
        tokens_of: dict[int, list[int]] = {}  # by bits: most places have the same
        banned = []
        may_end_here = 0
        start = max(0, first - self._longest)
        for place, token in enumerate(answer[start:], start):
            # A shift past a word's last token meets the first token of the next word, whose bit is set anyway.
            may_go_on = may_end_here << 1 | self._first_tokens
            if place >= first:
                if may_go_on not in tokens_of:
                    tokens_of[may_go_on] = sorted({last for bit, last in self._last_tokens.items() if may_go_on & bit})
                banned.append(tokens_of[may_go_on])
            may_end_here = may_go_on if token == self._mask else may_go_on & self._equal.get(token, 0)
        return banned
