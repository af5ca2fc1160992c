"""The shape and the special token ids of a model, read from the files in its directory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lopa_ascend.types import KVShape

DREAM = "Dream"
"""The ``model_type`` of the architecture that is written in fused ops."""


class ConfigError(ValueError):
    """A model configuration that this engine cannot run. The message names file and field, and what was expected."""


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
    """Heads of keys and values; each of them serves ``num_heads / num_kv_heads`` query heads."""
    head_dim: int
    max_position_embeddings: int
    """Most positions of prompt and answer together that the model was trained for."""
    rope_theta: float
    """Base of the rotary position embedding."""
    rms_norm_eps: float
    tie_word_embeddings: bool
    """The output head uses the embedding's weights."""
    attention_bias: bool
    """The projections to queries, keys and values have a bias."""
    mask_token_id: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    """Number format of the weights, e.g. "bfloat16"."""
    model_type: str = DREAM
    """Name of the architecture."""
    raw: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """``config.json`` as it is, for an architecture that needs more than the fields above; empty for Dream."""

    # ---- parts of the model on a tensor-parallel rank ----------------------------------------------------------------

    def tensor_parallel_sizes(self) -> tuple[int, ...]:
        """The numbers of ranks that this model can be split over. A model in plain torch cannot be split."""
        if self.model_type != DREAM:
            return (1,)
        return tuple(size for size in range(1, self.num_heads + 1) if self._splits(size))

    def _splits(self, size: int) -> bool:
        splits_layers = self.num_heads % size == 0 and self.intermediate_size % size == 0
        # Each rank has several KV heads, or several ranks have the same one.
        splits_kv_heads = self.num_kv_heads % size == 0 or size % self.num_kv_heads == 0
        last_rank_has_tokens = (size - 1) * self.vocab_shard(size) < self.vocab_size
        return splits_layers and splits_kv_heads and last_rank_has_tokens

    def local_heads(self, size: int) -> int:
        """Query heads of each of ``size`` ranks."""
        return self.num_heads // size

    def local_kv_heads(self, size: int) -> int:
        """KV heads of each of ``size`` ranks. With more ranks than KV heads, several ranks hold the same one."""
        return max(1, self.num_kv_heads // size)

    def kv_shape(self, size: int = 1) -> KVShape:
        """The shape of the keys and values that each of ``size`` ranks stores."""
        return KVShape(self.num_layers, self.local_kv_heads(size), self.head_dim)

    def vocab_shard(self, size: int) -> int:
        """Rows of the embedding on each of ``size`` ranks; the last rank may have fewer."""
        return -(-self.vocab_size // size)

    @classmethod
    def from_json(
        cls,
        config: Mapping[str, Any],
        generation: Mapping[str, Any],
        source: str = "config.json",
        model_type: str = DREAM,
    ) -> ModelConfig:
        """The configuration that a Hugging Face directory describes.

        Args:
            config: content of ``config.json``; a field that is null counts as missing.
            generation: content of ``generation_config.json``.
            source: path of ``config.json``, for messages.
            model_type: the architecture that ``config.json`` must name. What the engine's Dream cannot do (other
                activations, scaled rope, sliding windows) is refused for Dream alone: another architecture reads such
                fields itself.

        Raises:
            ConfigError: a field is missing or malformed, or asks for something that this engine cannot do.
        """
        config = {name: value for name, value in config.items() if value is not None}
        read = _Reader(config, source)
        read.expect("model_type", (model_type,))
        rope = config.get("rope_parameters", {})
        if not isinstance(rope, dict):
            raise ConfigError(f"{source}: rope_parameters is {rope!r}, expected an object")
        if model_type == DREAM:
            _refuse_variants_of_dream(read, rope)
        hidden = read.integer("hidden_size")
        heads, kv_heads, head_dim = _heads(read, hidden)
        vocab = read.integer("vocab_size")
        mask = read.token("mask_token_id", vocab)
        return cls(
            vocab_size=vocab,
            hidden_size=hidden,
            intermediate_size=read.integer("intermediate_size"),
            num_layers=read.integer("num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            max_position_embeddings=read.integer("max_position_embeddings"),
            rope_theta=read.positive("rope_theta", rope.get("rope_theta", 10000.0)),
            rms_norm_eps=read.positive("rms_norm_eps", 1e-6),
            tie_word_embeddings=read.flag("tie_word_embeddings", False),
            attention_bias=read.flag("attention_bias", True),
            mask_token_id=mask,
            eos_token_ids=_eos_ids(config, generation, vocab, source),
            dtype=str(config.get("torch_dtype", config.get("dtype", "float32"))),
            model_type=model_type,
            raw={} if model_type == DREAM else config,
        )


def _refuse_variants_of_dream(read: _Reader, rope: Mapping[str, Any]) -> None:
    """Raises ConfigError if ``config.json`` asks for what the engine's Dream cannot do."""
    read.expect("hidden_act", ("silu",), default="silu")
    read.expect("rope_scaling", (None,), default=None)
    read.expect("use_sliding_window", (False,), default=False)
    if rope.get("rope_type", "default") != "default":
        raise ConfigError(f"{read.source}: rope_parameters.rope_type is {rope['rope_type']!r}, expected 'default'")


def _heads(read: _Reader, hidden: int) -> tuple[int, int, int]:
    """The numbers of query heads and of KV heads, and the size of a head.

    Args:
        read: the fields of ``config.json``.
        hidden: the hidden size.
    """
    source, heads = read.source, read.integer("num_attention_heads")
    kv_heads = read.integer("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise ConfigError(f"{source}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    if "head_dim" not in read.values and hidden % heads:
        raise ConfigError(f"{source}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    head_dim = read.integer("head_dim", default=hidden // heads)
    if head_dim % 2:
        raise ConfigError(f"{source}: head_dim {head_dim} is odd; rotary embeddings need an even one")
    return heads, kv_heads, head_dim


def _eos_ids(config: Mapping[str, Any], generation: Mapping[str, Any], vocab: int, source: str) -> tuple[int, ...]:
    """The EOS ids that ``generation_config.json`` names, or else those of ``config.json``."""
    value = generation.get("eos_token_id")
    if value is None:
        value = config.get("eos_token_id", [])
    else:
        source = source.replace("config.json", "generation_config.json")
    ids = value if isinstance(value, list) else [value]
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab:
            raise ConfigError(f"{source}: eos_token_id {token!r} is not an id below vocab_size {vocab}")
    return tuple(ids)


class _Reader:
    """Typed access to a JSON object. Errors name the file, the field and what was expected.

    Args:
        values: the object.
        source: path of its file.
    """

    def __init__(self, values: Mapping[str, Any], source: str):
        self.values, self.source = values, source

    def expect(self, name: str, allowed: tuple[object, ...], default: object = None) -> None:
        """Raises ConfigError if the field has another value than the allowed ones."""
        value = self.values.get(name, default)
        if value not in allowed:
            raise ConfigError(f"{self.source}: {name} is {value!r}, expected {' or '.join(map(repr, allowed))}")

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.values.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{self.source}: {name} is {value!r}, expected a positive integer")
        return value

    def positive(self, name: str, default: float) -> float:
        value = self.values.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ConfigError(f"{self.source}: {name} is {value!r}, expected a positive number")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.values.get(name, default)
        if not isinstance(value, bool):
            raise ConfigError(f"{self.source}: {name} is {value!r}, expected true or false")
        return value

    def token(self, name: str, vocab: int) -> int:
        value = self.values.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < vocab:
            raise ConfigError(f"{self.source}: {name} is {value!r}, expected a token id below vocab_size {vocab}")
        return value
