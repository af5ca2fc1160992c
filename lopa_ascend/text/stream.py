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
    longest; where the pushes cut the tokens makes no difference. All work is linear in the tokens: no token is decoded
    twice.

    Args:
        tokenizer: gives the bytes of each token.
        stop: stop strings.
        min_tokens: a stop string does not count if it lies within the first ``min_tokens`` tokens.
    """

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...] = (), min_tokens: int = 0):
        self.stopped: str | None = None
        """The stop string that ended the text."""
        self._tokenizer, self._stop, self._min_tokens = tokenizer, stop, min_tokens
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
        """Tokens that the visible text needs: when stopped, up to the one that completes the stop string."""
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
        # Later tokens can complete a stop string that begins at ``undecided`` or after it, but none that begins before.
        undecided = len(self._held) if final else self._find_undecided()
        num_released = undecided
        found = self._find_stop()
        # One found at or after ``undecided`` must wait: one that begins earlier, or a longer one, may be completed.
        if found is not None and found[0] < undecided:
            num_released, self.stopped = found
            self._stop_end = len(self._shown) + num_released + len(self.stopped)
        self._shown += self._held[:num_released]
        self._held = self._held[num_released:]
        return self._shown

    def _decode_new(self, token_ids: Sequence[int], final: bool) -> None:
        """Adds the text of tokens that have not been decoded yet to the held text."""
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

    def _find_stop(self) -> tuple[int, str] | None:
        """The stop string that begins first in the held text, of several at one place the longest: where, and which."""
        if len(self._lengths) < self._min_tokens:
            return None
        # In the held text, where the first ``min_tokens`` tokens end: a stop string must reach beyond.
        min_end = self._lengths[self._min_tokens - 1] - len(self._shown) if self._min_tokens else 0
        places = [(self._held.find(stop, max(0, min_end - len(stop) + 1)), stop) for stop in self._stop]
        found = [(start, stop) for start, stop in places if start >= 0]
        return min(found, key=lambda place: (place[0], -len(place[1])), default=None)

    def _find_undecided(self) -> int:
        """Where the longest ending of the held text begins that is the beginning of a stop string."""
        longest = 0
        for stop in self._stop:
            for size in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:size]):
                    longest = size
                    break
        return len(self._held) - longest
