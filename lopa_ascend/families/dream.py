"""Dream, which has the tensors of Qwen2: Dream-7B, Dream-Coder-7B, DiffuCoder-7B."""

from __future__ import annotations

from lopa_ascend.families.family import Family, shape
from lopa_ascend.families.table import HEAD, Row, Table
from lopa_ascend.types import DREAM

_EMBEDDING, _UP = "model.embed_tokens.weight", "mlp.up_proj.weight"
_ATTN_NORM, _MLP_NORM = "input_layernorm.weight", "post_attention_layernorm.weight"
TABLE = Table(
    before=(Row(_EMBEDDING, "embed.weight", ("vocab", "hidden")),),
    layers="model.layers",
    layer=(
        Row(_ATTN_NORM, "attn_norm.weight", ("hidden",)),
        Row("self_attn.q_proj.weight", "qkv.weight", ("heads", "hidden"), linear="qkv_proj", source=_ATTN_NORM),
        Row("self_attn.k_proj.weight", "qkv.weight", ("kv_heads", "hidden"), linear="qkv_proj", source=_ATTN_NORM),
        Row("self_attn.v_proj.weight", "qkv.weight", ("kv_heads", "hidden"), linear="qkv_proj", source=_ATTN_NORM),
        Row("self_attn.q_proj.bias", "qkv.bias", ("heads",), flag="attention_bias"),
        Row("self_attn.k_proj.bias", "qkv.bias", ("kv_heads",), flag="attention_bias"),
        Row("self_attn.v_proj.bias", "qkv.bias", ("kv_heads",), flag="attention_bias"),
        # No source: its input is left as it is: an average of values, in which outliers are rare.
        Row("self_attn.o_proj.weight", "o.weight", ("hidden", "heads"), linear="o_proj"),
        Row(_MLP_NORM, "mlp_norm.weight", ("hidden",)),
        Row("mlp.gate_proj.weight", "gate_up.weight", ("inner", "hidden"), linear="gate_up_proj", source=_MLP_NORM),
        Row(_UP, "gate_up.weight", ("inner", "hidden"), linear="gate_up_proj", source=_MLP_NORM),
        Row("mlp.down_proj.weight", "down.weight", ("hidden", "inner"), linear="down_proj", source=_UP),
    ),
    after=(
        Row("model.norm.weight", "norm.weight", ("hidden",)),
        Row("lm_head.weight", "head.weight", ("vocab", "hidden"), linear=HEAD, tied_to=_EMBEDDING),
    ),
)
FAMILY = Family(
    model_type="Dream",
    checkpoints=("Dream-v0", "Dream-Coder", "DiffuCoder", "DreamOn"),
    table=TABLE,
    properties=DREAM,
    sizes={"7B": shape(3584, 18944, 28, 28, 4)},
    published={
        "architectures": ["DreamModel"],
        "eos_token_id": 151643,
        "mask_token_id": 151666,
        "max_position_embeddings": 131072,
        "vocab_size": 152064,
    },
)
