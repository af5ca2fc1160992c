"""The architectures that the engine runs, by what ``config.families.architecture_name`` finds in config.json.

Those of FUSED are written in fused ops, a file of this package each. Others are written in plain torch
(``model/plain.py``) and are registered: in this process by `register_model`; in every process, so also in those of a
server and of several ranks, by an entry point of an installed package, with the ``model_type`` as its name.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING

from lopa_ascend.config.families import FAMILIES
from lopa_ascend.config.files import shown

if TYPE_CHECKING:
    from lopa_ascend.model.base import SplitModel
    from lopa_ascend.model.plain import Build

GROUP = "lopa_ascend.models"
"""The group of entry points."""
FUSED = {
    "Dream": "lopa_ascend.model.dream:Dream",
    "DreamReasoner": "lopa_ascend.model.dream_reasoner:DreamReasoner",
    "Fast_dLLM_Qwen": "lopa_ascend.model.fast_dllm2:FastDllm2",
    "llada": "lopa_ascend.model.llada:Llada",
    "llada2_moe": "lopa_ascend.model.llada2:Llada2",
    "sdar": "lopa_ascend.model.sdar:Sdar",
}
"""By name of the architecture: module and class, a ``model.base.SplitModel``. They import torch, so not before use."""
_registered: dict[str, Build] = {}


def register_model(model_type: str, build: Build) -> None:
    """Makes the engines of this process run an architecture that is written in plain torch.

    Args:
        model_type: as config.json of its checkpoints names it.
        build: gives the module for the config of a checkpoint; see ``model/plain.py`` for what the module must have.

    Raises:
        ValueError: the name is taken.
    """
    if model_type in FUSED or _registered.get(model_type, build) is not build:
        raise ValueError(f"model_type {model_type!r} is registered already")
    _registered[model_type] = build


def known_models() -> tuple[str, ...]:
    """The ``model_type`` of every architecture that this process can run."""
    fused = {family.model_type for family in FAMILIES.values()}
    return tuple(sorted({*fused, *_registered, *_installed()}))


def check_model_type(model_type: object) -> str:
    """The name of the architecture that config.json describes, if this process can run it.

    Raises:
        ValueError: there is no such architecture.
    """
    if isinstance(model_type, str) and model_type in {*FUSED, *known_models()}:
        return model_type
    raise ValueError(
        f"model_type is {shown(model_type)}, expected one of {', '.join(known_models())}; register another with "
        f"lopa_ascend.register_model or, for servers and several ranks, by an entry point of the group {GROUP}"
    )


def find_fused(model_type: object) -> type[SplitModel]:
    """The class of an architecture in fused ops.

    Raises:
        ValueError: there is no such architecture.
    """
    if not isinstance(model_type, str) or model_type not in FUSED:
        raise ValueError(f"model_type is {shown(model_type)}, expected one of {', '.join(FUSED)}")
    found: type[SplitModel] = EntryPoint(model_type, FUSED[model_type], GROUP).load()
    return found


def find_plain(model_type: str) -> Build:
    """How to build the module of an architecture in plain torch.

    Raises:
        ValueError: its entry point cannot be loaded.
    """
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
