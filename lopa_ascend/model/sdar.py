"""SDAR and TraDo, which have the tensors of Qwen3: norms of queries and keys, and if there are biases one after o."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from lopa_ascend.checkpoint import Architecture, Row
from lopa_ascend.config.families import FAMILIES
from lopa_ascend.model import dream
from lopa_ascend.model.decoder import Decoder

TENSORS = replace(
    dream.TENSORS,
    layer=(
        *dream.TENSORS.layer,
        Row("self_attn.q_norm.weight", "q_norm.weight", ("head_dim",)),
        Row("self_attn.k_norm.weight", "k_norm.weight", ("head_dim",)),
        Row("self_attn.o_proj.bias", "o.bias", ("hidden",), flag="attention_bias"),
    ),
)
"""The tensors of a checkpoint, and how the decoder has them."""


class Sdar(Decoder):
    """See ``decoder.py``."""

    architecture: ClassVar = Architecture("sdar", TENSORS.tensors, FAMILIES["sdar"])
    properties: ClassVar = FAMILIES["sdar"].properties
