"""Nemotron-Labs-Diffusion (3B, 8B, 14B): the network of Ministral 3, in a causal view and in blocks."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from lopa_ascend.config import ModelConfig, YarnConfig
from lopa_ascend.config.files import Fields
from lopa_ascend.families import dream
from lopa_ascend.families.family import Family, shape
from lopa_ascend.families.table import HEAD, Row
from lopa_ascend.types import ModelProperties

_EMBEDDING = "encoder.embed_tokens.weight"
TABLE = replace(
    dream.TABLE,
    before=(Row(_EMBEDDING, "embed.weight", ("vocab", "hidden")),),
    layers="encoder.layers",
    after=(
        Row("encoder.norm.weight", "norm.weight", ("hidden",)),
        Row("diffusion_head.weight", "head.weight", ("vocab", "hidden"), linear=HEAD, tied_to=_EMBEDDING),
    ),
)
_YARN = ("beta_fast", "beta_slow", "factor", "mscale", "mscale_all_dim", "original_max_position_embeddings")


def _complete(fields: Fields, config: ModelConfig) -> ModelConfig:
    parameters = fields.get("rope_parameters", {})
    if fields.get("rope_scaling", parameters) != parameters:  # transformers writes both, or the former alone
        raise fields.error("rope_scaling", "the same as rope_parameters, or none")
    rope = Fields(
        parameters, f"{fields.source}: rope_parameters", {} if "rope_type" in parameters else {"rope_type": "type"}
    )
    if not rope.has("rope_theta") and not fields.has("rope_theta") or config.rope_theta <= 1:
        raise rope.error("rope_theta", "a number above 1")
    rope.expect("rope_type", ("yarn", "default"), default="default")
    if rope.get("rope_type", "default") == "default":
        return config
    factor = rope.number("factor", 0.0, at_least=1.0)

    def magnitude(name: str) -> float:
        return 0.1 * rope.number(name, 1.0) * math.log(factor) + 1

    both = rope.has("mscale") and rope.has("mscale_all_dim")
    implied = magnitude("mscale") / magnitude("mscale_all_dim") if both else magnitude("mscale")
    yarn = YarnConfig(
        factor=factor,
        original=rope.integer("original_max_position_embeddings", 2**22),
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        attention_factor=rope.number("attention_factor", implied),
        query_beta=rope.number("llama_4_scaling_beta", 0.0) if rope.has("llama_4_scaling_beta") else 0.0,
    )
    return replace(config, yarn=yarn)


def _rope(theta: float) -> dict[str, Any]:
    """As in the published checkpoints."""
    yarn = {"factor": 16.0, "original_max_position_embeddings": 16384, "beta_fast": 32.0, "beta_slow": 1.0}
    scale = {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
    return {"rope_type": "yarn", "rope_theta": theta, **yarn, **scale}


FAMILY = Family(
    model_type="nemotron_labs_diffusion",
    checkpoints=("Nemotron-Labs-Diffusion",),
    table=TABLE,
    properties=ModelProperties(logit_shift=0, attention="causal"),
    defaults={"attention_bias": False, "block_size": 32, "mask_token_id": 100, "rms_norm_eps": 1e-5},
    only={
        "attention_bias": (False, None),
        "dlm_paradigm": ("bidirectional", "autoregressive", None),
        "sliding_window": (None,),
    },
    unused=frozenset({"ar_loss_weight", "dlm_loss_weight", "dp_varying_mask_ratio", "rope_scaling"}),
    own_rope=frozenset({*_YARN, "attention_factor", "llama_4_scaling_beta"}),
    draft_adapter="linear_spec_lora",
    complete=_complete,
    recommended={"decoding": "linear_spec"},
    source="the card of Nemotron-Labs-Diffusion",
    sizes={
        "3B": shape(3072, 9216, 26, 32, 8, rope_parameters=_rope(1e6)),
        "8B": shape(4096, 14336, 34, 32, 8, rope_parameters=_rope(1e6)),
        "14B": shape(5120, 16384, 40, 32, 8, rope_parameters=_rope(1e9)),
    },
    published={
        "architectures": ["NemotronLabsDiffusionModel"],
        "block_size": 32,
        "dlm_paradigm": "bidirectional",
        "eos_token_id": 11,
        "head_dim": 128,
        "mask_token_id": 100,
        "max_position_embeddings": 262144,
        "rope_theta": None,
        "vocab_size": 131072,
    },
)
AUTOREGRESSIVE = replace(
    FAMILY,
    name="nemotron_labs_diffusion_ar",
    claims=lambda config: config.get("dlm_paradigm") == "autoregressive",
    properties=replace(FAMILY.properties, fills_blocks=False, drafts_blocks=False),
    recommended={"decoding": "ar"},
    sizes={},
)
"""One that was not trained to fill blocks, or to draft them."""
