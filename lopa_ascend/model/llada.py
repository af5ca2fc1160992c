"""LLaDA-8B and LLaDA-1.5: a network like LLaMA's, whose tensors have names of their own."""

from __future__ import annotations

from typing import ClassVar

from lopa_ascend.checkpoint import HEAD, Architecture, Row, Table
from lopa_ascend.config.families import FAMILIES
from lopa_ascend.model.decoder import Decoder

_EMBEDDING, _UP = "model.transformer.wte.weight", "up_proj.weight"
_ATTN_NORM, _MLP_NORM = "attn_norm.weight", "ff_norm.weight"
TENSORS = Table(
    before=(Row(_EMBEDDING, "embed.weight", ("vocab", "hidden")),),
    layers="model.transformer.blocks",
    layer=(
        Row(_ATTN_NORM, "attn_norm.weight", ("hidden",)),
        Row("q_proj.weight", "qkv.weight", ("heads", "hidden"), "heads", "qkv_proj", _ATTN_NORM),
        Row("k_proj.weight", "qkv.weight", ("kv_heads", "hidden"), "kv_heads", "qkv_proj", _ATTN_NORM),
        Row("v_proj.weight", "qkv.weight", ("kv_heads", "hidden"), "kv_heads", "qkv_proj", _ATTN_NORM),
        Row("attn_out.weight", "o.weight", ("hidden", "heads"), "heads", "o_proj"),
        Row(_MLP_NORM, "mlp_norm.weight", ("hidden",)),
        Row("ff_proj.weight", "gate_up.weight", ("inner", "hidden"), "inner", "gate_up_proj", _MLP_NORM),
        Row(_UP, "gate_up.weight", ("inner", "hidden"), "inner", "gate_up_proj", _MLP_NORM),
        Row("ff_out.weight", "down.weight", ("hidden", "inner"), "inner", "down_proj", _UP),
    ),
    after=(
        Row("model.transformer.ln_f.weight", "norm.weight", ("hidden",)),
        Row("model.transformer.ff_out.weight", "head.weight", ("vocab", "hidden"), "vocab", HEAD, tied_to=_EMBEDDING),
    ),
)
"""The tensors of a checkpoint, and how the decoder has them."""


class Llada(Decoder):
    """See ``decoder.py``."""

    architecture: ClassVar = Architecture("llada", TENSORS.tensors, FAMILIES["llada"])
    properties: ClassVar = FAMILIES["llada"].properties
