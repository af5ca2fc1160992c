"""Log probabilities of tokens.

They belong to the forward pass that filled the position. If top_k, top_p, min_p or a grammar limit the choice, a
token's is taken from the distribution that it was drawn from, the most probable tokens' from the whole distribution.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from lopa_ascend.text.tokenizer import Tokenizer
from lopa_ascend.types import Alternatives, GenerationOutput, TokenRun

LOWEST = -9999.0
"""Stands for minus infinity, which JSON does not have; other servers send it too."""


@dataclass(frozen=True)
class TokenProb:
    token: str
    """Text of the token alone. Of a part of a character: its bytes as ``escaped`` writes them; without text:
    "token_id:" and its id."""
    data: bytes | None
    """In UTF-8; None without a tokenizer."""
    logprob: float
    offset: int
    """Characters of the choice's text before it."""
    top: tuple[TokenProb, ...] = ()
    """The most probable tokens of the position, best first."""
    logprob_in_top: float = LOWEST
    """Log probability of the token in ``top``; ``logprob`` if the token is not listed."""

    @property
    def is_part(self) -> bool:
        """Its bytes are no text: a character's other bytes are in other tokens."""
        return self.data is not None and as_text(self.data) is None

    def chat(self) -> dict[str, Any]:
        """In the form of chat completions."""
        return {"token": self.token, "logprob": self.logprob, "bytes": None if self.data is None else list(self.data)}


class TokenProbs:
    """Makes the ``TokenProb`` of each token of one choice, in order; ``is_truncated``: drawn from a part of the
    distribution. Without a tokenizer, tokens are shown by their ids."""

    def __init__(self, tokenizer: Tokenizer | None, *, is_truncated: bool = False):
        self._tokenizer, self._is_truncated = tokenizer, is_truncated
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def push(self, tokens: TokenRun) -> list[TokenProb]:
        lists = tokens.alternatives or [()] * len(tokens)
        return [self._next(*item) for item in zip(tokens.ids, tokens.probs, lists, strict=True)]

    def _next(self, token: int, prob: float, alternatives: Alternatives) -> TokenProb:
        offset = self._offset
        listed = dict(alternatives)
        if token in listed and not self._is_truncated:
            listed[token] = prob  # the same, but for its last bits: it was computed twice
        top = tuple(self._token(other, other_prob, offset) for other, other_prob in listed.items())
        if self._tokenizer is not None and not self._tokenizer.is_special(token):
            self._offset += len(self._decoder.decode(self._tokenizer.piece(token)))
        own = self._token(token, prob, offset)
        return replace(own, top=top, logprob_in_top=_logprob(listed.get(token, prob)))

    def _token(self, token: int, prob: float, offset: int) -> TokenProb:
        logprob = _logprob(prob)
        piece = None if self._tokenizer is None else self._tokenizer.piece(token)
        text = as_text(piece) if piece else f"token_id:{token}"
        return TokenProb(escaped(piece or b"") if text is None else text, piece, logprob, offset)


def scored(texts: Sequence[str], output: GenerationOutput) -> list[dict[str, Any]]:
    """How probable each text is, from the output that scores them."""
    sums = [sum(values) for values in output.continuation_logprobs]
    best = max(sums)
    total = sum(math.exp(value - best) for value in sums)
    return [
        {
            "text": text,
            "logprob": max(value, LOWEST),
            "num_tokens": len(values),
            "share": math.exp(value - best) / total,
        }
        for text, value, values in zip(texts, sums, output.continuation_logprobs, strict=True)
    ]


def as_text(piece: bytes) -> str | None:
    """None if the bytes are not UTF-8."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return None


def escaped(piece: bytes) -> str:
    r"""Bytes as OpenAI writes those of a part of a character: printable ASCII as it is, others as ``\xf0``."""
    return "".join(chr(byte) if 0x20 <= byte < 0x7F and byte != ord("\\") else f"\\x{byte:02x}" for byte in piece)


def _logprob(prob: float) -> float:
    return max(math.log(prob), LOWEST) if prob > 0 else LOWEST
