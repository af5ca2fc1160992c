"""What in a model directory says that linear layers are int8, in the two formats that are read.

``checkpoint/int8_formats.py`` reads the descriptions themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CONFIG_FIELD = "quantization_config"
"""The field of config.json that describes int8 layers in the format compressed-tensors."""
COMPRESSED_TENSORS = "compressed-tensors"
"""The name of the format in that field."""
MODELSLIM = "ModelSlim"
DESCRIPTION = "quant_model_description.json"
"""The file that describes each tensor in the format ModelSlim."""
MODELSLIM_WEIGHTS = "quant_model_weight*.safetensors"
"""The weights of a ModelSlim checkpoint, whose names differ from version to version."""


def uses_compressed_tensors(raw: Mapping[str, Any]) -> bool:
    """Whether a config.json has int8 layers in the format compressed-tensors."""
    value = raw.get(CONFIG_FIELD)
    return isinstance(value, dict) and value.get("quant_method") == COMPRESSED_TENSORS
