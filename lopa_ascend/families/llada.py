"""LLaDA-8B and LLaDA-1.5: a network like LLaMA's, whose tensors and fields have names of their own."""

from __future__ import annotations

from lopa_ascend.config.files import Fields
from lopa_ascend.families.family import Family, shape
from lopa_ascend.families.table import HEAD, Row, Table
from lopa_ascend.types import ModelProperties

_EMBEDDING, _UP = "model.transformer.wte.weight", "up_proj.weight"
_ATTN_NORM, _MLP_NORM = "attn_norm.weight", "ff_norm.weight"
TABLE = Table(
    before=(Row(_EMBEDDING, "embed.weight", ("vocab", "hidden")),),
    layers="model.transformer.blocks",
    layer=(
        Row(_ATTN_NORM, "attn_norm.weight", ("hidden",)),
        Row("q_proj.weight", "qkv.weight", ("heads", "hidden"), linear="qkv_proj", source=_ATTN_NORM),
        Row("k_proj.weight", "qkv.weight", ("kv_heads", "hidden"), linear="qkv_proj", source=_ATTN_NORM),
        Row("v_proj.weight", "qkv.weight", ("kv_heads", "hidden"), linear="qkv_proj", source=_ATTN_NORM),
        Row("attn_out.weight", "o.weight", ("hidden", "heads"), linear="o_proj"),
        Row(_MLP_NORM, "mlp_norm.weight", ("hidden",)),
        Row("ff_proj.weight", "gate_up.weight", ("inner", "hidden"), linear="gate_up_proj", source=_MLP_NORM),
        Row(_UP, "gate_up.weight", ("inner", "hidden"), linear="gate_up_proj", source=_MLP_NORM),
        Row("ff_out.weight", "down.weight", ("hidden", "inner"), linear="down_proj", source=_UP),
    ),
    after=(
        Row("model.transformer.ln_f.weight", "norm.weight", ("hidden",)),
        Row("model.transformer.ff_out.weight", "head.weight", ("vocab", "hidden"), linear=HEAD, tied_to=_EMBEDDING),
    ),
)


def _implied(fields: Fields) -> dict[str, object]:
    """The sizes that other fields say, as in a ``config.json`` of OLMo."""
    heads, vocab = fields.integer("n_heads", 2**14), fields.integer("vocab_size", 2**24)
    rows = fields.integer("embedding_size", 2**24, default=vocab)
    if rows < vocab:
        raise fields.error("embedding_size", f"at least vocab_size {vocab}")
    inner = fields.integer("mlp_ratio", 2**10, default=4) * fields.integer("d_model", 2**20)
    kv_heads = 1 if fields.flag("multi_query_attention", False) else heads
    return {"embedding_size": vocab, "mlp_hidden_size": inner, "n_kv_heads": kv_heads}


FAMILY = Family(
    model_type="llada",
    checkpoints=("LLaDA-8B", "LLaDA-1.5"),
    table=TABLE,
    properties=ModelProperties(logit_shift=0, attention="full", fills_as_llada=True),
    names={
        "hidden_act": "activation_type",
        "hidden_size": "d_model",
        "intermediate_size": "mlp_hidden_size",
        "max_position_embeddings": "max_sequence_length",
        "num_attention_heads": "n_heads",
        "num_hidden_layers": "n_layers",
        "num_key_value_heads": "n_kv_heads",
        "tie_word_embeddings": "weight_tying",
        "vocab_size": "embedding_size",
    },
    defaults={"attention_bias": False, "mask_token_id": 126336, "rms_norm_eps": 1e-5},
    implied=_implied,
    only={
        "activation_type": ("silu",),
        "alibi": (False, None),
        "attention_layer_norm": (False, None),
        "bias_for_layer_norm": (False, None),
        "block_group_size": (1, None),
        "block_type": ("llama",),
        "include_bias": (False, None),
        "include_qkv_bias": (False, None),
        "input_emb_norm": (False, None),
        "layer_norm_type": ("rms",),
        "layer_norm_with_affine": (True, None),
        "rope": (True,),
        "scale_logits": (False, None),
        "weight_tying": (False, True),
    },
    unused=frozenset(
        {
            *("alibi_bias_max", "attention_layer_norm_with_affine", "embedding_dropout", "flash_attention"),
            *("init_cutoff_factor", "init_device", "init_fn", "init_std", "precision"),
            *("residual_dropout", "rope_full_precision"),
        }
    ),
    end_tokens=("<|eot_id|>",),
    recommended={"decoding": "parallel", "block_size": 32, "tau_conf": 1.0},
    source="chat.py of LLaDA",
    sizes={"8B": shape(4096, 12288, 32, 32, 32)},
    published={
        "architectures": ["LLaDAModelLM"],
        "block_type": "llama",
        "embedding_size": 126464,
        "eos_token_id": 126081,
        "layer_norm_type": "rms",
        "mask_token_id": 126336,
        "max_sequence_length": 4096,
        "rope": True,
        "rope_theta": 500000.0,
        "vocab_size": 126464,
    },
)
