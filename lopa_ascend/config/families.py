"""The families of models that are written in fused ops: what their ``config.json`` leaves out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lopa_ascend.config import experts
from lopa_ascend.config.files import ConfigError, read_json_object
from lopa_ascend.types import DREAM, ModelProperties


@dataclass(frozen=True, kw_only=True)
class Family:
    """What the ``config.json`` of a family means. ``model/`` has its tensors, in a file of the same name."""

    model_type: str
    """As ``config.json`` names it."""
    checkpoints: tuple[str, ...]
    """What the names of its published checkpoints begin with."""
    properties: ModelProperties = DREAM
    block_field: str | None = None
    """The field with the length of the blocks that the model was trained with; None: it was trained without blocks."""
    block_size: int | None = None
    """The length of the blocks if that field is missing; None: the field must be there."""
    mask_token_id: int | None = None
    """The mask's id if ``config.json`` has none; None: it must have one."""
    attention_bias: bool = True
    """Whether there are biases if ``config.json`` does not say it."""
    rms_norm_eps: float = 1e-6
    """The norms' epsilon if ``config.json`` has none."""
    end_tokens: tuple[str, ...] = ()
    """Special tokens of the tokenizer that end an answer and that no file names as such."""
    names: Mapping[str, str] = field(default_factory=dict, hash=False)
    """What its ``config.json`` calls the fields of Qwen2, if it has names of its own."""
    only: Mapping[str, tuple[object, ...]] = field(default_factory=dict, hash=False)
    """Fields of its own that change the computation, with the values that can be computed. None is a missing field."""
    unused: frozenset[str] = frozenset()
    """Fields of its own that change nothing here, or that say what others do."""
    has_experts: bool = False
    """Layers are mixtures of experts, and heads may be rotated in part; see ``config/experts.py``."""
    recommended: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Decoding parameters that the authors recommend, beside the block size if ``block_field`` has it."""
    source: str = ""
    """Where they recommend them."""


_OWN = ModelProperties(logit_shift=0, attention="block_causal")
"""The logits of a position predict itself."""
_NEXT = ModelProperties(logit_shift=1, attention="block_causal")
"""They predict the next position."""

FAMILIES = {
    "Dream": Family(model_type="Dream", checkpoints=("Dream-v0", "Dream-Coder", "DiffuCoder", "DreamOn")),
    "DreamReasoner": Family(
        model_type="Dream",
        checkpoints=("DreamReasoner",),
        properties=_OWN,
        block_field="block_size",
        mask_token_id=151669,
        attention_bias=False,
        recommended={"decoding": "d2f", "tau_add": 1.0, "tau_conf": 0.9},
        source="the card of DreamReasoner-8B",
    ),
    "Fast_dLLM_Qwen": Family(
        model_type="Fast_dLLM_Qwen",
        checkpoints=("Fast_dLLM_v2",),
        properties=_NEXT,
        block_field="bd_size",
        block_size=32,
        mask_token_id=151665,
        recommended={"decoding": "fast_dllm_v2", "tau_conf": 0.9},
        source="run_chatbot.py of Fast-dLLM v2",
    ),
    "llada": Family(
        model_type="llada",
        checkpoints=("LLaDA-8B", "LLaDA-1.5"),
        properties=ModelProperties(logit_shift=0, attention="full", fills_as_llada=True),
        mask_token_id=126336,
        attention_bias=False,
        rms_norm_eps=1e-5,
        end_tokens=("<|eot_id|>",),
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
                *("mlp_ratio", "multi_query_attention", "residual_dropout", "rope_full_precision"),
            }
        ),
        recommended={"decoding": "parallel", "block_size": 32, "tau_conf": 1.0},
        source="chat.py of LLaDA",
    ),
    "llada2_moe": Family(
        model_type="llada2_moe",
        checkpoints=("LLaDA2.0", "LLaDA2.1"),
        properties=_OWN,
        block_field="block_size",
        block_size=32,
        mask_token_id=156895,
        attention_bias=False,
        end_tokens=("<|endoftext|>", "<|role_end|>"),
        only=experts.ONLY,
        unused=frozenset({*experts.SIZES, "embedding_dropout", "output_router_logits"}),
        has_experts=True,
        recommended={"decoding": "d2f", "tau_add": 1.0, "tau_conf": 0.95},
        source="the card of LLaDA2.0-mini",
    ),
    "sdar": Family(
        model_type="sdar",
        checkpoints=("SDAR", "TraDo"),
        properties=_OWN,
        block_field="block_size",
        block_size=4,
        mask_token_id=151669,
        attention_bias=False,
        recommended={"decoding": "d2f", "tau_add": 1.0, "tau_conf": 0.85},
        source="generate.py of SDAR",
    ),
}
"""By name of the architecture (``model/registry.py``, FUSED)."""


def architecture_name(config: Mapping[str, Any]) -> object:
    """The name of the architecture that a ``config.json`` describes: its ``model_type``, unless two architectures have
    that. DreamReasoner calls itself Dream, and alone of the two says how long its blocks are."""
    name = config.get("model_type")
    return "DreamReasoner" if name == "Dream" and config.get("block_size") is not None else name


def family_of(model: str | Path) -> Family | None:
    """The family of a model directory; None if it is none of these, or does not exist.

    Raises:
        ConfigError: ``config.json`` is broken.
    """
    name = architecture_name(read_json_object(Path(model) / "config.json", ConfigError, optional=True))
    return FAMILIES.get(name) if isinstance(name, str) else None


def family_of_checkpoint(name: str) -> str | None:
    """The family of the checkpoint with a name such as "JetLM/SDAR-8B-Chat"; None if the name does not tell it."""
    last = name.rstrip("/").rpartition("/")[2]
    return next((key for key, family in FAMILIES.items() if last.startswith(family.checkpoints)), None)
