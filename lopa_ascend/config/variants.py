"""What ``config.json`` may ask for that models in fused ops cannot do.

Models in plain torch read such fields themselves.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from lopa_ascend.config.families import Family
from lopa_ascend.config.files import ConfigError, Fields, shown
from lopa_ascend.config.int8_files import CONFIG_FIELD, uses_compressed_tensors

_ONLY_VALUES: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu",),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1,),
    "rope_scaling": (None,),
    "use_sliding_window": (False,),
}
"""Field -> the values that change nothing; the first one is also that of a missing field."""
_READ = {
    *_ONLY_VALUES,
    CONFIG_FIELD,
    *("attention_bias", "head_dim", "hidden_size", "intermediate_size", "layer_types", "mask_token_id"),
    *("max_position_embeddings", "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "rms_norm_eps"),
    *("rope_parameters", "rope_theta", "tie_word_embeddings", "vocab_size"),
}
_WITHOUT_EFFECT = {
    *("attention_dropout", "embd_pdrop", "hidden_dropout", "resid_pdrop"),
    *("_attn_implementation", "_attn_implementation_autoset", "attn_implementation", "fuse_cross_entropy"),
    *("keys_to_ignore_at_inference", "max_window_layers", "sliding_window"),
}
"""Fields for training and for other programs whose names look like a part of the network. Sliding windows are off."""
_NETWORK = re.compile(
    "act_|activation|alibi|attention|attn|bd_size|bias|block|clip|conv|embd|embed|expert|ffn|gate|head|hidden|kernel"
    "|key|layer|logit|lora|mask(?!_token)|mlp|moe|multiplier|norm|position|qk|qkv|query|quant|resid|rope|rotary|router|scal|sink"
    "|softcap|value|window"
)
"""Parts of the names of fields that can change what a network computes."""
_FULL = "full_attention"


def refuse_variants(fields: Fields, rope: Mapping[str, Any], num_layers: int, family: Family) -> None:
    """Refuses activations, attention, positions and formats of weights that models in fused ops do not have.

    Args:
        fields: of ``config.json``.
        rope: its field ``rope_parameters``.
        num_layers: the model's.
        family: the model's.

    Raises:
        ConfigError: a field asks for one of them, or is not known and named like a part of the network.
    """
    for name, allowed in _ONLY_VALUES.items():
        if name not in family.names and name not in family.unused:
            fields.expect(name, allowed, default=allowed[0])
    for name, allowed in family.only.items():
        fields.expect(name, allowed)
    if not uses_compressed_tensors(fields.values):
        fields.expect(CONFIG_FIELD, (None,), default=None)
    layer_types = fields.values.get("layer_types")
    if layer_types is not None and layer_types != [_FULL] * num_layers:
        raise fields.error("layer_types", f"{num_layers} times {_FULL!r}: other kinds of attention are not supported")
    in_rope = Fields(rope, f"{fields.source}: rope_parameters")
    for name in rope:
        if name not in ("rope_theta", "rope_type", "type", "partial_rotary_factor"):
            raise ConfigError(f"{in_rope.source} has the field {name!r}, expected rope_theta and rope_type alone")
    in_rope.expect("rope_type", ("default",), default="default")
    in_rope.expect("type", ("default",), default="default")
    in_rope.expect("partial_rotary_factor", (1,), default=1)
    _refuse_unknown(fields, family)


def _refuse_unknown(fields: Fields, family: Family) -> None:
    """Refuses fields that are not known and may change what the model computes.

    A name alone tells which may: files have many fields for training and for other programs.
    """
    known = {*map(fields.name, _READ), *_WITHOUT_EFFECT, *family.only, *family.unused, family.block_field}
    for name, value in fields.values.items():
        if name not in known and _NETWORK.search(name) and value not in (None, False, "", [], {}):
            raise ConfigError(
                f"{fields.source}: {shown(name)} is {shown(value)}, which this engine does not know for model_type "
                f"{family.model_type!r}; expected no such field, or false"
            )
