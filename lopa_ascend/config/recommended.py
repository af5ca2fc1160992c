"""Decoding parameters that a model directory recommends for its model.

They stand in ``generation_config.json``, as the sampling parameters of other engines do, under the name
``lopa_ascend``: {"eos_token_id": 7, "lopa_ascend": {"block_size": 8}}.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lopa_ascend.config.decoding import DecodingParams
from lopa_ascend.config.errors import ParameterError
from lopa_ascend.config.fields import ConfigError
from lopa_ascend.config.files import read_json_object, shown

FILE = "generation_config.json"
NAME = "lopa_ascend"


def recommended_decoding(model: str | Path) -> dict[str, Any]:
    """The recommended decoding parameters by name; empty if the directory recommends none, or does not exist.

    Args:
        model: the model directory.

    Raises:
        ConfigError: the file is broken, a name is unknown, or a value is not allowed; the message names the file.
    """
    file = Path(model) / FILE
    values = read_json_object(file, ConfigError, optional=True).get(NAME, {})
    if not isinstance(values, dict):
        raise ConfigError(f"{file}: {NAME} is {shown(values)}, expected an object of decoding parameters")
    unknown = sorted(values.keys() - set(DecodingParams.names()))
    if unknown:
        raise ConfigError(f"{file}: {NAME} has {shown(unknown[0])}; choose from {', '.join(DecodingParams.names())}")
    try:
        DecodingParams(**values)
    except ParameterError as error:
        raise ConfigError(f"{file}: {NAME}: {error}") from error
    return values
