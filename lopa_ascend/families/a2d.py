"""Tiny-A2D: Qwen3 and Qwen2 without the causal mask. One network, trained to be decoded in one of two ways.

"mdlm" sees a whole canvas. "bd3lm" sees blocks, on a grid from the prompt's end. Only a checkpoint's name says which it
is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lopa_ascend.config import ConfigError
from lopa_ascend.families import dream, sdar
from lopa_ascend.families.family import Family
from lopa_ascend.types import ModelProperties

_MDLM = ModelProperties(logit_shift=0, attention="full", fills_as_llada=True, schedule="linear")
_BD3LM = ModelProperties(logit_shift=0, attention="block_causal", grid="prompt", ends_on_grid=False, schedule="linear")
_SOURCE = "the samplers of dLLM"


def _named(way: str) -> Callable[[Mapping[str, Any]], bool]:
    def claims(config: Mapping[str, Any]) -> bool:
        name = str(config.get("_name_or_path", ""))
        if "mdlm" not in name and "bd3lm" not in name:
            raise ConfigError(
                f"{name.strip()}: config.json does not say how a Tiny-A2D model decodes; name the directory so that it "
                "contains mdlm or bd3lm, as its published name does"
            )
        return way in name

    return claims


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
    )


FAMILIES = tuple(_family(network, way) for network in ("qwen3", "qwen2") for way in ("mdlm", "bd3lm"))
