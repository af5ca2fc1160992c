"""The decodings that a request can name: the built-in ones and those of other packages.

Another decoding is added in this process by `lopa_ascend.register_decoding`; in every process, so also in those of a
server and of several ranks, by an entry point of an installed package, with the decoding's name as its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from lopa_ascend.config.kinds import Choice
from lopa_ascend.config.settings import ParameterError, check_settings, settings

DECODINGS = ("lopa", "d2f", "parallel", "vanilla", "fast_dllm", "fast_dllm_v2")
"""The built-in ones."""
PIPELINED = ("lopa", "d2f")
"""The built-in ones that compiled steps decode: their window of blocks moves over the canvas."""
GROUP = "lopa_ascend.decodings"
"""The group of entry points."""
_registered: dict[str, type[Any]] = {}


def add_decoding(name: str, strategy: type[Any]) -> None:
    """Adds a decoding to those of this process; `lopa_ascend.register_decoding` says what it must be.

    Raises:
        ValueError: the name is taken, or the strategy is not like a built-in decoding.
    """
    if name in DECODINGS or _registered.get(name, strategy) is not strategy:
        raise ValueError(f"decoding {name!r} is registered already")
    _check_strategy(name, strategy)
    _registered[name] = strategy


def find_decoding(name: str) -> type[Any] | None:
    """The strategy of a decoding that is not built in; None if there is none of this name.

    Raises:
        ValueError: its entry point cannot be loaded, or the strategy is not like a built-in decoding.
    """
    if name not in _registered:
        point = _installed().get(name)
        if point is None:
            return None
        strategy = _load(point)
        if isinstance(strategy, Exception):
            raise ValueError(f"{name!r}: entry point {point.value!r} cannot be loaded: {strategy}") from strategy
        _check_strategy(name, strategy)
        _registered[name] = strategy
    return _registered[name]


def known_decodings() -> tuple[str, ...]:
    """The name of every decoding of this process, the built-in ones first."""
    return (*DECODINGS, *sorted({*_registered, *_installed()} - {*DECODINGS}))


def is_known(name: object) -> bool:
    """Whether this is the name of a decoding.

    Raises:
        ValueError: see ``find_decoding``.
    """
    return isinstance(name, str) and (name in DECODINGS or find_decoding(name) is not None)


def built_in_like(decoding: str) -> str:
    """The decoding itself if it is built in, otherwise the built-in one that its ``like`` names. Both go with the same
    parameters."""
    like: str = decoding if decoding in DECODINGS else _registered[decoding].like
    return like


def needed_confidence(decoding: str) -> str | None:
    """The confidence that the passes of a decoding report, whatever ``confidence`` is; see ``Strategy.confidence``."""
    confidence: str | None = None if decoding in DECODINGS else _registered[decoding].confidence
    return confidence


def all_own_parameters() -> dict[str, type[Any]]:
    """By decoding: the dataclass of the parameters that it declares itself, as ``Strategy.parameters`` describes.

    Decodings that cannot be loaded are left out here; a request that names one is told why.
    """
    found = {}
    for decoding in known_decodings():
        try:
            strategy = None if decoding in DECODINGS else find_decoding(decoding)
        except ValueError:
            continue
        if strategy is not None and strategy.parameters is not None:
            found[decoding] = strategy.parameters
    return found


def checked_own(decoding: str, values: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """The values of all parameters that a decoding declares itself, by name, in the form in which they are stored.

    Args:
        values: by name, those that are given.

    Raises:
        ParameterError: a value is not allowed, or the decoding does not declare a parameter of this name.
    """
    strategy = None if decoding in DECODINGS else find_decoding(decoding)
    declared = None if strategy is None else strategy.parameters
    names = () if declared is None else tuple(settings(declared))
    for name in values:
        if name not in names:
            owners = [f'"{other}"' for other, owner in all_own_parameters().items() if name in settings(owner)]
            raise ParameterError(name, f'does not go with decoding "{decoding}"; it is for {", ".join(owners)}')
    if declared is None:
        return ()
    instance = declared(**values)
    check_settings(instance)
    return tuple((name, getattr(instance, name)) for name in names)


@dataclass(frozen=True)
class DecodingName(Choice):
    """The name of a decoding."""

    choices: tuple[str, ...] = DECODINGS

    @property
    def known(self) -> tuple[str, ...]:
        return known_decodings()

    def checked(self, value: object) -> object:
        if is_known(value):
            return str(value)
        raise ValueError(f"unknown value {value!r}; choose one of {', '.join(self.known)}")


def _check_strategy(name: str, strategy: type[Any]) -> None:
    """Refuses what has not the attributes of ``Strategy``: every request would fail because of them."""
    like = getattr(strategy, "like", None)
    if like not in DECODINGS:
        raise ValueError(f"decoding {name!r} must have an attribute `like` of {', '.join(DECODINGS)}, got {like!r}")
    if not all(hasattr(strategy, attribute) for attribute in ("parameters", "confidence", "check")):
        raise ValueError(f"decoding {name!r} must be a subclass of lopa_ascend.decode.strategy.Strategy")
    if strategy.parameters is not None and not is_dataclass(strategy.parameters):
        raise ValueError(f"decoding {name!r}: its `parameters` must be a dataclass, got {strategy.parameters!r}")


@cache
def _load(point: EntryPoint) -> type[Any] | Exception:
    """The strategy of an entry point, or why it cannot be loaded. That is tried once: every request asks again."""
    try:
        strategy: type[Any] = point.load()
    except Exception as error:  # noqa: BLE001  the module is another package's, which may raise anything
        return error
    return strategy


@cache
def _installed() -> dict[str, EntryPoint]:
    """By name; read once, because it takes milliseconds and requests may name anything."""
    return {point.name: point for point in entry_points(group=GROUP)}
