"""The families that this process knows: the built-in ones and those of other packages.

`register_family` adds one to this process. An entry point of an installed package, with the ``model_type`` as its name,
adds it to every process, so also to a server's and to all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from lopa_ascend.config import ConfigError
from lopa_ascend.config.files import read_json_object
from lopa_ascend.families import (
    a2d,
    dream,
    dream_reasoner,
    fast_dllm2,
    llada,
    llada2,
    nemotron,
    orthrus,
    pangu,
    sdar,
    stable_diffcoder,
)
from lopa_ascend.families.family import Family

GROUP = "lopa_ascend.families"
FAMILIES: dict[str, Family] = {}
"""By name of the architecture. Entry points' families come when a ``config.json`` names them."""


def register_family(family: Family) -> None:
    """Makes the engines of this process run a family's models.

    Raises:
        ValueError: its name is taken, or another family has its ``model_type`` and neither says which models it claims.
    """
    if FAMILIES.get(family.name, family) is not family:
        raise ValueError(f"family {family.name!r} is registered already")
    for other in FAMILIES.values():
        if other is not family and other.model_type == family.model_type and not (other.claims or family.claims):
            raise ValueError(f"model_type {family.model_type!r} is registered already")
    FAMILIES[family.name] = family


for module in (dream, dream_reasoner, fast_dllm2, llada, llada2, nemotron, orthrus, pangu, sdar, stable_diffcoder):
    register_family(module.FAMILY)
for member in (*a2d.FAMILIES, nemotron.AUTOREGRESSIVE, orthrus.QWEN3):
    register_family(member)


def known_families() -> set[str]:
    """The ``model_type`` of each family, with the architectures that it needs."""
    found = {point.name for point in _installed()}
    for family in FAMILIES.values():
        needed = f" ({' or '.join(family.architectures)})" if family.architectures else ""
        found.add(family.model_type + needed)
    return found


def family_in(config: Mapping[str, Any]) -> Family | None:
    """The family that a ``config.json`` describes, if it is known. Raises ConfigError if a package's entry point for
    the ``model_type`` cannot be loaded."""
    model_type = config.get("model_type")
    for point in _installed():
        if point.name == model_type:
            _load(point)
    own = [family for family in FAMILIES.values() if family.model_type == model_type]
    claiming = (family for family in own if family.claims is not None and family.claims(config))
    return next(claiming, next((family for family in own if family.claims is None), None))


def family_of(model: str | Path) -> Family | None:
    """The family of a model directory, if both are there. Raises ConfigError as ``family_in``, or for a broken file."""
    return family_in(with_name(read_json_object(Path(model) / "config.json", ConfigError, optional=True), model))


def with_name(config: dict[str, Any], model: str | Path) -> dict[str, Any]:
    """Adds the directory's path to ``_name_or_path``: only the name of a checkpoint tells some families apart."""
    return {**config, "_name_or_path": f"{config.get('_name_or_path', '')} {Path(model).absolute()}"}


def family_of_checkpoint(name: str) -> str | None:
    """The family of a checkpoint such as "JetLM/SDAR-8B-Chat", if the name tells it."""
    last = name.rstrip("/").rpartition("/")[2]
    return next((key for key, family in FAMILIES.items() if last.startswith(family.checkpoints)), None)


def _load(point: EntryPoint) -> None:
    try:
        family = point.load()
        if not isinstance(family, Family):
            raise TypeError(f"expected a lopa_ascend.families.Family, got {type(family).__name__}")
        register_family(family)
    except Exception as error:  # the module is another package's, which may raise anything
        message = f"model_type {point.name!r}: entry point {point.value!r} cannot be loaded: {error}"
        raise ConfigError(message) from error


@cache
def _installed() -> tuple[EntryPoint, ...]:
    """Read once, because it takes milliseconds."""
    return tuple(entry_points(group=GROUP))
