"""DreamReasoner-8B, which is SDAR's network with the ``model_type`` of Dream."""

from __future__ import annotations

from lopa_ascend.families import sdar
from lopa_ascend.families.family import Family

FAMILY = Family(
    model_type="Dream",
    name="DreamReasoner",
    claims=lambda config: config.get("block_size") is not None,
    checkpoints=("DreamReasoner",),
    table=sdar.TABLE,
    properties=sdar.FAMILY.properties,
    defaults={"attention_bias": False, "mask_token_id": 151669},
    unused=sdar.FAMILY.unused,
    recommended={"decoding": "d2f", "tau_add": 1.0, "tau_conf": 0.9},
    source="the card of DreamReasoner-8B",
)
