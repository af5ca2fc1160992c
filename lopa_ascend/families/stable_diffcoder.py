"""Stable-DiffCoder-8B: a LLaMA without biases, in blocks of 4 on a grid from position 0."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lopa_ascend.families import dream
from lopa_ascend.families.family import Family
from lopa_ascend.types import ModelProperties


def _is_diffcoder(config: Mapping[str, Any]) -> bool:
    """``model_type`` is that of any LLaMA."""
    return "StableDiffcoderForCausalLM" in (config.get("architectures") or ())


FAMILY = Family(
    model_type="llama",
    name="stable_diffcoder",
    claims=_is_diffcoder,
    checkpoints=("Stable-DiffCoder",),
    table=dream.TABLE,
    properties=ModelProperties(logit_shift=0, attention="block_causal", ends_on_grid=False, schedule="masks"),
    defaults={"attention_bias": False, "block_size": 4, "mask_token_id": 5},
    only={"attention_bias": (False, None)},
    unused=frozenset({"layer_norm_eps"}),
    recommended={"decoding": "d2f", "tau_add": 1.0, "tau_conf": 0.95},
    source="the modelling file of Stable-DiffCoder",
)
