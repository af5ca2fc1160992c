"""Finds the description of int8 linear layers in a model directory: compressed-tensors or ModelSlim.

``checkpoint/int8_formats.py`` reads the description.
"""

from __future__ import annotations

from pathlib import Path

CONFIG_FIELD = "quantization_config"
"""The field of config.json that describes compressed-tensors."""
COMPRESSED_TENSORS = "compressed-tensors"
"""The name of the format in that field."""
MODELSLIM = "ModelSlim"
DESCRIPTION = "quant_model_description*.json"
"""Describes each tensor of a ModelSlim checkpoint. Names differ between versions, also those of the weights: an earlier
one is quant_model_description_w8a8_dynamic.json."""
MODELSLIM_WEIGHTS = "quant_model_weight*.safetensors"


def modelslim_descriptions(path: Path) -> list[Path]:
    return sorted(path.glob(DESCRIPTION))


def uses_compressed_tensors(value: object) -> bool:
    """Whether the value of CONFIG_FIELD names this format."""
    return isinstance(value, dict) and value.get("quant_method") == COMPRESSED_TENSORS
