"""The decodings that a request can name, and what each of them takes.

A decoding is a class, ``decode.strategy.Strategy``, whose attributes say everything about it: its parameters, what goes
together, and what it can do. The built-in ones are registered as those of other packages are: in this process by
`lopa_ascend.register_decoding`; in every process, so also in those of a server and of several ranks, by an entry point
of an installed package, with the decoding's name as its name.
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
"""The package that registers the built-in decodings when it is imported: not before use, because it needs this one."""
GROUP = "lopa_ascend.decodings"
"""The group of entry points."""
Decodings = tuple[tuple[str, tuple[type[Any], ...]], ...]
"""Names with their classes, the usual one first."""
_registered: dict[str, tuple[type[Any], ...]] = {}
"""By name: the classes of a decoding, the usual one first."""


def add_decoding(name: str, *variants: type[Any]) -> None:
    """Adds a decoding to those of this process; `lopa_ascend.register_decoding` says what it must be.

    Args:
        variants: its classes. Their ``told_apart_by`` names the parameters that choose one of several.

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
    """The class of a decoding; None if there is none of this name.

    Args:
        values: parameters by name, which tell the classes of one decoding apart; not necessarily checked.

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
    """The name of every decoding of this process, the built-in ones first."""
    built_in = built_in_decodings()
    return (*built_in, *sorted({*_registered, *_installed()} - {*built_in}))


def built_in_decodings() -> tuple[str, ...]:
    """The names of the built-in decodings."""
    import_module(BUILT_IN)
    return tuple(name for name, variants in _registered.items() if _is_built_in(variants[0]))


def values_of(attribute: str) -> tuple[str, ...]:
    """The values of a parameter that chooses one of several classes of a built-in decoding."""
    variants = chain.from_iterable(map(variants_of, built_in_decodings()))
    return tuple(dict.fromkeys(getattr(each, attribute) for each in variants if attribute in each.told_apart_by))


def with_graphs(decoding: str) -> bool:
    """Whether compiled steps decode it. A class that decides on the device says so for itself alone: a subclass decides
    otherwise."""
    variants = variants_of(decoding)
    return any(vars(strategy).get("has_graphs", False) or strategy.decides_on_host for strategy in variants)


def all_decodings() -> Decodings:
    """The decodings of this process that can be loaded. A request that names another one is told why not."""
    import_module(BUILT_IN)
    for name in _installed():
        with suppress(ValueError):
            variants_of(name)
    return tuple(_registered.items())


@cache
def own_parameters(decodings: Decodings, *, built_in: bool = False) -> Mapping[str, Setting]:
    """The declarations of the parameters that decodings have of their own, by name.

    Args:
        built_in: those of built-in decodings alone.
    """
    found: dict[str, Setting] = {}
    for strategy in chain.from_iterable(variants for _, variants in decodings):
        if not built_in or _is_built_in(strategy):
            found |= {name: setting for name, setting in settings(strategy.parameters).items() if name not in found}
    return found


def _is_built_in(strategy: type[Any]) -> bool:
    return strategy.__module__.startswith(f"{BUILT_IN}.")


@dataclass(frozen=True)
class DecodingName(Choice):
    """The name of a decoding."""

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
    """One of the values that tell the classes of a decoding apart."""

    choices: tuple[str, ...] = ()
    attribute: str = ""
    """Of these classes; it is the name of the parameter, too."""

    @property
    def known(self) -> tuple[str, ...]:
        return values_of(self.attribute)

    def allowed(self) -> str:
        return Choice(self.known).allowed()


def variants_of(name: object) -> tuple[type[Any], ...]:
    """The classes of a decoding, the usual one first; none if there is none of this name.

    Raises:
        ValueError: see ``find_decoding``.
    """
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
    """Refuses a class that no request could be decoded by."""
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
