"""The architectures that the engine runs, by the ``model_type`` that a checkpoint's config.json names.

Dream is written in fused ops. Others are written in plain torch (``model/plain.py``) and are registered: in this
process by `register_model`; in every process, so also in those of a server and of several ranks, by an entry point of
an installed package, with the ``model_type`` as its name.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING

from lopa_ascend.config import DREAM
from lopa_ascend.config.files import shown

if TYPE_CHECKING:
    from lopa_ascend.model.plain import Build

GROUP = "lopa_ascend.models"
"""The group of entry points."""
_registered: dict[str, Build] = {}


def register_model(model_type: str, build: Build) -> None:
    """Makes the engines of this process run an architecture that is written in plain torch.

    Args:
        model_type: as config.json of its checkpoints names it.
        build: gives the module for the config of a checkpoint; see ``model/plain.py`` for what the module must have.

    Raises:
        ValueError: the name is taken.
    """
    if model_type == DREAM or _registered.get(model_type, build) is not build:
        raise ValueError(f"model_type {model_type!r} is registered already")
    _registered[model_type] = build


def known_models() -> tuple[str, ...]:
    """The ``model_type`` of every architecture that this process can run."""
    return tuple(sorted({DREAM, *_registered, *_installed()}))


def find_model(model_type: object) -> Build | None:
    """How to build the module of an architecture in plain torch; None for Dream.

    Raises:
        ValueError: there is no such architecture, or its entry point cannot be loaded.
    """
    if model_type == DREAM:
        return None
    name = model_type if isinstance(model_type, str) else ""
    if name in _registered:
        return _registered[name]
    point = _installed().get(name)
    if point is None:
        raise ValueError(
            f"model_type is {shown(model_type)}, expected one of {', '.join(known_models())}; register another with "
            f"lopa_ascend.register_model or, for servers and several ranks, by an entry point of the group {GROUP}"
        )
    try:
        build: Build = point.load()
    except Exception as error:  # the module is another package's, which may raise anything
        raise ValueError(f"model_type {model_type!r}: entry point {point.value!r} cannot be loaded: {error}") from error
    return build


def _installed() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}
