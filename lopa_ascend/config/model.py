"""The shape and the special token ids of a model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lopa_ascend.types import KVShape


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """A mixture of experts: layers have many MLPs, and each token takes a few."""

    num_experts: int
    per_token: int
    """Experts that a token takes."""
    num_groups: int
    """Groups of consecutive experts, all of one size."""
    kept_groups: int
    """Groups from which a token takes its experts."""
    scale: float
    """Factor of the weights of a token's experts, which sum to 1 before."""
    inner: int
    """Width of an expert."""
    shared_inner: int
    """Width of the MLP that every token takes beside its experts."""
    first_layer: int
    """Earlier layers have one MLP, as in a dense model."""


@dataclass(frozen=True, kw_only=True)
class YarnConfig:
    """Rotary embeddings for more positions than a model was first trained with (YaRN, arXiv 2309.00071), with Llama 4's
    scale of queries."""

    factor: float
    """Of the number of positions."""
    original: int
    """Positions before the extension."""
    beta_fast: float
    """An element with at least so many rotations over the original positions keeps its speed."""
    beta_slow: float
    """An element with at most so many turns ``factor`` times slower."""
    attention_factor: float
    """Of cosines and sines."""
    query_beta: float

    def query_scale(self, position: int) -> float:
        """Factor of the query at a position."""
        return 1 + self.query_beta * math.log1p(position // self.original)

    def frequencies(self, theta: float, dim: int) -> list[float]:
        """Radians per position, for each pair of ``dim`` elements."""

        def place(rotations: float) -> float:
            return dim * math.log(self.original / (2 * math.pi * rotations)) / (2 * math.log(theta))

        low = max(math.floor(place(self.beta_fast)), 0)
        high = min(math.ceil(place(self.beta_slow)), dim - 1)
        found = []
        for pair in range(dim // 2):
            slow = min(max((pair - low) / (high - low or 0.001), 0), 1)
            plain = theta ** (-2 * pair / dim)
            found.append(slow * plain / self.factor + (1 - slow) * plain)
        return found


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape and the special token ids of a model, from ``config.json`` and ``generation_config.json``."""

    vocab_size: int
    """Rows of the embedding."""
    hidden_size: int
    intermediate_size: int
    """Width of the MLP."""
    num_layers: int
    num_heads: int
    """Query heads."""
    num_kv_heads: int
    head_dim: int
    rotary_dim: int = 0
    """The first elements of a head, which are rotated; 0: all."""
    experts: ExpertsConfig | None = None
    """None: a dense model."""
    max_position_embeddings: int
    """Most positions of prompt and answer together. Dream-v0's ``config.json`` says 131,072, its authors 2,048."""
    rope_theta: float
    """Base of the rotary position embedding."""
    yarn: YarnConfig | None = None
    rms_norm_eps: float
    tie_word_embeddings: bool
    """The output head uses the embedding's weights."""
    attention_bias: bool
    """The projections to queries, keys and values have a bias; in some families the output projection does too."""
    mask_token_id: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    """Number format of the weights, e.g. "bfloat16"."""
    block_size: int | None = None
    """Positions of the blocks that the model was trained with; None: no blocks."""
    model_type: str = ""
    """Name of the architecture."""
    is_fused: bool = True
    """The architecture is written in fused ops, not in plain torch."""
    raw: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """``config.json`` itself, for an architecture in plain torch; empty for others."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "rotary_dim", self.rotary_dim or self.head_dim)

    @property
    def attention_reach(self) -> int:
        """Attention over so many positions is as much arithmetic as a token's products with a dense layer's weights."""
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        products = self.hidden_size * (2 * queries + 2 * keys + 3 * self.intermediate_size)
        return max(1, products // (2 * queries))

    # ---- parts of the model on a tensor-parallel rank ----------------------------------------------------------------

    def tensor_parallel_sizes(self) -> tuple[int, ...]:
        """Numbers of ranks that can split this model. A model in plain torch cannot be split."""
        if not self.is_fused:
            return (1,)
        return tuple(size for size in range(1, self.num_heads + 1) if self._splits(size))

    def _splits(self, size: int) -> bool:
        widths = [self.intermediate_size]
        if self.experts is not None:  # each rank has a part of every expert
            widths += [self.experts.inner, self.experts.shared_inner]
        splits_layers = all(width % size == 0 for width in (self.num_heads, *widths))
        # Each rank has several KV heads, or several ranks have the same one.
        splits_kv_heads = self.num_kv_heads % size == 0 or size % self.num_kv_heads == 0
        last_rank_has_tokens = (size - 1) * self.vocab_shard(size) < self.vocab_size
        return splits_layers and splits_kv_heads and last_rank_has_tokens

    def local_heads(self, size: int) -> int:
        """Query heads of each of ``size`` ranks."""
        return self.num_heads // size

    def local_kv_heads(self, size: int) -> int:
        """KV heads of each of ``size`` ranks. If there are more ranks than heads, several hold the same head."""
        return max(1, self.num_kv_heads // size)

    def kv_shape(self, size: int = 1) -> KVShape:
        """The shape of the keys and values on each of ``size`` ranks."""
        return KVShape(self.num_layers, self.local_kv_heads(size), self.head_dim)

    def vocab_shard(self, size: int) -> int:
        """Rows of the LM head on each of ``size`` ranks; the last rank may have fewer."""
        return -(-self.vocab_size // size)
