"""The geometry of a model: that of a published checkpoint by name, or a directory's config.json."""

from __future__ import annotations

from typing import Any

from lopa_ascend.config import ConfigError, ModelConfig
from lopa_ascend.config.files import read_json_object
from lopa_ascend.families import FAMILIES, Family, family_in, read_config, with_name
from lopa_ascend.hub import directory_of
from scripts.eval.make_checkpoint import LABELS, files_of

PUBLISHED = {
    "Dream-7B": ("dream", "7B"),
    "DiffuCoder-7B": ("dream", "7B"),
    "LLaDA2.0-mini": ("llada2", "16B"),
    **{f"{label}-{size}": (label, size) for label, name in LABELS.items() for size in FAMILIES[name].sizes},
}
"""Family and size by name."""


def known_models() -> tuple[str, ...]:
    """Names of the built-in geometries."""
    return tuple(PUBLISHED)


def load_model(name: str) -> ModelConfig:
    """The configuration of a published checkpoint, or of a directory or a name on the hub, by its JSON files alone.

    Raises:
        ConfigError: there is neither such a checkpoint nor such a directory, or its config.json cannot be used.
        ParameterError: what is named on the hub cannot be read.
    """
    if name in PUBLISHED:
        label, size = PUBLISHED[name]
        return _parse(files_of(label, size, "bfloat16")[0], name, FAMILIES[LABELS[label]])
    file = directory_of(name, with_weights=False) / "config.json"
    if not file.exists():
        raise ConfigError(
            f"unknown model {name!r}; choose one of {', '.join(PUBLISHED)}, or give a directory or ORG/NAME"
        )
    values = with_name(read_json_object(file, ConfigError), file.parent)
    return _parse(values, str(file), family_in(values))


def _parse(values: dict[str, Any], source: str, family: Family | None) -> ModelConfig:
    """The configuration of a model of any architecture."""
    return read_config(values, {}, source, family)
