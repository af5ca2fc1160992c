"""Reads ``config.json`` strictly, as its family says. Models in plain torch read further fields themselves."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lopa_ascend.config import ConfigError, ModelConfig
from lopa_ascend.config.files import Fields, shown
from lopa_ascend.config.int4_files import AWQ, GPTQ, int4_format
from lopa_ascend.config.quantized_files import (
    COMPRESSED_TENSORS,
    CONFIG_FIELD,
    FP8,
    fp8_format,
    uses_compressed_tensors,
)
from lopa_ascend.families.family import Family

_ONLY_VALUES: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu",),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1,),
    "rope_scaling": (None,),
    "use_sliding_window": (False,),
}
"""Field -> the values that change nothing; the first stands for a missing field."""
_WITHOUT_EFFECT = frozenset(
    {
        *("attention_dropout", "embd_pdrop", "hidden_dropout", "initializer_range", "pretraining_tp", "resid_pdrop"),
        *("_attn_implementation", "_attn_implementation_autoset", "attn_implementation", "use_cache"),
        *("_name_or_path", "architectures", "auto_map", "keys_to_ignore_at_inference", "transformers_version"),
        *("bos_token_id", "mask_token", "pad_token_id", "max_window_layers", "sliding_window"),
    }
)
"""Fields for training, for other programs, and for sliding windows, which are off."""
_FULL = "full_attention"
MAX_BLOCK = 2**10
"""Positions of the largest block."""
logger = logging.getLogger(__name__)


def read_config(
    config: Mapping[str, Any], generation: Mapping[str, Any], source: str, family: Family | None
) -> ModelConfig:
    """The configuration of a Hugging Face directory. Warns of fields that the family does not know.

    Args:
        config: content of ``config.json``; null counts as missing.
        generation: content of ``generation_config.json``.
        source: path of ``config.json``, for messages.
        family: refuses what fused ops cannot do (other activations, scaled rope, sliding windows). None: a model in
            plain torch, which reads such fields itself.

    Raises:
        ConfigError: a field is missing or malformed, or asks for something that this engine cannot do.
    """
    config = {name: value for name, value in config.items() if value is not None}
    fields = Fields(config, source) if family is None else fields_of(config, source, family)
    if not isinstance(fields.get("model_type"), str):
        raise fields.error("model_type", "a text")
    rope = fields.get("rope_parameters", {})
    if not isinstance(rope, dict):
        raise ConfigError(f"{source}: rope_parameters is {shown(rope)}, expected an object")
    hidden = fields.integer("hidden_size", 2**20)
    heads, kv_heads, head_dim = _heads(fields, hidden)
    vocab = fields.integer("vocab_size", 2**24)
    num_layers = fields.integer("num_hidden_layers", 1024)
    if family is not None:
        _refuse_variants(fields, rope, num_layers, family)
    has_blocks = family is not None and family.properties.has_blocks
    block_size = fields.integer("block_size", MAX_BLOCK) if has_blocks else None
    mask, eos = _special_ids(fields, generation, str(Path(source).with_name("generation_config.json")), vocab)
    found = ModelConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size", 2**22),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=fields.integer("max_position_embeddings", 2**22),
        rope_theta=_rope_theta(fields, rope),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6, at_most=1.0),
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        attention_bias=fields.flag("attention_bias", True),
        mask_token_id=mask,
        eos_token_ids=eos,
        dtype=_dtype(fields),
        block_size=block_size,
        model_type=config["model_type"] if family is None else family.name,
        is_fused=family is not None,
        raw=config if family is None else {},
    )
    if family is None:
        return found
    found = found if family.complete is None else family.complete(fields, found)
    _warn_of_unknown(fields, config, family)
    return found


def fields_of(config: Mapping[str, Any], source: str, family: Family) -> Fields:
    """The fields of a ``config.json``; null counts as missing, and the family has values for missing fields. Raises
    ConfigError if ``model_type`` is another family's, or a field that implies others is malformed."""
    config = {name: value for name, value in config.items() if value is not None}
    own = Fields(config, source)
    implied = {} if family.implied is None else family.implied(own)
    defaults = {family.names.get(name, name): value for name, value in family.defaults.items()}
    fields = Fields({**defaults, **implied, **config}, source, family.names)
    fields.read = own.read
    fields.expect("model_type", (family.model_type,))
    return fields


def _refuse_variants(fields: Fields, rope: Mapping[str, Any], num_layers: int, family: Family) -> None:
    """Refuses activations, attention, positions and weight formats that fused ops do not have (ConfigError)."""
    for name, allowed in _ONLY_VALUES.items():
        if name not in family.names and name not in family.unused:
            fields.expect(name, allowed, default=allowed[0])
    for name, allowed in family.only.items():
        fields.expect(name, allowed)
    quantized = fields.get(CONFIG_FIELD)
    is_known = uses_compressed_tensors(quantized) or fp8_format(quantized) or int4_format(quantized)
    if quantized is not None and not is_known:
        methods = f"{COMPRESSED_TENSORS!r}, {FP8!r}, {GPTQ!r} or {AWQ!r}"
        raise fields.error(CONFIG_FIELD, f"one whose quant_method is {methods}")
    layer_types = fields.get("layer_types")
    if layer_types is not None and layer_types != [_FULL] * num_layers:
        raise fields.error("layer_types", f"{num_layers} times {_FULL!r}: other kinds of attention are not supported")
    in_rope = Fields(rope, f"{fields.source}: rope_parameters")
    for name in rope:
        if name not in {"rope_theta", "rope_type", "type", "partial_rotary_factor", *family.own_rope}:
            known = ", ".join(sorted({"rope_theta", "rope_type", *family.own_rope}))
            raise ConfigError(f"{in_rope.source} has the field {name!r}, expected none but {known}")
    kind = in_rope.get("rope_type", in_rope.get("type", "default"))
    for name in ("rope_type", "type"):
        in_rope.expect(name, (kind,) if family.own_rope else ("default",), default=kind)
    in_rope.expect("partial_rotary_factor", (1,), default=1)


def _warn_of_unknown(fields: Fields, config: Mapping[str, Any], family: Family) -> None:
    """Warns of fields that nothing has read from ``fields`` and that are not off. They may be for another program, or
    change what the model should compute."""
    known = fields.read | _WITHOUT_EFFECT | family.unused
    unknown = {k: v for k, v in config.items() if k not in known and v not in (None, False, "", [], {})}
    if unknown:
        logger.warning(
            "%s: not known for model_type %r, so without effect: %s", fields.source, family.model_type, shown(unknown)
        )


def _heads(fields: Fields, hidden: int) -> tuple[int, int, int]:
    """(query heads, KV heads, size of a head)."""
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
    """From ``rope_parameters`` (transformers 5) or the field of its own."""
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
    """The field or, for now, "float32": ``checkpoint.read`` then takes the format in which most bytes are stored."""
    old, new = fields.get("torch_dtype"), fields.get("dtype")
    if old is not None and new is not None and old != new:
        raise ConfigError(f"{fields.source}: torch_dtype is {shown(old)}, but dtype is {shown(new)}; expected the same")
    if old is not None:
        return str(old)
    return "float32" if new is None else str(new)


def _special_ids(
    fields: Fields, generation: Mapping[str, Any], generation_source: str, vocab: int
) -> tuple[int, tuple[int, ...]]:
    """The mask's id, and the ids that end an answer, each below ``vocab``. ``generation_config.json`` has the last word
    on the latter, as in transformers."""
    mask = fields.token("mask_token_id", vocab)
    other = generation.get("mask_token_id")
    if other is not None and (type(other) is not int or other != mask):
        raise ConfigError(f"{generation_source}: mask_token_id is {shown(other)}, expected {mask} as in config.json")
    eos, source = eos_ids(fields.get("eos_token_id"), vocab, fields.source), fields.source
    if generation.get("eos_token_id") is not None:
        eos, source = eos_ids(generation["eos_token_id"], vocab, generation_source), generation_source
    if mask in eos:
        raise ConfigError(
            f"{source}: eos_token_id is {mask}, expected another id than mask_token_id: a mask would end every answer"
        )
    return mask, eos


def eos_ids(value: object, vocab: int, source: str) -> tuple[int, ...]:
    """The ids in a file's field ``eos_token_id``: one id, a list, or missing (None). Raises ConfigError if it holds
    something else than ids below ``vocab``."""
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab:
            raise ConfigError(f"{source}: eos_token_id {shown(token)} is not an id below vocab_size {vocab}")
    return tuple(ids)
