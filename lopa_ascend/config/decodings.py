"""The decodings that a request can name, and what each of them takes.

A decoding is a subclass of ``decode.strategy.Strategy``. Its attributes declare its parameters, what goes together, and
what it can do. Built-in and other decodings are registered alike: by ``lopa_ascend.register_decoding`` for this
process, or by an entry point with the decoding's name for every process of a server or an engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, is_dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from itertools import chain
from typing import Any

from lopa_ascend.config.kinds import Choice
from lopa_ascend.config.settings import Setting, settings

BUILT_IN = "lopa_ascend.decode"
"""Registers the built-in decodings on import. It needs this module, so it is imported at the first use."""
GROUP = "lopa_ascend.decodings"
"""The group of entry points."""
Decodings = tuple[tuple[str, tuple[type[Any], ...]], ...]
"""Names with their classes, the usual one first."""
_registered: dict[str, tuple[type[Any], ...]] = {}


def add_decoding(name: str, *variants: type[Any]) -> None:
    """Adds a decoding to this process; see ``lopa_ascend.register_decoding``. ``told_apart_by`` names the parameters
    that choose one of several classes.

    Raises:
        ValueError: the name is taken, or a class is not like a built-in decoding.
    """
    import_module(BUILT_IN)
    if _registered.get(name, variants) != variants:
        raise ValueError(f"decoding {name!r} is registered already")
    for strategy in variants:
        _check_strategy(name, strategy)
    _registered[name] = variants


def find_decoding(name: object, values: Mapping[str, Any] | None = None) -> type[Any] | None:
    """The class of a decoding; None for an unknown name. ``values`` choose one of several classes, and need no check.

    Raises:
        ValueError: its entry point cannot be loaded, or the class is not like a built-in decoding.
    """
    variants = variants_of(name)
    if not variants:
        return None
    for parameter in variants[0].told_apart_by:
        value = (values or {}).get(parameter) or getattr(variants[0], parameter)
        variants = tuple(found for found in variants if getattr(found, parameter) == value) or variants
    return variants[0]


def known_decodings() -> tuple[str, ...]:
    """Every name in this process; built-in ones come first."""
    built_in = built_in_decodings()
    return (*built_in, *sorted({*_registered, *_installed()} - {*built_in}))


def built_in_decodings() -> tuple[str, ...]:
    import_module(BUILT_IN)
    return tuple(name for name, variants in _registered.items() if _is_built_in(variants[0]))


def values_of(attribute: str) -> tuple[str, ...]:
    """The values of a parameter in some built-in decoding's ``told_apart_by``."""
    variants = chain.from_iterable(map(variants_of, built_in_decodings()))
    return tuple(dict.fromkeys(getattr(each, attribute) for each in variants if attribute in each.told_apart_by))


def with_graphs(decoding: str) -> bool:
    """Whether compiled steps decode it. ``has_graphs`` is not inherited: a subclass decides differently."""
    variants = variants_of(decoding)
    return any(vars(strategy).get("has_graphs", False) or strategy.decides_on_host for strategy in variants)


def all_decodings() -> Decodings:
    """The decodings of this process that can be loaded. A request for another one is told why it cannot."""
    import_module(BUILT_IN)
    for name in _installed():
        with suppress(ValueError):
            variants_of(name)
    return tuple(_registered.items())


@cache
def own_parameters(decodings: Decodings, *, built_in: bool = False) -> Mapping[str, Setting]:
    """The declarations of decodings' own parameters by name; with ``built_in`` of built-in decodings only."""
    found: dict[str, Setting] = {}
    for strategy in chain.from_iterable(variants for _, variants in decodings):
        if not built_in or _is_built_in(strategy):
            found |= {name: setting for name, setting in settings(strategy.parameters).items() if name not in found}
    return found


def _is_built_in(strategy: type[Any]) -> bool:
    return strategy.__module__.startswith(f"{BUILT_IN}.")


@dataclass(frozen=True)
class DecodingName(Choice):
    choices: tuple[str, ...] = ()

    @property
    def known(self) -> tuple[str, ...]:
        return known_decodings()

    def allowed(self) -> str:
        return Choice(built_in_decodings()).allowed()

    def checked(self, value: object) -> object:
        if find_decoding(value) is not None:
            return str(value)
        raise ValueError(f"unknown value {value!r}; choose one of {', '.join(self.known)}")


@dataclass(frozen=True)
class Variant(Choice):
    """A value that tells the classes of a decoding apart."""

    choices: tuple[str, ...] = ()
    attribute: str = ""
    """Name of the parameter, and of the classes' attribute."""

    @property
    def known(self) -> tuple[str, ...]:
        return values_of(self.attribute)

    def allowed(self) -> str:
        return Choice(self.known).allowed()


def variants_of(name: object) -> tuple[type[Any], ...]:
    """The classes of a decoding, the usual one first; empty for an unknown name. Raises as ``find_decoding``."""
    if not isinstance(name, str):
        return ()
    import_module(BUILT_IN)
    if name not in _registered:
        point = _installed().get(name)
        if point is None:
            return ()
        strategy = _load(point)
        if isinstance(strategy, Exception):
            raise ValueError(f"{name!r}: entry point {point.value!r} cannot be loaded: {strategy}") from strategy
        _check_strategy(name, strategy)
        _registered[name] = (strategy,)
    return _registered[name]


def _check_strategy(name: str, strategy: type[Any]) -> None:
    if not (isinstance(strategy, type) and issubclass(strategy, import_module(BUILT_IN).Strategy)):
        raise ValueError(f"decoding {name!r} must be a subclass of lopa_ascend.decode.strategy.Strategy")
    if not (isinstance(strategy.parameters, type) and is_dataclass(strategy.parameters)):
        raise ValueError(f"decoding {name!r}: its `parameters` must be a dataclass, got {strategy.parameters!r}")
    for owner in strategy.__mro__[1:]:
        inherited = vars(owner).get("parameters")
        if inherited is not None and not settings(inherited).items() <= settings(strategy.parameters).items():
            message = f"its `parameters` must inherit from {inherited.__name__}, those of {owner.__name__}"
            raise ValueError(f"decoding {name!r}: {message}")
    known = own_parameters(tuple(_registered.items()))
    for parameter, setting in settings(strategy.parameters).items():
        if known.get(parameter, setting) != setting:
            raise ValueError(f"decoding {name!r} declares {parameter}, a parameter of other decodings")


@cache
def _load(point: EntryPoint) -> type[Any] | Exception:
    """The strategy of an entry point, or why it cannot be loaded. Cached, because every request asks."""
    try:
        strategy: type[Any] = point.load()
    except Exception as error:  # noqa: BLE001  the module is another package's, which may raise anything
        return error
    return strategy


@cache
def _installed() -> dict[str, EntryPoint]:
    """By name. Cached: reading takes milliseconds, and requests may name anything."""
    return {point.name: point for point in entry_points(group=GROUP)}
