"""Decoding parameters that a model directory recommends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lopa_ascend.config import ConfigError, DecodingParams, ParameterError, fitting_defaults
from lopa_ascend.config.files import read_json_object, shown
from lopa_ascend.families.reading import MAX_BLOCK, fields_of
from lopa_ascend.families.registry import family_of


def recommendations(model: str | Path) -> dict[str, dict[str, Any]]:
    """Recommended decoding parameters by where they come from; later ones win. The model directory need not exist.

    - A family's authors recommend a decoding; for a block-causal one ``config.json`` has the block size.
    - ``generation_config.json`` may recommend parameters under the name ``lopa_ascend``: {"eos_token_id": 7,
      "lopa_ascend": {"block_size": 8}}.

    Raises:
        ConfigError: a file is broken, a name is unknown, or a value is not allowed; the message names the file.
    """
    found: dict[str, dict[str, Any]] = {}
    family = family_of(model)
    if family is not None and family.properties.has_blocks:
        file = Path(model) / "config.json"
        size = fields_of(read_json_object(file, ConfigError), str(file), family).integer("block_size", MAX_BLOCK)
        found[f"{family.source} and config.json"] = {**family.recommended, "block_size": size}
    elif family is not None and family.recommended:
        found[family.source] = dict(family.recommended)
    file = Path(model) / "generation_config.json"
    own = read_json_object(file, ConfigError, optional=True).get("lopa_ascend", {})
    if not isinstance(own, dict):
        raise ConfigError(f"{file}: lopa_ascend is {shown(own)}, expected an object of decoding parameters")
    names = DecodingParams.names()
    if unknown := sorted(own.keys() - {*names}):
        raise ConfigError(f"{file}: lopa_ascend has {shown(unknown[0])}; choose from {', '.join(names)}")
    if own:
        found["generation_config.json"] = own
    return found


def recommended_decoding(model: str | Path) -> dict[str, Any]:
    """The recommended decoding parameters by name. ``model`` and errors as in ``recommendations``."""
    values: dict[str, Any] = {}
    try:
        for own in recommendations(model).values():
            values = {**fitting_defaults(values, own), **own}
        DecodingParams(**values)
    except ParameterError as error:
        raise ConfigError(f"{Path(model) / 'generation_config.json'}: lopa_ascend: {error}") from error
    return values


def ignored_sampling(model: str | Path) -> dict[str, Any]:
    """Decoding parameters of ``generation_config.json`` outside of ``lopa_ascend``, where transformers looks for them.
    But for ``eos_token_id`` they are not used: a model's authors chose them for another way to decode. Raises
    ConfigError if the file is broken."""
    values = read_json_object(Path(model) / "generation_config.json", ConfigError, optional=True)
    names = ("do_sample", *(name for name in DecodingParams.names() if name != "eos_token_id"))
    return {name: values[name] for name in names if values.get(name) not in (None, False)}
