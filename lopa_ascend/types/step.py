"""What a step of the engine needs beside the sequences: how they are scored, and where keys and values lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class KVShape(NamedTuple):
    """What one rank stores of each position: ``num_kv_heads`` are its own."""

    num_layers: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class Scoring:
    """How the logits of one request become tokens, probabilities and confidences (SPEC section 3)."""

    confidence: str
    """See ``DecodingParams.confidence``."""
    mask: int
    """Token id, never chosen."""
    num_token_ids: int
    """Ids from this one on are not in the tokenizer, and never chosen."""
    temperature: float = 0.0
    """0: the most probable token; above: a drawn one."""
    top_p: float | None = None
    top_k: int | None = None
    min_p: float = 0.0
    seed: int = 0
    runner_up: bool = False
    """Whether a prediction also names the token that would be chosen without the chosen one."""

    @property
    def truncated(self) -> bool:
        return self.top_p is not None or self.top_k is not None or self.min_p > 0


@dataclass(frozen=True, slots=True)
class PageCopy:
    """Keys and values to copy between two pages, given by their ids, from the page's first position on."""

    source: int
    target: int
    num_positions: int
