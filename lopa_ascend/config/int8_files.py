"""What in a model directory says that linear layers are int8, in the two formats that are read.

``checkpoint/int8_formats.py`` reads the descriptions themselves.
"""

from __future__ import annotations

from pathlib import Path

CONFIG_FIELD = "quantization_config"
"""The field of config.json that describes int8 layers in the format compressed-tensors."""
COMPRESSED_TENSORS = "compressed-tensors"
"""The name of the format in that field."""
MODELSLIM = "ModelSlim"
DESCRIPTION = "quant_model_description*.json"
"""The file that describes each tensor in the format ModelSlim. Its name differs from version to version, as do those of
the weights: earlier ones are called quant_model_description_w8a8_dynamic.json."""
MODELSLIM_WEIGHTS = "quant_model_weight*.safetensors"
"""The weights of a ModelSlim checkpoint."""


def modelslim_descriptions(path: Path) -> list[Path]:
    """The files in a model directory that describe tensors in the format ModelSlim."""
    return sorted(path.glob(DESCRIPTION))


def uses_compressed_tensors(value: object) -> bool:
    """Whether CONFIG_FIELD says that there are int8 layers in the format compressed-tensors."""
    return isinstance(value, dict) and value.get("quant_method") == COMPRESSED_TENSORS
