"""LLaDA2.0 and 2.1 (mini, flash): mixtures of experts behind the first layers, and heads that are rotated in part."""

from __future__ import annotations

from typing import ClassVar

from lopa_ascend.checkpoint import HEAD, Architecture, Row, Table
from lopa_ascend.config.families import FAMILIES
from lopa_ascend.model.decoder import Decoder

_EMBEDDING, _UP = "model.word_embeddings.weight", "mlp.up_proj.weight"
_ATTN_NORM, _MLP_NORM = "input_layernorm.weight", "post_attention_layernorm.weight"


def _mlp(prefix: str, ours: str, inner: str, each: bool = False) -> tuple[Row, ...]:
    """The MLPs of a layer with experts. The router reads their inputs too, so these have no ``source``."""
    wide = ((inner, "hidden"), inner, "gate_up_proj")
    return (
        Row(f"{prefix}.gate_proj.weight", f"{ours}_gate_up.weight", *wide, part="moe", each=each),
        Row(f"{prefix}.up_proj.weight", f"{ours}_gate_up.weight", *wide, part="moe", each=each),
        Row(
            f"{prefix}.down_proj.weight",
            f"{ours}_down.weight",
            ("hidden", inner),
            inner,
            "down_proj",
            part="moe",
            each=each,
        ),
    )


TENSORS = Table(
    before=(Row(_EMBEDDING, "embed.weight", ("vocab", "hidden")),),
    layers="model.layers",
    layer=(
        Row(_ATTN_NORM, "attn_norm.weight", ("hidden",)),
        Row(
            "attention.query_key_value.weight",
            "qkv.weight",
            ("qkv_heads", "hidden"),
            "qkv_heads",
            "qkv_proj",
            _ATTN_NORM,
        ),
        Row("attention.query_layernorm.weight", "q_norm.weight", ("head_dim",)),
        Row("attention.key_layernorm.weight", "k_norm.weight", ("head_dim",)),
        Row("attention.dense.weight", "o.weight", ("hidden", "heads"), "heads", "o_proj"),
        Row(_MLP_NORM, "mlp_norm.weight", ("hidden",)),
        Row(
            "mlp.gate_proj.weight",
            "gate_up.weight",
            ("inner", "hidden"),
            "inner",
            "gate_up_proj",
            _MLP_NORM,
            part="dense",
        ),
        Row(_UP, "gate_up.weight", ("inner", "hidden"), "inner", "gate_up_proj", _MLP_NORM, part="dense"),
        Row("mlp.down_proj.weight", "down.weight", ("hidden", "inner"), "inner", "down_proj", _UP, part="dense"),
        Row("mlp.gate.weight", "router.weight", ("experts", "hidden"), part="moe", is_float32=True),
        Row("mlp.gate.expert_bias", "router.bias", ("experts",), part="moe", is_float32=True),
        *_mlp("mlp.experts.{}", "experts", "expert_inner", each=True),
        *_mlp("mlp.shared_experts", "shared", "shared_inner"),
    ),
    after=(
        Row("model.norm.weight", "norm.weight", ("hidden",)),
        Row("lm_head.weight", "head.weight", ("vocab", "hidden"), "vocab", HEAD, tied_to=_EMBEDDING),
    ),
)
"""The tensors of a checkpoint, and how the decoder has them."""


class Llada2(Decoder):
    """See ``decoder.py``."""

    architecture: ClassVar = Architecture("llada2_moe", TENSORS.tensors, FAMILIES["llada2_moe"])
    properties: ClassVar = FAMILIES["llada2_moe"].properties
