"""What in a model directory says that linear layers are int4, in the formats GPTQ, AWQ and compressed-tensors.

``checkpoint/int4_formats.py`` reads the descriptions themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lopa_ascend.config.files import read_json_object
from lopa_ascend.config.int8_files import CONFIG_FIELD, uses_compressed_tensors

GPTQ, AWQ, PACKED = "gptq", "awq", "pack-quantized"
"""The formats: values of ``quant_method``, and the ``format`` of compressed-tensors."""
OWN_FILES = {"quantize_config.json": GPTQ, "quant_config.json": AWQ}
"""The files of older checkpoints that have in them what CONFIG_FIELD has, and their format if they do not name it."""
GROUP_SIZES = (32, 64, 128)
"""The numbers of inputs that may share a scale."""


def int4_format(value: object) -> str | None:
    """The format of int4 layers that CONFIG_FIELD describes; None if it describes none."""
    if uses_compressed_tensors(value):
        assert isinstance(value, dict)
        return PACKED if value.get("format") == PACKED else None
    method = value.get("quant_method") if isinstance(value, dict) else None
    return method if method in (GPTQ, AWQ) else None


def int4_description(
    path: Path, raw: Mapping[str, Any], error_class: type[ValueError]
) -> tuple[Path, str, Mapping[str, Any]] | None:
    """What a directory says of int4 layers: the file, the format and the fields; None if nothing.

    Args:
        path: the directory.
        raw: content of its config.json.

    Raises:
        error_class: a file is no JSON object.
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
