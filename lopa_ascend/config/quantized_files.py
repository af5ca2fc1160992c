"""Finds the description of int8 or fp8 linear layers in a model directory: compressed-tensors, ModelSlim or fp8.

``checkpoint/int8_formats.py`` and ``fp8_formats.py`` read the description.
"""

from __future__ import annotations

from pathlib import Path

CONFIG_FIELD = "quantization_config"
"""The field of config.json that describes quantised layers, except those of ModelSlim."""
COMPRESSED_TENSORS = "compressed-tensors"
"""The name of the format in that field."""
FP8, FLOAT_QUANTIZED = "fp8", "float-quantized"
"""The formats of fp8 layers: a value of ``quant_method``, and of ``format`` in compressed-tensors."""
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


def fp8_format(value: object) -> str | None:
    """The format that the value of CONFIG_FIELD describes; None: no fp8 layers."""
    if uses_compressed_tensors(value):
        assert isinstance(value, dict)
        return FLOAT_QUANTIZED if value.get("format") == FLOAT_QUANTIZED else None
    return FP8 if isinstance(value, dict) and value.get("quant_method") == FP8 else None


def has_fp8_weights(value: object) -> bool:
    """Whether the described layers stay fp8 in memory; layers with scales of blocks do not."""
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
    match group:
        case {"weights": {"strategy": "block"}}:
            return True
    return False
