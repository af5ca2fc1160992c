"""Tiny-A2D: Qwen3 and Qwen2 without the causal mask. One network, trained to be decoded in one of two ways.

"mdlm" sees a whole canvas. "bd3lm" sees blocks, on a grid from the prompt's end. Only a checkpoint's name says which it
is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from lopa_ascend.config import ConfigError
from lopa_ascend.families import dream, sdar
from lopa_ascend.families.family import Family, shape
from lopa_ascend.types import ModelProperties

_MDLM = ModelProperties(logit_shift=0, attention="full", fills_as_llada=True, schedule="linear")
_BD3LM = ModelProperties(logit_shift=0, attention="block_causal", grid="prompt", ends_on_grid=False, schedule="linear")
_SOURCE = "the samplers of dLLM"


_SIZES = {
    "qwen3": {"0.6B": shape(1024, 3072, 28, 16, 8, head_dim=128, max_position_embeddings=40960)},
    "qwen2": {"0.5B": shape(896, 4864, 24, 14, 2, max_position_embeddings=32768)},
}


def _named(way: str) -> Callable[[Mapping[str, Any]], bool]:
    return lambda config: _way(str(config.get("_name_or_path", ""))) == way


def _way(name: str) -> str:
    """The one that the last telling part of a name says."""
    for part in reversed(re.split(r"[\\/\s]", name.lower())):
        found = [way for way in ("mdlm", "bd3lm") if way in part]
        if len(found) == 1:
            return found[0]
        if found:
            break
    raise ConfigError(
        f"{name.strip()}: config.json does not say how a Tiny-A2D model decodes; give the directory a name with mdlm "
        "or bd3lm in it, as the published ones have"
    )


def _family(network: str, way: str) -> Family:
    is_qwen3, is_mdlm = network == "qwen3", way == "mdlm"
    return Family(
        model_type=f"a2d-{network}",
        name=f"a2d-{network}-{way}",
        claims=_named(way),
        table=sdar.TABLE if is_qwen3 else dream.TABLE,
        properties=_MDLM if is_mdlm else _BD3LM,
        defaults={
            "attention_bias": not is_qwen3,
            "block_size": 32,
            "mask_token_id": 151669 if is_qwen3 else 151665,
        },
        end_tokens=("<|endoftext|>",),
        recommended={"decoding": "parallel", "block_size": 32, "tau_conf": 1.0}
        if is_mdlm
        else {"decoding": "d2f", "tau_add": 1.0, "tau_conf": 1.0},
        source=_SOURCE,
        sizes=_SIZES[network],
        published={
            "architectures": [f"A2D{network.title()}LMHeadModel"],
            "eos_token_id": 151645,
            "tie_word_embeddings": True,
            "vocab_size": 151936,
        },
    )


FAMILIES = tuple(_family(network, way) for network in ("qwen3", "qwen2") for way in ("mdlm", "bd3lm"))
