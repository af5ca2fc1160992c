"""The geometry of a model: a built-in one by name, or a directory's config.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lopa_ascend.config import ConfigError, ModelConfig
from lopa_ascend.config.files import read_json_object
from lopa_ascend.families import family_in, read_config, with_name
from lopa_ascend.hub import directory_of

FILE = Path(__file__).with_name("geometries.json")


def known_models() -> tuple[str, ...]:
    """Names of the built-in geometries."""
    return tuple(read_json_object(FILE, ConfigError))


def load_model(name: str) -> ModelConfig:
    """The configuration of a built-in geometry, or of a directory or a name on the hub, by its JSON files alone.

    Raises:
        ConfigError: there is neither such a geometry nor such a directory, or its config.json cannot be used.
        ParameterError: what is named on the hub cannot be read.
    """
    built_in = read_json_object(FILE, ConfigError)
    if name in built_in:
        return _parse(built_in[name]["config"], f"{FILE.name}: {name}")
    file = directory_of(name, with_weights=False) / "config.json"
    if not file.exists():
        raise ConfigError(
            f"unknown model {name!r}; choose one of {', '.join(built_in)}, or give a directory or ORG/NAME"
        )
    return _parse(with_name(read_json_object(file, ConfigError), file.parent), str(file))


def _parse(values: dict[str, Any], source: str) -> ModelConfig:
    """The configuration of a model of any architecture."""
    return read_config(values, {}, source, family_in(values))
