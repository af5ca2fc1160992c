"""Turns the tokens of a running request into text that only grows, and ends it at stop strings."""

from __future__ import annotations

import codecs
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from lopa_ascend.text.tokenizer import Tokenizer


class TextStream:
    """Incremental detokeniser of one request: gives the text that is safe to show.

    Two endings are held back until more tokens decide about them: an incomplete UTF-8 sequence, and text that could
    begin a stop string. The text ends before the stop string that begins first, or of several at one place before the
    longest; where the pushes cut the tokens makes no difference. No token is decoded twice. A stop string within the
    first ``min_tokens`` tokens does not count.
    """

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...] = (), min_tokens: int = 0):
        self.stopped: str | None = None
        """The stop string that ended the text."""
        self._tokenizer, self._stop, self._min_tokens = tokenizer, stop, min_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._shown = ""
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
        """Tokens of the answer: all, or when stopped those up to the one that completes the stop string."""
        return len(self._lengths) if self.stopped is None else bisect_left(self._lengths, self._stop_end) + 1

    def push(self, token_ids: Sequence[int]) -> str:
        """The text to show, given all final tokens so far."""
        return self._advance(token_ids, final=False)

    def finish(self, token_ids: Sequence[int]) -> str:
        """The whole text, given all tokens. Nothing is held back; an incomplete UTF-8 sequence becomes U+FFFD."""
        return self._advance(token_ids, final=True)

    def _advance(self, token_ids: Sequence[int], final: bool) -> str:
        if self.stopped is not None:
            return self._shown
        self._decode_new(token_ids, final)
        num_released = self._search(final)
        self._shown += self._held[:num_released]
        self._held = self._held[num_released:]
        return self._shown

    def _decode_new(self, token_ids: Sequence[int], final: bool) -> None:
        length = len(self._shown) + len(self._held)
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

    def _search(self, final: bool) -> int:
        """Ends the text at a stop string that nothing can replace. Returns how many held characters may be shown."""
        open_start = len(self._held) if final else start_of_stop(self._held, self._stop)
        if len(self._lengths) < self._min_tokens:  # no stop string counts yet
            return open_start
        min_end = self._lengths[self._min_tokens - 1] - len(self._shown) if self._min_tokens else 0
        found = []
        for stop in self._stop:
            start = self._held.find(stop, max(0, min_end - len(stop) + 1))
            if start >= 0:
                found.append((start, -len(stop), stop))
        if not found:
            return open_start
        start, _, stop = min(found)
        if open_start > start or final:  # else a longer stop string, or one that begins earlier, may follow
            self.stopped = stop
            self._stop_end = len(self._shown) + start + len(stop)
        return min(start, open_start)


def start_of_stop(text: str, stops: Sequence[str]) -> int:
    """Index of the first character that may begin a stop string whose end has not come yet; the length if none does."""
    longest = max(map(len, stops), default=1) - 1
    for start in range(max(0, len(text) - longest), len(text)):
        if any(len(stop) > len(text) - start and stop.startswith(text[start:]) for stop in stops):
            return start
    return len(text)
