"""Declares a setting once, as a dataclass field with its default, its allowed values and one line of help.

Checks on construction, the server's flags and --help, request fields and their OpenAPI schema, and the table in
docs/decoding.md are made from the declarations.
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
"""Key of the declaration in a field's metadata."""
DERIVED: Any = None
"""The default of a field that construction derives from other fields. The field's type is that after construction."""


class Section(Enum):
    """A group of flags in --help: title and description."""

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
    """The values of a decoding parameter that run in compiled steps. Requests with other values run eagerly."""

    ANY = "any"
    DECODING = "decodings with compiled steps"
    """See ``decodings.with_graphs``."""
    DEFAULT = "the default"
    COMPILED = "the value compiled for"
    BUCKET = "up to the size compiled for"


@dataclass(frozen=True)
class Setting:
    """The declaration of one setting. The dataclass field has its name and type."""

    default: Any
    kind: Kind
    """The allowed values. A default of None is allowed as well."""
    help: str
    """One line, without a full stop. Another setting is named in backquotes."""
    _: KW_ONLY
    group: Section | None
    """Its place in --help; None: the setting has no flag."""
    flag: str | None = None
    """Name of the flag, with underscores; None: the name of the field."""
    metavar: str | None = None
    """Stands for the value in --help; None: the kind's."""
    default_text: str | None = None
    """Explains a default that says too little itself, such as None."""
    secret: bool = False
    """The value is never shown."""


@dataclass(frozen=True)
class Parameter(Setting):
    """The declaration of one decoding parameter: a setting that each request may set itself."""

    _: KW_ONLY
    group: Section | None = Section.DECODING
    aliases: tuple[str, ...] = ()
    """Other names in a request, for OpenAI's and vLLM's clients."""
    off: tuple[float, ...] = ()
    """Values that switch the parameter off in a request; they are stored as None."""
    graphs: GraphSupport = GraphSupport.ANY
    is_inert: bool = False
    """A decoding without the parameter takes any value: it does nothing that the value could change."""
    own_field: bool = False
    """Request bodies get no field from this declaration: routes declare it themselves, e.g. ``logprobs``."""


def declare(default: T, kind: Kind, help: str, **more: Any) -> T:
    """A dataclass field with the declaration ``Setting(default, kind, help, **more)``."""
    return _declared(default, Setting(default, kind, help, **more))


def parameter(default: T, kind: Kind, help: str, **more: Any) -> T:
    """A dataclass field with the declaration of a decoding parameter, a ``Parameter``."""
    return _declared(default, Parameter(default, kind, help, **more))


def research(default: T, kind: Kind, help: str, **more: Any) -> T:
    """A parameter that selects a variant of a decoding, for research."""
    return parameter(default, kind, help, **{"group": Section.RESEARCH, **more})


def _declared(default: T, setting: Setting) -> T:
    value: T = field(default=default, metadata={_KEY: setting}, repr=not setting.secret)
    return value


_found: dict[type[Any], Mapping[str, Setting]] = {}


def settings(owner: type[Any]) -> Mapping[str, Setting]:
    """The declarations of a dataclass by field name, in order."""
    if owner not in _found:
        _found[owner] = {f.name: f.metadata[_KEY] for f in fields(owner) if _KEY in f.metadata}
    return _found[owner]


def refuse_unknown(options: Iterable[str], names: Sequence[str]) -> None:
    """Raises ParameterError for an option that is not in ``names``; the message lists them."""
    for option in options:
        if option not in names:
            raise ParameterError(option, f"unknown option; choose from {', '.join(names)}")


def check_settings(instance: object) -> None:
    """Checks each declared field of a frozen dataclass by itself, and replaces its value by the stored form. Raises
    ParameterError as ``checked_value``."""
    for name, setting in settings(type(instance)).items():
        object.__setattr__(instance, name, checked_value(name, getattr(instance, name), setting))


def checked_value(name: str, value: object, setting: Setting) -> object:
    """The value of a setting in its stored form. Raises ParameterError if it is not allowed."""
    if value is None and setting.default is None:
        return None
    try:
        return setting.kind.checked(value)
    except ParameterError as error:
        raise error.under(name) from None
    except ValueError as error:
        raise ParameterError(name, str(error)) from None


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps descriptions as written, and breaks help texts between words only: argparse cuts flags at hyphens."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False, break_long_words=False)
