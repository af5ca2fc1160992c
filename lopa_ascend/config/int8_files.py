"""What in a model directory says that linear layers are int8 or fp8, in the formats that are read.

``checkpoint/int8_formats.py`` and ``fp8_formats.py`` read the descriptions themselves.
"""

from __future__ import annotations

from pathlib import Path

CONFIG_FIELD = "quantization_config"
"""The field of config.json that describes quantised layers, but for those of ModelSlim."""
COMPRESSED_TENSORS = "compressed-tensors"
"""The name of the format in that field."""
FP8, FLOAT_QUANTIZED = "fp8", "float-quantized"
"""The formats of fp8 layers: a value of ``quant_method``, and of ``format`` in compressed-tensors."""
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
    """Whether CONFIG_FIELD describes layers in a format of compressed-tensors."""
    return isinstance(value, dict) and value.get("quant_method") == COMPRESSED_TENSORS


def fp8_format(value: object) -> str | None:
    """The format of fp8 layers that CONFIG_FIELD describes; None if it describes none."""
    if uses_compressed_tensors(value):
        assert isinstance(value, dict)
        return FLOAT_QUANTIZED if value.get("format") == FLOAT_QUANTIZED else None
    return FP8 if isinstance(value, dict) and value.get("quant_method") == FP8 else None


def has_fp8_weights(value: object) -> bool:
    """Whether layers that CONFIG_FIELD describes are fp8 in memory; those with scales of blocks are not."""
    if fp8_format(value) is None:
        return False
    assert isinstance(value, dict)
    if value.get("weight_block_size"):
        return False
    match value.get("config_groups"):
        case dict(groups):
            return not any(_has_blocks(group) for group in groups.values())
    return True


def _has_blocks(group: object) -> bool:
    """Whether a group of compressed-tensors has weights with scales of blocks."""
    match group:
        case {"weights": {"strategy": "block"}}:
            return True
    return False
