"""Orthrus-Qwen3 (1.7B, 4B, 8B): a Qwen3 with a second set of attention weights, which only draft."""

from __future__ import annotations

from dataclasses import replace

from lopa_ascend.families import sdar
from lopa_ascend.families.family import Family, shape
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
    recommended={"decoding": "linear_spec"},
    source="src/model.py of Orthrus",
    sizes={
        "1.7B": shape(2048, 6144, 28, 16, 8, tie_word_embeddings=True),
        "4B": shape(2560, 9728, 36, 32, 8, tie_word_embeddings=True),
        "8B": shape(4096, 12288, 36, 32, 8),
    },
    published={
        "architectures": ["OrthrusLM"],
        "block_size": 32,
        "eos_token_id": 151645,
        "head_dim": 128,
        "mask_token_id": 151669,
        "max_position_embeddings": 40960,
        "vocab_size": 151936,
    },
)
QWEN3 = replace(FAMILY, model_type="qwen3", name="orthrus_qwen3", architectures=("OrthrusLM",), sizes={})
"""The same under the ``model_type`` of its base, as transformers writes it for a configuration of Qwen3."""
