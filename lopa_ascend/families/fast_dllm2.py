"""Fast-dLLM v2 (1.5B, 7B): the tensors of Qwen2, trained with blocks."""

from __future__ import annotations

from lopa_ascend.families import dream
from lopa_ascend.families.family import Family, shape
from lopa_ascend.types import ModelProperties

FAMILY = Family(
    model_type="Fast_dLLM_Qwen",
    checkpoints=("Fast_dLLM_v2",),
    table=dream.TABLE,
    properties=ModelProperties(logit_shift=1, attention="block_causal"),
    names={"block_size": "bd_size"},
    defaults={"block_size": 32, "mask_token_id": 151665},
    recommended={"decoding": "fast_dllm_v2", "tau_conf": 0.9},
    source="run_chatbot.py of Fast-dLLM v2",
    sizes={
        "1.5B": shape(1536, 8960, 28, 12, 2, tie_word_embeddings=True, vocab_size=151936),
        "7B": shape(3584, 18944, 28, 28, 4, vocab_size=152064),
    },
    published={
        "architectures": ["Fast_dLLM_QwenForCausalLM"],
        "bd_size": 32,
        "eos_token_id": 151645,
        "max_position_embeddings": 32768,
    },
)
