"""How a setting is declared: once, as a dataclass field with its default, its allowed values and one line of help.

The checks on construction, the server's flags with their --help, the fields of HTTP requests with their OpenAPI schema,
and the table in docs/decoding.md are all made from these declarations.
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from enum import Enum
from typing import Any, TypeVar

from lopa_ascend.config.errors import ParameterError
from lopa_ascend.config.kinds import Kind

T = TypeVar("T")

_KEY = "setting"
"""Key of a declaration in the metadata of its dataclass field."""
DERIVED: Any = None
"""The default of a field that construction replaces by what follows from other fields. The type of the field is what it
holds after construction."""


class Section(Enum):
    """A group of flags in --help: its title and what it is for."""

    MODEL = ("model", "Which model is served, and where its forward passes run.")
    ENGINE = ("engine", "How much the engine holds in memory and computes at the same time.")
    RANKS = ("ranks", "Several processes for one model, started by the server or by torchrun.")
    GRAPHS = ("compiled steps and NPU", "Decoding steps that are compiled to graphs, and options of an NPU.")
    SERVER = ("server", "Address, limits, timeouts and logs of the HTTP server.")
    TLS = ("TLS", "HTTPS: needs a certificate and its private key.")
    DECODING = (
        "decoding defaults",
        "Defaults for requests: a request may set each of these by the same name, e.g. tau_conf.",
    )
    RESEARCH = (
        "decoding, for research",
        "More defaults for requests: they select variants of the decoding.",
    )

    def __init__(self, title: str, description: str):
        self.title = title
        self.description = description


class GraphSupport(Enum):
    """The values of a decoding parameter with which requests run in compiled steps. With others they run eagerly."""

    ANY = "any"
    DECODING = "decodings with compiled steps"
    """The decodings that compiled steps decode: each says so itself."""
    DEFAULT = "the default"
    COMPILED = "the value compiled for"
    """The value that the graphs were compiled for."""
    BUCKET = "up to the size compiled for"
    """Values for which the buckets have room."""


@dataclass(frozen=True)
class Setting:
    """The declaration of one setting. Its name and type are those of the dataclass field."""

    default: Any
    kind: Kind
    """The allowed values. None is allowed as well where it is the default."""
    help: str
    """One line, without a full stop. Another setting is named in backquotes."""
    _: KW_ONLY
    group: Section | None
    """Where --help lists the flag; None: the setting has no flag."""
    flag: str | None = None
    """Name of the flag, with underscores; None: the name of the field."""
    metavar: str | None = None
    """What stands for the value in --help; None: the usual one of the kind."""
    default_text: str | None = None
    """What stands for the default where the value itself says too little, as None does."""
    secret: bool = False
    """The value is never shown."""


@dataclass(frozen=True)
class Parameter(Setting):
    """The declaration of one decoding parameter: a setting that every request may have a value of its own for."""

    _: KW_ONLY
    group: Section | None = Section.DECODING
    aliases: tuple[str, ...] = ()
    """Other names in a request, those of OpenAI's and vLLM's clients."""
    off: tuple[float, ...] = ()
    """Values with which a request switches the parameter off; they are stored as None."""
    graphs: GraphSupport = GraphSupport.ANY
    is_inert: bool = False
    """A decoding that does not have the parameter takes any value of it: it says how to do what that one does not."""
    own_field: bool = False
    """Bodies of requests get no field for the parameter from this declaration. Routes that take it have a field of
    their own, as ``logprobs``."""


def declare(default: T, kind: Kind, help: str, **more: Any) -> T:
    """A dataclass field that carries the declaration of a setting.

    Args:
        default: of the field; ``DERIVED`` if it follows from other fields.
        kind, help, more: see ``Setting``.
    """
    return _declared(default, Setting(default, kind, help, **more))


def parameter(default: T, kind: Kind, help: str, **more: Any) -> T:
    """A dataclass field that carries the declaration of a decoding parameter, see ``declare`` and ``Parameter``."""
    return _declared(default, Parameter(default, kind, help, **more))


def research(default: T, kind: Kind, help: str, **more: Any) -> T:
    """A decoding parameter for research: one that selects a variant of a decoding."""
    return parameter(default, kind, help, **{"group": Section.RESEARCH, **more})


def _declared(default: T, setting: Setting) -> T:
    value: T = field(default=default, metadata={_KEY: setting}, repr=not setting.secret)
    return value


_found: dict[type[Any], Mapping[str, Setting]] = {}


def settings(owner: type[Any]) -> Mapping[str, Setting]:
    """The declarations of a dataclass by field name, in order. Fields without a declaration are left out."""
    if owner not in _found:
        _found[owner] = {f.name: f.metadata[_KEY] for f in fields(owner) if _KEY in f.metadata}
    return _found[owner]


def refuse_unknown(options: Iterable[str], names: Sequence[str]) -> None:
    """Refuses options that are no settings.

    Args:
        options: names of options that a caller has given.
        names: names of all settings.

    Raises:
        ParameterError: there is no setting of a name; the message lists all.
    """
    for option in options:
        if option not in names:
            raise ParameterError(option, f"unknown option; choose from {', '.join(names)}")


def check_settings(instance: object) -> None:
    """Checks every declared field of a frozen dataclass by itself, and puts its value into the stored form.

    Raises:
        ParameterError: a value is not allowed.
    """
    for name, setting in settings(type(instance)).items():
        object.__setattr__(instance, name, checked_value(name, getattr(instance, name), setting))


def checked_value(name: str, value: object, setting: Setting) -> object:
    """The value of a setting in its stored form.

    Raises:
        ParameterError: it is not allowed.
    """
    if value is None and setting.default is None:
        return None
    try:
        return setting.kind.checked(value)
    except ParameterError as error:
        raise error.under(name) from None
    except ValueError as error:
        raise ParameterError(name, str(error)) from None


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps descriptions as they are written, and breaks help texts between words only.

    argparse's own formatters also break at hyphens, which cuts names of flags in two.
    """

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False, break_long_words=False)
