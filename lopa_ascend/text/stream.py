"""Turns the tokens of a running request into text that only grows, and ends it at stop strings."""

from __future__ import annotations

import codecs
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from lopa_ascend.text.stops import StopSearch
from lopa_ascend.text.tokenizer import Tokenizer


class TextStream:
    """Incremental detokeniser of one request: gives the text that is safe to show.

    Two endings are held back until more tokens decide about them: an incomplete UTF-8 sequence, and text that could
    begin a stop string. The text ends before the stop string that begins first, or of several at one place before the
    longest; where the pushes cut the tokens makes no difference. No token is decoded twice, and each character is
    compared with the stop strings once, however many they are.

    Args:
        tokenizer: gives the bytes of each token.
        stop: stop strings.
        min_tokens: a stop string does not count if it lies within the first ``min_tokens`` tokens.
    """

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...] = (), min_tokens: int = 0):
        self.stopped: str | None = None
        """The stop string that ended the text."""
        self._tokenizer, self._min_tokens = tokenizer, min_tokens
        self._search = StopSearch(stop) if stop else None
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._shown = ""
        """Text that is safe to show."""
        self._held = ""
        """The text after ``_shown``, which is held back."""
        self._lengths: list[int] = []
        """For each token: characters of the whole text that are decoded once the token is."""
        self._stop_end = 0
        """When stopped: characters of the whole text up to the end of the stop string."""

    @property
    def num_shown(self) -> int:
        """Tokens whose text is shown completely."""
        return bisect_right(self._lengths, len(self._shown))

    @property
    def num_text_tokens(self) -> int:
        """Tokens of the answer: all, or when stopped those up to the one that completes the stop string, although the
        text ends before that string."""
        return len(self._lengths) if self.stopped is None else bisect_left(self._lengths, self._stop_end) + 1

    def push(self, token_ids: Sequence[int]) -> str:
        """The text to show, given all final tokens so far."""
        return self._advance(token_ids, final=False)

    def finish(self, token_ids: Sequence[int]) -> str:
        """The whole text, given all tokens. Nothing is held back; an incomplete UTF-8 sequence becomes U+FFFD."""
        return self._advance(token_ids, final=True)

    @property
    def _length(self) -> int:
        """Characters of the whole text so far."""
        return len(self._shown) + len(self._held)

    def _advance(self, token_ids: Sequence[int], final: bool) -> str:
        if self.stopped is not None:
            return self._shown
        self._decode_new(token_ids, final)
        end = self._length if self._search is None else self._search_new(self._search, final)
        num_released = end - len(self._shown)
        self._shown += self._held[:num_released]
        self._held = self._held[num_released:]
        return self._shown

    def _decode_new(self, token_ids: Sequence[int], final: bool) -> None:
        """Adds the text of tokens that have not been decoded yet to the held text."""
        length = self._length
        chunks = [self._held]
        for token in token_ids[len(self._lengths) :]:
            if not self._tokenizer.is_special(token):
                chunks.append(self._decoder.decode(self._tokenizer.piece(token)))
                length += len(chunks[-1])
            self._lengths.append(length)
        if final:
            chunks.append(self._decoder.decode(b"", final=True))
            if self._lengths:
                self._lengths[-1] += len(chunks[-1])
        self._held = "".join(chunks)

    def _search_new(self, search: StopSearch, final: bool) -> int:
        """Searches the text that is new for stop strings, and ends the text at the one that was found.

        Returns:
            Characters of the whole text that may be shown.
        """
        if len(self._lengths) < self._min_tokens:  # no stop string counts yet
            min_end = self._length
        else:
            min_end = self._lengths[self._min_tokens - 1] if self._min_tokens else 0
        search.search(self._held[search.length - len(self._shown) :], min_end)
        end = self._length if final else search.open_start
        if search.found is None:
            return end
        if final or search.is_decided:
            self.stopped = search.found.stop
            self._stop_end = search.found.start + len(search.found.stop)
        return min(end, search.found.start)
