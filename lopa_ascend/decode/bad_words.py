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

    The words are put one after the other, and each of their tokens gets one bit of an integer ("shift-and" matching).
    The answer is read from left to right. A token's bit is set if its word, up to this token, may end at the position
    just read.

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
        self._bits_of: dict[int, int] = {}
        """By token id: the bits of all places in the words that hold this token."""
        first_bit = 1
        for word in words:
            self._first_tokens |= first_bit
            for place, token in enumerate(word):
                self._bits_of[token] = self._bits_of.get(token, 0) | (first_bit << place)
            last_bit = first_bit << (len(word) - 1)
            self._last_tokens[last_bit] = word[-1]
            first_bit <<= len(word)

    def banned_tokens(self, answer: Sequence[int], first: int) -> list[tuple[int, ...]]:
        """The tokens that may not be filled into each place of an answer, from one place to the end.

        Args:
            answer: token ids of the answer of one branch, masks included.
            first: index in ``answer``.
        """
        tokens_of: dict[int, tuple[int, ...]] = {}  # by ``may_go_on``, which is the same at most places
        banned = []
        may_end_here = 0
        start = max(0, first - self._longest)
        for place, token in enumerate(answer[start:], start):
            # A shift past a word's last token meets the first token of the next word, whose bit is set anyway.
            may_go_on = (may_end_here << 1) | self._first_tokens
            if place >= first:
                if may_go_on not in tokens_of:
                    last_tokens = {last for bit, last in self._last_tokens.items() if may_go_on & bit}
                    tokens_of[may_go_on] = tuple(sorted(last_tokens))
                banned.append(tokens_of[may_go_on])
            if token == self._mask:  # any token may still be filled in
                may_end_here = may_go_on
            else:
                may_end_here = may_go_on & self._bits_of.get(token, 0)
        return banned
