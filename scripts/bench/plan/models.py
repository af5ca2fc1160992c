"""The geometry of a model: that of a published checkpoint by name, or a directory's config.json."""

from __future__ import annotations

from lopa_ascend.config import ConfigError, ModelConfig
from lopa_ascend.config.files import read_json_object
from lopa_ascend.families import FAMILIES, family_in, read_config, with_name
from lopa_ascend.hub import directory_of
from scripts.eval.make_checkpoint import LABELS, files_of

PUBLISHED = {
    "Dream-7B": ("dream", "7B"),
    "DiffuCoder-7B": ("dream", "7B"),
    "LLaDA2.0-mini": ("llada2", "16B"),
    **{f"{label}-{size}": (label, size) for label, name in LABELS.items() for size in FAMILIES[name].sizes},
}
"""Family and size by name."""


def load_model(name: str) -> ModelConfig:
    """The configuration of a published checkpoint, or of a directory or a name on the hub, by its JSON files alone.
    ConfigError if there is no such checkpoint or directory, ParameterError if the hub cannot be read."""
    if name in PUBLISHED:
        label, size = PUBLISHED[name]
        return read_config(files_of(label, size, "bfloat16")[0], {}, name, FAMILIES[LABELS[label]])
    file = directory_of(name, with_weights=False) / "config.json"
    if not file.exists():
        raise ConfigError(
            f"unknown model {name!r}; choose one of {', '.join(PUBLISHED)}, or give a directory or ORG/NAME"
        )
    values = with_name(read_json_object(file, ConfigError), file.parent)
    return read_config(values, {}, str(file), family_in(values))
