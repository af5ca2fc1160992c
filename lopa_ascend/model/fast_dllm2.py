"""Fast-dLLM v2 (1.5B, 7B): the tensors of Qwen2, trained with blocks."""

from __future__ import annotations

from typing import ClassVar

from lopa_ascend.checkpoint import Architecture
from lopa_ascend.config.families import FAMILIES
from lopa_ascend.model.decoder import Decoder
from lopa_ascend.model.dream import TENSORS


class FastDllm2(Decoder):
    """See ``decoder.py``."""

    architecture: ClassVar = Architecture("Fast_dLLM_Qwen", TENSORS.tensors, FAMILIES["Fast_dLLM_Qwen"])
    properties: ClassVar = FAMILIES["Fast_dLLM_Qwen"].properties
