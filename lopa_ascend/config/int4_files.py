"""Finds the description of int4 linear layers in a model directory: GPTQ, AWQ or compressed-tensors.

``checkpoint/int4_formats.py`` reads the description.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lopa_ascend.config.files import read_json_object
from lopa_ascend.config.quantized_files import CONFIG_FIELD, uses_compressed_tensors

GPTQ, AWQ, PACKED = "gptq", "awq", "pack-quantized"
"""The formats: values of ``quant_method``, and the ``format`` of compressed-tensors."""
OWN_FILES = {"quantize_config.json": GPTQ, "quant_config.json": AWQ}
"""Files of older checkpoints with the content of CONFIG_FIELD, and the format if they do not name one."""
GROUP_SIZES = (32, 64, 128)
"""Numbers of inputs that may share a scale."""


def int4_format(value: object) -> str | None:
    """The format that the value of CONFIG_FIELD describes; None: no int4 layers."""
    if uses_compressed_tensors(value):
        assert isinstance(value, dict)
        return PACKED if value.get("format") == PACKED else None
    method = value.get("quant_method") if isinstance(value, dict) else None
    return method if method in (GPTQ, AWQ) else None


def int4_description(
    path: Path, raw: Mapping[str, Any], error_class: type[ValueError]
) -> tuple[Path, str, Mapping[str, Any]] | None:
    """The file, the format and the fields of a directory's description; None: no int4 layers.

    Args:
        raw: content of config.json.
    """
    value = raw.get(CONFIG_FIELD)
    if value is not None:
        name = int4_format(value)
        return None if name is None else (path / "config.json", name, value)
    for file, default in OWN_FILES.items():
        if (path / file).exists():
            fields = read_json_object(path / file, error_class)
            return path / file, int4_format(fields) or default, fields
    return None
