"""openPangu-R-7B-Diffusion and NBDiff-7B: LLaMA with biases, in a causal view and in blocks with shifted logits."""

from __future__ import annotations

from dataclasses import replace

from lopa_ascend.families import dream
from lopa_ascend.families.family import Family, shape
from lopa_ascend.families.table import Row
from lopa_ascend.types import ModelProperties

FAMILY = Family(
    model_type="PanguEmbedded",
    checkpoints=("openPangu-R-7B-Diffusion", "openPangu-7B-Diffusion", "NBDiff"),
    table=replace(
        dream.TABLE,
        layer=(
            *dream.TABLE.layer,
            Row("self_attn.o_proj.bias", "o.bias", ("hidden",), flag="attention_bias", is_summed=True),
        ),
    ),
    properties=ModelProperties(logit_shift=1, attention="causal"),
    names={"attention_bias": "bias"},
    only={"sliding_window": (None,)},
    defaults={"attention_bias": True, "block_size": 32, "mask_token_id": 45830, "rms_norm_eps": 1e-5},
    recommended={"decoding": "causal_blocks", "tau_conf": 0.9, "sub_block_size": 8},
    source="the card of openPangu-R-7B-Diffusion",
    sizes={"7B": shape(4096, 12800, 34, 32, 8)},
    published={
        "architectures": ["PanguEmbeddedForCausalLM"],
        "bias": True,
        "eos_token_id": 45892,
        "max_position_embeddings": 32768,
        "rope_theta": 16000000.0,
        "vocab_size": 153376,
    },
)
