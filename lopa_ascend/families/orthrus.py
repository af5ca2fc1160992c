"""Orthrus-Qwen3 (1.7B, 4B, 8B): a Qwen3 with a second set of attention weights, which only draft."""

from __future__ import annotations

from dataclasses import replace

from lopa_ascend.families import sdar
from lopa_ascend.families.family import Family
from lopa_ascend.families.table import DRAFTS, Row
from lopa_ascend.types import ModelProperties


def _drafting() -> tuple[Row, ...]:
    """The second weights of attention, beside those of the same shapes without "diff"."""
    found = []
    for row in sdar.TABLE.layer:
        module, dot, kind = row.name.rpartition(".")
        if module.startswith("self_attn."):
            name, _, ours_kind = row.ours.rpartition(".")
            found.append(replace(row, name=f"{module}_diff.{kind}", ours=f"{name}{DRAFTS}.{ours_kind}"))
    return tuple(found)


FAMILY = Family(
    model_type="orthrus",
    checkpoints=("Orthrus",),
    table=replace(sdar.TABLE, layer=(*sdar.TABLE.layer, *_drafting())),
    properties=ModelProperties(logit_shift=1, attention="causal", fills_blocks=False),
    defaults={"attention_bias": False, "block_size": 32},
    recommended={"decoding": "ar"},
    source="src/model.py of Orthrus",
)
