"""Probabilities of tokens in OpenAI's two shapes.

A position has the log probability of its token in the forward pass that filled it. There is no distribution over
alternatives afterwards, so where one is asked for, the token itself is listed.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lopa_ascend.text.tokenizer import Tokenizer

LOWEST = -9999.0
"""Instead of minus infinity, which JSON does not have; the number that other servers send."""


@dataclass(frozen=True)
class TokenProb:
    """One visible token: its text alone, its bytes (None without a tokenizer), and its place in the text."""

    token: str
    data: bytes | None
    logprob: float
    offset: int

    def chat(self) -> dict[str, Any]:
        return {"token": self.token, "logprob": self.logprob, "bytes": None if self.data is None else list(self.data)}


class TokenProbs:
    """The tokens of one choice, in order. Remembers how many characters they make."""

    def __init__(self, tokenizer: Tokenizer | None):
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def push(self, token_ids: Sequence[int], probs: Sequence[float]) -> list[TokenProb]:
        """The next tokens, and the probabilities at which they were filled."""
        return [self._next(token, prob) for token, prob in zip(token_ids, probs, strict=True)]

    def _next(self, token: int, prob: float) -> TokenProb:
        logprob = max(math.log(prob), LOWEST) if prob > 0 else LOWEST
        offset = self._offset
        if self._tokenizer is None:
            return TokenProb(f"token_id:{token}", None, logprob, offset)
        piece = self._tokenizer.piece(token)
        if not self._tokenizer.is_special(token):
            self._offset += len(self._decoder.decode(piece))
        return TokenProb(piece.decode(errors="replace"), piece, logprob, offset)


def completion_logprobs(tokens: Sequence[TokenProb], with_top: bool) -> dict[str, Any]:
    return {
        "tokens": [item.token for item in tokens],
        "token_logprobs": [item.logprob for item in tokens],
        "top_logprobs": [{item.token: item.logprob} for item in tokens] if with_top else None,
        "text_offset": [item.offset for item in tokens],
    }


def chat_logprobs(tokens: Sequence[TokenProb], with_top: bool) -> dict[str, Any]:
    content = [{**item.chat(), "top_logprobs": [item.chat()] if with_top else []} for item in tokens]
    return {"content": content, "refusal": None}
