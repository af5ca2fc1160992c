"""What a request keeps out of its answer beside its grammar: one filter for each thing. A further filter is one class,
and a line in ``filters_for``. Under a grammar they give way if it allows nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from lopa_ascend.config import DecodingParams
from lopa_ascend.config.decoding import banned_ids


class Filter(Protocol):
    keeps_share: bool
    """Whether banned tokens keep their share of the probability. If not, theirs is 0."""

    def banned(self, answer: Sequence[int], first: int) -> list[frozenset[int]]:
        """The token ids that may not be filled into each place of a branch's answer, masks included, from the index
        ``first`` on."""


def filters_for(params: DecodingParams, mask: int, ends: Sequence[int]) -> tuple[Filter, ...]:
    filters: list[Filter] = []
    words = banned_ids(params)
    assert len(words) == len(params.bad_words), "the engine knows no text"
    if words:
        filters.append(BadWords(words, mask, keeps_share=params.structured_outputs is None))
    if params.min_new_tokens:
        filters.append(EarlyEnds(ends, params.min_new_tokens))
    return tuple(filters)


class EarlyEnds:
    """Keeps token ids that end an answer out of its first ``num_places`` places."""

    keeps_share = True

    def __init__(self, ends: Sequence[int], num_places: int):
        self._ends, self._num_places = frozenset(ends), num_places

    def banned(self, answer: Sequence[int], first: int) -> list[frozenset[int]]:
        return [self._ends if place < self._num_places else frozenset() for place in range(first, len(answer))]


class BadWords:
    """Keeps words (token ids) out, prepared so that a forward pass costs no comparison per word.

    Positions are filled in any order, so a word's last token may come first. It is banned as long as the positions
    before it hold the beginning of the word, or could still hold it because they are masked. So no order of fills, and
    no number of them in one pass, completes the word.

    "Shift-and" matching: the words stand one after the other, and each of their tokens has one bit of an integer. As
    the answer is read from left to right, a token's bit is set if its word, up to this token, may end at the position
    just read.
    """

    def __init__(self, words: Sequence[Sequence[int]], mask: int, keeps_share: bool = True):
        self._mask, self.keeps_share = mask, keeps_share
        self._longest = max(map(len, words))
        self._first_tokens = 0
        self._last_tokens: dict[int, int] = {}
        """Bit of a word's last token -> token id."""
        self._bits_of: dict[int, int] = {}
        """Token id -> the bits of its places in the words."""
        first_bit = 1
        for word in words:
            self._first_tokens |= first_bit
            for place, token in enumerate(word):
                self._bits_of[token] = self._bits_of.get(token, 0) | (first_bit << place)
            last_bit = first_bit << (len(word) - 1)
            self._last_tokens[last_bit] = word[-1]
            first_bit <<= len(word)

    def banned(self, answer: Sequence[int], first: int) -> list[frozenset[int]]:
        tokens_of: dict[int, frozenset[int]] = {}  # by ``may_go_on``, which is the same at most places
        banned = []
        may_end_here = 0
        start = max(0, first - self._longest)
        for place, token in enumerate(answer[start:], start):
            # A shift past a word's last token meets the first token of the next word, whose bit is set anyway.
            may_go_on = (may_end_here << 1) | self._first_tokens
            if place >= first:
                if may_go_on not in tokens_of:
                    last_tokens = (last for bit, last in self._last_tokens.items() if may_go_on & bit)
                    tokens_of[may_go_on] = frozenset(last_tokens)
                banned.append(tokens_of[may_go_on])
            if token == self._mask:  # any token may still be filled in
                may_end_here = may_go_on
            else:
                may_end_here = may_go_on & self._bits_of.get(token, 0)
        return banned
