"""SDAR and TraDo, which have the tensors of Qwen3: norms of queries and keys, and if there are biases one after o."""

from __future__ import annotations

from dataclasses import replace

from lopa_ascend.families import dream
from lopa_ascend.families.family import Family, shape
from lopa_ascend.families.table import Row
from lopa_ascend.types import ModelProperties

TABLE = replace(
    dream.TABLE,
    layer=(
        *dream.TABLE.layer,
        Row("self_attn.q_norm.weight", "q_norm.weight", ("head_dim",)),
        Row("self_attn.k_norm.weight", "k_norm.weight", ("head_dim",)),
        Row("self_attn.o_proj.bias", "o.bias", ("hidden",), flag="attention_bias", is_summed=True),
    ),
)
FAMILY = Family(
    model_type="sdar",
    checkpoints=("SDAR", "TraDo"),
    table=TABLE,
    properties=ModelProperties(logit_shift=0, attention="block_causal"),
    defaults={"attention_bias": False, "block_size": 4, "mask_token_id": 151669},
    unused=frozenset({"debug", "ep_size", "fuse_cross_entropy", "micro_forward", "skip_checkpoint", "use_deepep"}),
    recommended={"decoding": "d2f", "tau_add": 1.0, "tau_conf": 0.85},
    source="generate.py of SDAR",
    sizes={
        "1.7B": shape(2048, 6144, 28, 16, 8, head_dim=128),
        "4B": shape(2560, 9728, 36, 32, 8, head_dim=128),
        "8B": shape(4096, 12288, 36, 32, 8, head_dim=128),
    },
    published={
        "architectures": ["SDARForCausalLM"],
        "block_size": 4,
        "eos_token_id": [151645, 151643],
        "mask_token_id": 151669,
        "max_position_embeddings": 32768,
        "vocab_size": 151936,
    },
)
