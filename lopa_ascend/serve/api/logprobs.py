"""Log probabilities of tokens, in the forms of OpenAI's completions and chat completions.

The log probability of a token is that of the forward pass which filled its position. Probabilities of other tokens are
not kept, so a list of the most probable tokens holds the token itself.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lopa_ascend.text.tokenizer import Tokenizer

LOWEST = -9999.0
"""Stands for minus infinity, which JSON does not have. Other servers send the same number."""


@dataclass(frozen=True)
class TokenProb:
    """One visible token."""

    token: str
    """Text of the token alone; without a tokenizer its id."""
    data: bytes | None
    """UTF-8 bytes of the token; None without a tokenizer."""
    logprob: float
    offset: int
    """Where the token begins in the choice's text, in characters."""

    def chat(self) -> dict[str, Any]:
        """The token in the form of chat completions."""
        return {"token": self.token, "logprob": self.logprob, "bytes": None if self.data is None else list(self.data)}


class TokenProbs:
    """Makes the ``TokenProb`` of each token of one choice, in order; counts the characters of the text so far."""

    def __init__(self, tokenizer: Tokenizer | None):
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def push(self, token_ids: Sequence[int], probs: Sequence[float]) -> list[TokenProb]:
        """Takes the next tokens and the probabilities at which they were filled."""
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
    """``logprobs`` of a choice of completions; ``with_top``: with the list of the most probable tokens."""
    return {
        "tokens": [item.token for item in tokens],
        "token_logprobs": [item.logprob for item in tokens],
        "top_logprobs": [{item.token: item.logprob} for item in tokens] if with_top else None,
        "text_offset": [item.offset for item in tokens],
    }


def chat_logprobs(tokens: Sequence[TokenProb], with_top: bool) -> dict[str, Any]:
    """``logprobs`` of a choice of chat completions; ``with_top``: with the list of the most probable tokens."""
    content = [{**item.chat(), "top_logprobs": [item.chat()] if with_top else []} for item in tokens]
    return {"content": content, "refusal": None}
