"""The decodings that a request can name: the built-in ones and those of other packages.

Another decoding is added in this process by `lopa_ascend.register_decoding`; in every process, so also in those of a
server and of several ranks, by an entry point of an installed package, with the decoding's name as its name.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from lopa_ascend.config.kinds import Choice

DECODINGS = ("lopa", "d2f", "parallel", "vanilla", "fast_dllm")
"""The built-in ones."""
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
    _check_like(name, strategy)
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
        try:
            strategy = point.load()
        except Exception as error:  # the module is another package's, which may raise anything
            raise ValueError(f"{name!r}: entry point {point.value!r} cannot be loaded: {error}") from error
        _check_like(name, strategy)
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
    if decoding in DECODINGS:
        return decoding
    like: str = _registered[decoding].like
    return like


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


def _check_like(name: str, strategy: type[Any]) -> None:
    like = getattr(strategy, "like", None)
    if like not in DECODINGS:
        raise ValueError(f"decoding {name!r} must have an attribute `like` of {', '.join(DECODINGS)}, got {like!r}")


@cache
def _installed() -> dict[str, EntryPoint]:
    """By name; read once, because it takes milliseconds and requests may name anything."""
    return {point.name: point for point in entry_points(group=GROUP)}
