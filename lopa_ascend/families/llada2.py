"""LLaDA2.0 and 2.1 (mini, flash): mixtures of experts behind the first layers, and heads that are rotated in part."""

from __future__ import annotations

from dataclasses import replace

from lopa_ascend.config import ConfigError, ExpertsConfig, ModelConfig
from lopa_ascend.config.files import Fields
from lopa_ascend.families.family import Family, shape
from lopa_ascend.families.table import HEAD, Row, Table
from lopa_ascend.types import ModelProperties

_EMBEDDING, _GATE, _UP = "model.word_embeddings.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight"
_ATTN_NORM, _MLP_NORM = "input_layernorm.weight", "post_attention_layernorm.weight"
_QKV, _QKV_SHAPE = "attention.query_key_value.weight", ("qkv_heads", "hidden")
_WIDE = ("inner", "hidden")


def _mlp(prefix: str, ours: str, inner: str, each: bool = False) -> tuple[Row, ...]:
    """The MLPs of a layer with experts. The router reads their inputs too, so they have no ``source``."""
    gate_up, wide, narrow = f"{ours}_gate_up.weight", (inner, "hidden"), ("hidden", inner)
    return (
        Row(f"{prefix}.gate_proj.weight", gate_up, wide, linear="gate_up_proj", part="moe", each=each),
        Row(f"{prefix}.up_proj.weight", gate_up, wide, linear="gate_up_proj", part="moe", each=each),
        Row(f"{prefix}.down_proj.weight", f"{ours}_down.weight", narrow, linear="down_proj", part="moe", each=each),
    )


TABLE = Table(
    before=(Row(_EMBEDDING, "embed.weight", ("vocab", "hidden")),),
    layers="model.layers",
    layer=(
        Row(_ATTN_NORM, "attn_norm.weight", ("hidden",)),
        Row(_QKV, "qkv.weight", _QKV_SHAPE, linear="qkv_proj", source=_ATTN_NORM),
        Row("attention.query_layernorm.weight", "q_norm.weight", ("head_dim",)),
        Row("attention.key_layernorm.weight", "k_norm.weight", ("head_dim",)),
        Row("attention.dense.weight", "o.weight", ("hidden", "heads"), linear="o_proj"),
        Row(_MLP_NORM, "mlp_norm.weight", ("hidden",)),
        Row(_GATE, "gate_up.weight", _WIDE, linear="gate_up_proj", source=_MLP_NORM, part="dense"),
        Row(_UP, "gate_up.weight", _WIDE, linear="gate_up_proj", source=_MLP_NORM, part="dense"),
        Row("mlp.down_proj.weight", "down.weight", ("hidden", "inner"), linear="down_proj", source=_UP, part="dense"),
        Row("mlp.gate.weight", "router.weight", ("experts", "hidden"), part="moe", is_float32=True),
        Row("mlp.gate.expert_bias", "router.bias", ("experts",), part="moe", is_float32=True),
        *_mlp("mlp.experts.{}", "experts", "expert_inner", each=True),
        *_mlp("mlp.shared_experts", "shared", "shared_inner"),
    ),
    after=(
        Row("model.norm.weight", "norm.weight", ("hidden",)),
        Row("lm_head.weight", "head.weight", ("vocab", "hidden"), linear=HEAD, tied_to=_EMBEDDING),
    ),
)


def _complete(fields: Fields, config: ModelConfig) -> ModelConfig:
    rotary_dim = _rotary_dim(fields, config.head_dim)
    return replace(config, rotary_dim=rotary_dim, experts=_experts(fields, config.num_layers))


def _experts(fields: Fields, num_layers: int) -> ExpertsConfig:
    """Raises ConfigError if a field is missing, malformed, or does not go with another one."""
    if fields.has("expert_capacity"):
        capacity = fields.get("expert_capacity")
        raise ConfigError(
            f"{fields.source}: expert_capacity is {capacity}, expected no such field: LLaDA2.2 routes blocks, "
            "and its decoding inserts and deletes tokens, so positions would move under keys and values that are "
            "final; LLaDA2.0 and 2.1 are supported"
        )
    num_experts, groups = fields.integer("num_experts", 2**12), fields.integer("n_group", 2**12, default=1)
    kept = fields.integer("topk_group", 2**12, default=groups)
    if num_experts % groups or num_experts // groups < 2:
        raise fields.error("n_group", f"a number that divides num_experts {num_experts} into groups of at least 2")
    if kept > groups:
        raise fields.error("topk_group", f"at most n_group {groups}")
    per_token, choice = fields.integer("num_experts_per_tok", 2**12), kept * (num_experts // groups)
    if per_token > choice:
        kept_by = f"the {choice} of {num_experts} experts that {kept} of {groups} groups have"
        raise fields.error("num_experts_per_tok", f"at most {kept_by}")
    first = fields.get("first_k_dense_replace", 0)
    if isinstance(first, bool) or not isinstance(first, int) or not 0 <= first < num_layers:
        raise fields.error("first_k_dense_replace", f"a number below num_hidden_layers {num_layers}")
    inner = fields.integer("moe_intermediate_size", 2**22)
    return ExpertsConfig(
        num_experts=num_experts,
        per_token=per_token,
        num_groups=groups,
        kept_groups=kept,
        scale=fields.number("routed_scaling_factor", 1.0),
        inner=inner,
        shared_inner=inner * fields.integer("num_shared_experts", 2**10),
        first_layer=first,
    )


def _rotary_dim(fields: Fields, head_dim: int) -> int:
    """The first elements of a head are rotated, as many as ``partial_rotary_factor`` or else ``rotary_dim`` says.
    Raises ConfigError if the two contradict each other, or the number is odd or larger than a head."""
    named = fields.integer("rotary_dim", 2**14, default=head_dim)
    factor = fields.number("partial_rotary_factor", named / head_dim, at_most=1.0)
    found = int(head_dim * factor)
    if found % 2 or not found:
        raise fields.error("partial_rotary_factor", f"a share of head_dim {head_dim} that is an even number")
    if fields.has("rotary_dim") and named != found:
        raise fields.error("rotary_dim", f"{found}, which is head_dim {head_dim} x partial_rotary_factor {factor:g}")
    return found


FAMILY = Family(
    model_type="llada2_moe",
    checkpoints=("LLaDA2.0", "LLaDA2.1"),
    table=TABLE,
    properties=ModelProperties(logit_shift=0, attention="block_causal"),
    defaults={"attention_bias": False, "block_size": 32, "mask_token_id": 156895},
    only={
        "attention_bias": (False, None),
        "score_function": ("sigmoid", None),
        "moe_router_enable_expert_bias": (True, None),
        "norm_topk_prob": (True, None),
        "router_dtype": ("fp32", None),
        "use_qk_norm": (True, None),
        "use_qkv_bias": (False, None),
        "use_bias": (False, None),
        "use_rmsnorm": (True, None),
        "norm_head": (False, None),
        "norm_softmax": (False, None),
        "using_split_qkv_in_self_attention": (False, None),
    },
    unused=frozenset({"embedding_dropout", "output_dropout", "output_router_logits", "partial_rotary_factor"}),
    complete=_complete,
    end_tokens=("<|endoftext|>", "<|role_end|>"),
    recommended={"decoding": "d2f", "tau_add": 1.0, "tau_conf": 0.95},
    source="the card of LLaDA2.0-mini",
    sizes={"16B": shape(2048, 5120, 20, 16, 4)},
    published={
        "architectures": ["LLaDA2MoeModelLM"],
        "eos_token_id": 156892,
        "first_k_dense_replace": 1,
        "head_dim": 128,
        "mask_token_id": 156895,
        "max_position_embeddings": 16384,
        "moe_intermediate_size": 512,
        "n_group": 8,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "num_shared_experts": 1,
        "partial_rotary_factor": 0.5,
        "rope_theta": 600000.0,
        "routed_scaling_factor": 2.5,
        "score_function": "sigmoid",
        "topk_group": 4,
        "vocab_size": 157184,
    },
)
