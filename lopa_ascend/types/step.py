"""What a step of the engine needs beside the sequences: how they are scored, and where keys and values lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class KVShape(NamedTuple):
    """What one rank stores of keys and values for each position."""

    num_layers: int
    num_kv_heads: int
    """KV heads of this rank."""
    head_dim: int


@dataclass(frozen=True, slots=True)
class Scoring:
    """How the logits of one request become tokens, probabilities and confidences (SPEC section 3)."""

    confidence: str
    """See ``DecodingParams.confidence``."""
    mask: int
    """Token id of the mask, which is never chosen."""
    num_token_ids: int
    """Token ids from this one on do not exist in the tokenizer, and are never chosen."""
    temperature: float = 0.0
    """0: the most probable token. Above: a token is drawn."""
    top_p: float | None = None
    top_k: int | None = None
    min_p: float = 0.0
    seed: int = 0
    """Seed of the draws."""
    runner_up: bool = False
    """Whether a prediction names the token, too, that would be chosen without the chosen one."""

    @property
    def truncated(self) -> bool:
        """Whether top_p, top_k or min_p limit the choice."""
        return self.top_p is not None or self.top_k is not None or self.min_p > 0


@dataclass(frozen=True, slots=True)
class PageCopy:
    """Keys and values to copy from one page to another, from the page's first position on."""

    source: int
    """Page id."""
    target: int
    """Page id."""
    num_positions: int
