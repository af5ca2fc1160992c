"""A model's geometry and special ids, as its directory says them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lopa_ascend.types import KVShape


class ConfigError(ValueError):
    """A model configuration that this engine cannot run; the message names the field and what was expected."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Geometry and special ids of a Dream model, every value from ``config.json`` and ``generation_config.json``."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rope_theta: float
    rms_norm_eps: float
    tie_word_embeddings: bool
    attention_bias: bool
    mask_token_id: int
    eos_token_ids: tuple[int, ...]
    dtype: str

    # ---- shares of a tensor-parallel rank --------------------------------------------------------------------------

    def tensor_parallel_sizes(self) -> tuple[int, ...]:
        """The sizes that split this model: query heads and the MLP evenly, KV heads evenly or one for several ranks,
        and the vocabulary so that no rank is left without a token."""
        return tuple(size for size in range(1, self.num_heads + 1) if self._splits(size))

    def _splits(self, size: int) -> bool:
        even = not self.num_heads % size and not self.intermediate_size % size
        kv_heads = not self.num_kv_heads % size or not size % self.num_kv_heads
        return even and kv_heads and (size - 1) * self.vocab_shard(size) < self.vocab_size

    def local_heads(self, size: int) -> int:
        """Query heads of one of ``size`` ranks."""
        return self.num_heads // size

    def local_kv_heads(self, size: int) -> int:
        """KV heads of one of ``size`` ranks: where there are more ranks, several hold the same one."""
        return max(1, self.num_kv_heads // size)

    def kv_shape(self, size: int = 1) -> KVShape:
        """What one of ``size`` ranks stores of keys and values."""
        return KVShape(self.num_layers, self.local_kv_heads(size), self.head_dim)

    def vocab_shard(self, size: int) -> int:
        """Token ids of one of ``size`` ranks; the last ones may have fewer."""
        return -(-self.vocab_size // size)

    @classmethod
    def from_json(
        cls, config: Mapping[str, Any], generation: Mapping[str, Any], source: str = "config.json"
    ) -> ModelConfig:
        """Reads the fields of a Hugging Face Dream directory.

        Raises:
            ConfigError: a field is missing, malformed, or asks for something this engine does not do.
        """
        config = {name: value for name, value in config.items() if value is not None}  # null: the default
        read = _Reader(config, source)
        read.expect("model_type", ("Dream",))
        read.expect("hidden_act", ("silu",), default="silu")
        read.expect("rope_scaling", (None,), default=None)
        read.expect("use_sliding_window", (False,), default=False)
        rope = config.get("rope_parameters", {})
        if not isinstance(rope, dict):
            raise ConfigError(f"{source}: rope_parameters is {rope!r}, expected an object")
        if rope.get("rope_type", "default") != "default":
            raise ConfigError(f"{source}: rope_parameters.rope_type is {rope['rope_type']!r}, expected 'default'")
        hidden, heads = read.integer("hidden_size"), read.integer("num_attention_heads")
        kv_heads = read.integer("num_key_value_heads", default=heads)
        if heads % kv_heads:
            raise ConfigError(
                f"{source}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
            )
        if "head_dim" not in config and hidden % heads:
            raise ConfigError(f"{source}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
        head_dim = read.integer("head_dim", default=hidden // heads)
        if head_dim % 2:
            raise ConfigError(f"{source}: head_dim {head_dim} is odd; rotary embeddings need an even one")
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
        )


def _eos_ids(config: Mapping[str, Any], generation: Mapping[str, Any], vocab: int, source: str) -> tuple[int, ...]:
    """All EOS ids of generation_config.json, or else of config.json."""
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
    """Typed access to a JSON object whose errors name the file, the field and what was expected."""

    def __init__(self, values: Mapping[str, Any], source: str):
        self.values, self.source = values, source

    def expect(self, name: str, allowed: tuple[object, ...], **default: object) -> None:
        value = self.values.get(name, default.get("default"))
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
