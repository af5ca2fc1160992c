"""Stable-DiffCoder-8B: a LLaMA without biases, in blocks of 4 on a grid from position 0."""

from __future__ import annotations

from lopa_ascend.families import dream
from lopa_ascend.families.family import Family, shape
from lopa_ascend.types import ModelProperties

FAMILY = Family(
    model_type="llama",
    name="stable_diffcoder",
    architectures=("StableDiffcoderForCausalLM", "SeedDiffcoderForCausalLM"),
    checkpoints=("Stable-DiffCoder",),
    table=dream.TABLE,
    properties=ModelProperties(logit_shift=0, attention="block_causal", ends_on_grid=False, schedule="masks"),
    defaults={"attention_bias": False, "block_size": 4, "mask_token_id": 5},
    only={"attention_bias": (False, None), "sliding_window": (None,)},
    unused=frozenset({"layer_norm_eps"}),
    recommended={"decoding": "d2f", "tau_add": 1.0, "tau_conf": 0.95},
    source="the modelling file of Stable-DiffCoder",
    sizes={"8B": shape(4096, 14336, 32, 32, 8, head_dim=128)},
    published={
        "architectures": ["StableDiffcoderForCausalLM"],
        "attention_bias": False,
        "eos_token_id": 2,
        "max_position_embeddings": 8192,
        "rope_theta": 500000.0,
        "vocab_size": 155136,
    },
)
