"""The shape and the special token ids of a model, read from the files in its directory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lopa_ascend.config.experts import ExpertsConfig, rotary_dim
from lopa_ascend.config.families import Family
from lopa_ascend.config.files import ConfigError, Fields, shown
from lopa_ascend.config.variants import refuse_variants
from lopa_ascend.types import KVShape


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
    rotary_dim: int = 0
    """Elements of a head that are rotated, the first ones; by default all."""
    experts: ExpertsConfig | None = None
    """None: a dense model."""
    max_position_embeddings: int
    """Most positions of prompt and answer together, as ``config.json`` has it: that of Dream-v0 says 131,072, where its
    authors name 2,048."""
    rope_theta: float
    """Base of the rotary position embedding."""
    rms_norm_eps: float
    tie_word_embeddings: bool
    """The output head uses the embedding's weights."""
    attention_bias: bool
    """The projections to queries, keys and values have a bias, and in SDAR also that of their outputs."""
    mask_token_id: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    """Number format of the weights, e.g. "bfloat16"."""
    block_size: int | None = None
    """Positions of the blocks that the model was trained with; None: it was trained without blocks."""
    model_type: str = ""
    """Name of the architecture."""
    is_fused: bool = True
    """The architecture is written in fused ops, not in plain torch."""
    raw: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """``config.json`` as it is, for an architecture in plain torch; empty for others."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "rotary_dim", self.rotary_dim or self.head_dim)

    # ---- parts of the model on a tensor-parallel rank ----------------------------------------------------------------

    def tensor_parallel_sizes(self) -> tuple[int, ...]:
        """The numbers of ranks that this model can be split over. A model in plain torch cannot be split."""
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
        """KV heads of each of ``size`` ranks. With more ranks than KV heads, several ranks hold the same one."""
        return max(1, self.num_kv_heads // size)

    def kv_shape(self, size: int = 1) -> KVShape:
        """The shape of the keys and values that each of ``size`` ranks stores."""
        return KVShape(self.num_layers, self.local_kv_heads(size), self.head_dim)

    def vocab_shard(self, size: int) -> int:
        """Rows of the LM head on each of ``size`` ranks; the last rank may have fewer."""
        return -(-self.vocab_size // size)

    @classmethod
    def from_json(
        cls,
        config: Mapping[str, Any],
        generation: Mapping[str, Any],
        source: str,
        name: str,
        family: Family | None,
    ) -> ModelConfig:
        """The configuration that a Hugging Face directory describes.

        Args:
            config: content of ``config.json``; a field that is null counts as missing.
            generation: content of ``generation_config.json``.
            source: path of ``config.json``, for messages.
            name: of the architecture.
            family: of an architecture in fused ops. What these cannot do (other activations, scaled rope, sliding
                windows) is then refused. None: it is in plain torch, and reads such fields itself.

        Raises:
            ConfigError: a field is missing or malformed, or asks for something that this engine cannot do.
        """
        config = {name: value for name, value in config.items() if value is not None}
        fields = Fields(config, source)
        if family is not None and family.names:
            fields = Fields({**_implied(fields), **config}, source, family.names)
        fields.expect("model_type", (name if family is None else family.model_type,))
        rope = config.get("rope_parameters", {})
        if not isinstance(rope, dict):
            raise ConfigError(f"{source}: rope_parameters is {shown(rope)}, expected an object")
        hidden = fields.integer("hidden_size", 2**20)
        heads, kv_heads, head_dim = _heads(fields, hidden)
        vocab = fields.integer("vocab_size", 2**24)
        num_layers = fields.integer("num_hidden_layers", 1024)
        block_size, has_experts = None, family is not None and family.has_experts
        if family is not None:
            refuse_variants(fields, rope, num_layers, family)
            if family.block_field is not None:
                block_size = fields.integer(family.block_field, 2**10, default=family.block_size)
            if family.mask_token_id is not None:
                fields = Fields({"mask_token_id": family.mask_token_id, **fields.values}, source, family.names)
        mask, eos = _special_ids(fields, generation, str(Path(source).with_name("generation_config.json")), vocab)
        return cls(
            vocab_size=vocab,
            hidden_size=hidden,
            intermediate_size=fields.integer("intermediate_size", 2**22),
            num_layers=num_layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rotary_dim=rotary_dim(fields, head_dim) if has_experts else head_dim,
            experts=ExpertsConfig.read(fields, num_layers) if has_experts else None,
            max_position_embeddings=fields.integer("max_position_embeddings", 2**22),
            rope_theta=_rope_theta(fields, rope),
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6 if family is None else family.rms_norm_eps, at_most=1.0),
            tie_word_embeddings=fields.flag("tie_word_embeddings", False),
            attention_bias=fields.flag("attention_bias", family is None or family.attention_bias),
            mask_token_id=mask,
            eos_token_ids=eos,
            dtype=_dtype(fields),
            block_size=block_size,
            model_type=name,
            is_fused=family is not None,
            raw=config if family is None else {},
        )


def _implied(fields: Fields) -> dict[str, object]:
    """The sizes that a ``config.json`` with the names of OLMo may leave out, because other fields say them."""
    heads, vocab = fields.integer("n_heads", 2**14), fields.integer("vocab_size", 2**24)
    rows = fields.integer("embedding_size", 2**24, default=vocab)
    if rows < vocab:
        raise fields.error("embedding_size", f"at least vocab_size {vocab}")
    inner = fields.integer("mlp_ratio", 2**10, default=4) * fields.integer("d_model", 2**20)
    kv_heads = 1 if fields.flag("multi_query_attention", False) else heads
    return {"embedding_size": vocab, "mlp_hidden_size": inner, "n_kv_heads": kv_heads}


def _heads(fields: Fields, hidden: int) -> tuple[int, int, int]:
    """The numbers of query heads and of KV heads, and the size of a head.

    Args:
        fields: of ``config.json``.
        hidden: the hidden size.
    """
    source, heads = fields.source, fields.integer("num_attention_heads", 2**14)
    kv_heads = fields.integer("num_key_value_heads", 2**14, default=heads)
    if heads % kv_heads:
        name, of = fields.name("num_attention_heads"), fields.name("num_key_value_heads")
        raise ConfigError(f"{source}: {name} {heads} is not a multiple of {of} {kv_heads}")
    if not fields.has("head_dim") and hidden % heads:
        name, of = fields.name("hidden_size"), fields.name("num_attention_heads")
        raise ConfigError(f"{source}: {name} {hidden} is not a multiple of {of} {heads}")
    head_dim = fields.integer("head_dim", 2**14, default=hidden // heads)
    if head_dim % 2:
        raise ConfigError(f"{source}: head_dim {head_dim} is odd; rotary embeddings need an even one")
    return heads, kv_heads, head_dim


def _rope_theta(fields: Fields, rope: Mapping[str, Any]) -> float:
    """The base of the rotary embedding, from ``rope_parameters`` (transformers 5) or the field of its own."""
    default = 10000.0
    if "rope_theta" not in rope:
        return fields.number("rope_theta", default, at_least=1.0)
    nested = Fields(rope, f"{fields.source}: rope_parameters").number("rope_theta", default, at_least=1.0)
    theta = fields.number("rope_theta", nested, at_least=1.0)
    if theta != nested:
        raise ConfigError(
            f"{fields.source}: rope_theta is {theta:g}, but rope_parameters.rope_theta is {nested:g}; expected the "
            "same number"
        )
    return theta


def _dtype(fields: Fields) -> str:
    """The number format that ``config.json`` names. If it names none: "float32" for now; ``checkpoint.read`` then takes
    the format in which most bytes are stored."""
    old, new = fields.values.get("torch_dtype"), fields.values.get("dtype")
    if old is not None and new is not None and old != new:
        raise ConfigError(f"{fields.source}: torch_dtype is {shown(old)}, but dtype is {shown(new)}; expected the same")
    if old is not None:
        return str(old)
    return "float32" if new is None else str(new)


def _special_ids(
    fields: Fields, generation: Mapping[str, Any], generation_source: str, vocab: int
) -> tuple[int, tuple[int, ...]]:
    """The id of the mask token and the ids of the tokens that end an answer.

    ``generation_config.json`` has the last word on the latter, as in transformers.

    Args:
        fields: of ``config.json``.
        generation: content of ``generation_config.json``.
        generation_source: its path, for messages.
        vocab: every id must be below.
    """
    mask = fields.token("mask_token_id", vocab)
    other = generation.get("mask_token_id")
    if other is not None and (type(other) is not int or other != mask):
        raise ConfigError(f"{generation_source}: mask_token_id is {shown(other)}, expected {mask} as in config.json")
    eos, source = eos_ids(fields.values, vocab, fields.source), fields.source
    if generation.get("eos_token_id") is not None:
        eos, source = eos_ids(generation, vocab, generation_source), generation_source
    if mask in eos:
        raise ConfigError(
            f"{source}: eos_token_id is {mask}, expected another id than mask_token_id: a mask would end every answer"
        )
    return mask, eos


def eos_ids(values: Mapping[str, Any], vocab: int, source: str) -> tuple[int, ...]:
    """The ids in the field ``eos_token_id`` of a file, which may be one id, a list, or missing.

    Args:
        values: content of the file.
        vocab: every id must be below.
        source: its path, for messages.

    Raises:
        ConfigError: the field holds something else than ids below ``vocab``.
    """
    value = values.get("eos_token_id")
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab:
            raise ConfigError(f"{source}: eos_token_id {shown(token)} is not an id below vocab_size {vocab}")
    return tuple(ids)
