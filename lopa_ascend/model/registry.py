"""The models that the engine runs: families, and models in plain torch (``model/plain.py``).

The latter are registered as families are: in this process by `register_model`; in every process, so also in those of a
server and of several ranks, by an entry point of an installed package, with the ``model_type`` as its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from lopa_ascend.config.files import ConfigError, shown
from lopa_ascend.families import Family, family_in
from lopa_ascend.families.registry import GROUP as FAMILY_GROUP
from lopa_ascend.families.registry import known_families

if TYPE_CHECKING:
    from lopa_ascend.model.base import SplitModel
    from lopa_ascend.model.plain import Build

GROUP = "lopa_ascend.models"
_registered: dict[str, Build] = {}


def register_model(model_type: str, build: Build) -> None:
    """Makes the engines of this process run a model in plain torch.

    Args:
        model_type: as config.json of its checkpoints names it.
        build: gives the module for the config of a checkpoint; ``model/plain.py`` says what the module must have.

    Raises:
        ValueError: the name is taken.
    """
    if model_type in known_families() or _registered.get(model_type, build) is not build:
        raise ValueError(f"model_type {model_type!r} is registered already")
    _registered[model_type] = build


def known_models() -> tuple[str, ...]:
    """The ``model_type`` of every model that this process can run."""
    return tuple(sorted({*known_families(), *_registered, *_installed()}))


def find_model(config: Mapping[str, Any]) -> Family | None:
    """The family of the model that a config.json describes; None: it is in plain torch, and `find_plain` has it.
    ValueError if this process knows no such model, or its family cannot be loaded."""
    family, model_type = family_in(config), config.get("model_type")
    if family is None and model_type not in known_models():
        raise ValueError(
            f"model_type is {shown(model_type)}, expected one of {', '.join(known_models())}; register another with "
            "lopa_ascend.register_model or register_family or, for servers and several ranks, by an entry point of the "
            f"group {GROUP} or {FAMILY_GROUP}"
        )
    return family


def find_decoder(family: Family) -> type[SplitModel]:
    """The class of a family's forward pass. ConfigError if it cannot be imported."""
    try:
        found: type[SplitModel] = resolve_name(family.decoder)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"family {family.name!r}: decoder {family.decoder!r} cannot be imported: {error}") from error
    return found


def find_plain(model_type: str) -> Build:
    """How to build the module of a model in plain torch. ValueError if its entry point cannot be loaded."""
    if model_type in _registered:
        return _registered[model_type]
    point = _installed()[model_type]
    try:
        build: Build = point.load()
    except Exception as error:  # the module is another package's, which may raise anything
        raise ValueError(f"model_type {model_type!r}: entry point {point.value!r} cannot be loaded: {error}") from error
    return build


def _installed() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}
