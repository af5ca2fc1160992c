"""The kinds of values of settings: which are allowed, and how text spells them."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from lopa_ascend.config.errors import ParameterError
from lopa_ascend.config.files import shown
from lopa_ascend.types import Grammar

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1
INT64_MIN = -(2**63)
AUTO = "auto"
MAX_TOKEN_IDS = 2**16
"""Most token ids in a list, and in the lists of all choices of a request together."""


UNITS = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def parse_size(text: str) -> int:
    """Bytes of a size such as 4096, 512MiB or 1.5 GiB. Raises ValueError for other text."""
    match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,18})?) ?([KMGT]iB|)", text)
    if match is None:
        raise ValueError(f"must be a number of bytes, or a number with a unit, e.g. 512MiB or 4GiB; got {text!r}")
    return int(float(match[1]) * UNITS[match[2]])


def format_size(num_bytes: float) -> str:
    """A size rounded to one decimal, in its largest unit: "1.5 GiB"."""
    unit = max((unit for unit in UNITS if UNITS[unit] <= num_bytes), key=UNITS.__getitem__, default="")
    return f"{num_bytes / UNITS[unit]:.1f} {unit}" if unit else f"{num_bytes:.0f} B"


def exact_size(num_bytes: int) -> str:
    """An exact size, in the largest unit that divides it: "8MiB". ``parse_size`` reads it back."""
    unit = max((unit for unit in UNITS if num_bytes % UNITS[unit] == 0), key=UNITS.__getitem__) if num_bytes else ""
    return f"{num_bytes // UNITS[unit]}{unit}"


def _text(value: str) -> str:
    """A string as ``str`` itself. Raises ValueError for a lone surrogate, which UTF-8 cannot express."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{shown(value)} is not text: {error.reason} at character {error.start}") from error
    return str(value)


class Kind(ABC):
    metavar: ClassVar[str]
    """Stands for a value in --help."""
    many: ClassVar[bool] = False
    """A setting of this kind holds several values."""

    @abstractmethod
    def checked(self, value: object) -> object:
        """The value in its stored form.

        Raises:
            ValueError: the value is not allowed; the message says what is.
            ParameterError: a part of the value is not allowed; the path begins inside the value.
        """

    def parse(self, text: str) -> Any:
        """One value from a command line or a configuration file; ``checked`` decides whether it is allowed. Raises
        ValueError for text that spells no value."""
        return text

    @abstractmethod
    def allowed(self) -> str:
        """The allowed values in words."""


@dataclass(frozen=True)
class AnyText(Kind):
    """Any text in UTF-8 without NUL characters, which no path, name or address has."""

    metavar: ClassVar[str] = "TEXT"

    def checked(self, value: object) -> object:
        if isinstance(value, str) and "\0" in value:
            raise ValueError(f"has a NUL character after {value.index(chr(0))} others")
        return _text(value) if isinstance(value, str) else value

    def allowed(self) -> str:
        return "any text"


@dataclass(frozen=True)
class Choice(Kind):
    metavar: ClassVar[str] = "CHOICE"
    choices: tuple[str, ...]

    @property
    def known(self) -> tuple[str, ...]:
        """All allowed texts: ``choices``, and those of other packages."""
        return self.choices

    def checked(self, value: object) -> object:
        if not (isinstance(value, str) and value in self.known):
            raise ValueError(f"unknown value {shown(value)}; choose one of {', '.join(self.known)}")
        return str(value)  # numpy.str_ is a str too, and cannot be sent to other processes

    def allowed(self) -> str:
        return ", ".join(f'"{choice}"' for choice in self.choices)


@dataclass(frozen=True)
class Choices(Kind):
    """Some of several texts, stored as a tuple in the order of ``choices``. One text alone is taken as well."""

    metavar: ClassVar[str] = "NAME"
    many: ClassVar[bool] = True
    choices: tuple[str, ...]

    def checked(self, value: object) -> object:
        names = (value,) if isinstance(value, str) else value
        if not isinstance(names, list | tuple):
            raise ValueError(f"must be a list of {self.allowed()}, got {shown(value)}")
        for name in names:
            Choice(self.choices).checked(name)
        return tuple(choice for choice in self.choices if choice in names)

    def allowed(self) -> str:
        return Choice(self.choices).allowed()


@dataclass(frozen=True)
class Boolean(Kind):
    metavar: ClassVar[str] = ""

    def checked(self, value: object) -> object:
        if not isinstance(value, bool):
            raise ValueError(f"must be true or false, got {shown(value)}")
        return value

    def parse(self, text: str) -> bool:
        if text not in ("true", "false"):
            raise ValueError(f"must be true or false, got {shown(text)}")
        return text == "true"

    def allowed(self) -> str:
        return "true, false"


@dataclass(frozen=True)
class Integer(Kind):
    metavar: ClassVar[str] = "N"
    low: int
    high: int | None = None
    """None: the largest 32-bit integer, which messages and schemas do not mention."""

    @property
    def largest(self) -> int:
        return INT32_MAX if self.high is None else self.high

    def checked(self, value: object) -> object:
        if isinstance(value, bool) or not isinstance(value, int) or not self.low <= value <= self.largest:
            raise self._refusal(value)
        return value

    def parse(self, text: str) -> int:
        try:
            return int(text)
        except ValueError:
            raise self._refusal(text) from None

    def _refusal(self, value: object) -> ValueError:
        if self.high is None and isinstance(value, int) and value > self.largest:
            return ValueError(f"must be at most {self.largest}, got {shown(value)}")
        limit = f"of at least {self.low}" if self.high is None else f"from {self.low} to {self.high}"
        return ValueError(f"must be an integer {limit}, got {shown(value)}")

    def allowed(self) -> str:
        if self.low == INT64_MIN:
            return "signed, 64 bits"
        return f"{self.low} or more" if self.largest >= INT32_MAX else f"{self.low} to {self.high}"


@dataclass(frozen=True)
class IntegerOrAuto(Integer):
    """Also "auto": the engine chooses."""

    metavar: ClassVar[str] = "N|auto"

    def checked(self, value: object) -> object:
        return value if value == AUTO else super().checked(value)

    def parse(self, text: str) -> int | str:  # type: ignore[override]
        return text if text == AUTO else super().parse(text)

    def _refusal(self, value: object) -> ValueError:
        return ValueError(f'must be an integer from {self.low} to {self.high} or "{AUTO}", got {shown(value)}')

    def allowed(self) -> str:
        return f'{super().allowed()}, "{AUTO}"'


@dataclass(frozen=True)
class Bytes(Integer):
    metavar: ClassVar[str] = "SIZE"
    high: int | None = INT64_MAX

    def parse(self, text: str) -> int:
        return parse_size(text)


@dataclass(frozen=True)
class Number(Kind):
    metavar: ClassVar[str] = "X"
    low: float
    high: float
    unit: str = ""
    """For messages, e.g. "seconds"."""

    def checked(self, value: object) -> object:
        if isinstance(value, bool) or not isinstance(value, int | float) or not self.low <= value <= self.high:
            raise self._refusal(value)
        # numpy.float64 is a float too. Adding 0 turns -0.0, whose bits are those of no threshold, into 0.0.
        return value if isinstance(value, int) else float(value) + 0.0

    def parse(self, text: str) -> float:
        try:
            return float(text)
        except ValueError:
            raise self._refusal(text) from None

    def _refusal(self, value: object) -> ValueError:
        unit = f" of {self.unit}" if self.unit else ""
        return ValueError(f"must be a number{unit} from {self.allowed()}, got {shown(value)}")

    def allowed(self) -> str:
        return f"{self.low:g} to {self.high:g}"


@dataclass(frozen=True)
class Strings(Kind):
    """Non-empty strings, stored as a tuple. One string alone is taken as well."""

    metavar: ClassVar[str] = "TEXT"
    many: ClassVar[bool] = True
    max_items: int = 64
    max_characters: int = 4096
    """Of all strings together."""

    def checked(self, value: object) -> object:
        strings = (value,) if isinstance(value, str) else value
        most = f"must be at most {self.max_items} non-empty strings of {self.max_characters} characters together"
        if not isinstance(strings, list | tuple) or len(strings) > self.max_items:
            raise ValueError(f"{most}, got {shown(value)}")
        if not all(isinstance(item, str) and item for item in strings):
            raise ValueError(f"{most}, got {shown(value)}")
        if (total := sum(map(len, strings))) > self.max_characters:
            raise ValueError(f"{most}, got {total} characters")
        return tuple(map(_text, strings))

    def allowed(self) -> str:
        return "non-empty strings"


@dataclass(frozen=True)
class TokenIds(Kind):
    """Token ids, stored as a tuple without repetitions. One id alone is taken as well."""

    metavar: ClassVar[str] = "N"
    many: ClassVar[bool] = True
    token: ClassVar[Integer] = Integer(0)
    """The model's vocabulary limits an id further."""
    max_items: int = MAX_TOKEN_IDS

    def checked(self, value: object) -> object:
        ids = value if isinstance(value, list | tuple) else (value,)
        if len(ids) > self.max_items:
            raise ValueError(f"must have at most {self.max_items} token ids, got {len(ids)}")
        unique = tuple(dict.fromkeys(self.token.checked(item) for item in ids))
        # The same object where nothing changes, so that the choices of a request share one.
        return ids if isinstance(ids, tuple) and len(ids) == len(unique) else unique

    def parse(self, text: str) -> int:
        return self.token.parse(text)

    def allowed(self) -> str:
        return "one token id or several"


@dataclass(frozen=True)
class Words(Kind):
    """Non-empty strings, or lists of token ids, which are stored as tuples.

    A string becomes two lists of token ids before it reaches the engine, so twice as many lists are allowed.
    """

    metavar: ClassVar[str] = "TEXT"
    many: ClassVar[bool] = True
    max_texts: int
    max_characters: int
    """Of one string."""

    @property
    def max_tokens(self) -> int:
        """Of one list. A string has at most one token for each byte of UTF-8, and one for a space. A character takes
        up to 12 bytes after normalisation to NFC."""
        return 12 * self.max_characters + 1

    @property
    def max_total(self) -> int:
        """Most token ids of all lists together, because every forward pass reads them."""
        return self.max_texts * self.max_characters

    def checked(self, value: object) -> object:
        words = (value,) if isinstance(value, str) else value
        if not isinstance(words, list | tuple):
            raise ValueError(f"must be {self.allowed()}, got {shown(value)}")
        num_lists = sum(2 if isinstance(word, str) else 1 for word in words)
        if num_lists > 2 * self.max_texts:
            raise ValueError(f"must be {self.allowed()}, got {len(words)} words")
        checked = tuple(self._checked_word(word) for word in words)
        if (total := sum(len(word) for word in checked if not isinstance(word, str))) > self.max_total:
            raise ValueError(f"must have at most {self.max_total} token ids in all, got {total}")
        return checked

    def _checked_word(self, word: object) -> str | tuple[object, ...]:
        longest = self.max_characters if isinstance(word, str) else self.max_tokens
        if not isinstance(word, str | list | tuple) or not 0 < len(word) <= longest:
            raise ValueError(f"must be {self.allowed()}, got {shown(word)}")
        return _text(word) if isinstance(word, str) else tuple(TokenIds.token.checked(token) for token in word)

    def allowed(self) -> str:
        return (
            f"at most {self.max_texts} texts of at most {self.max_characters} characters, or twice as many lists of at "
            f"most {self.max_tokens} token ids; {self.max_total} token ids in all"
        )


@dataclass(frozen=True)
class TokenNumbers(Kind):
    """Numbers by token id, stored as (token id, number) sorted by id. A mapping is taken too; its keys may be texts."""

    metavar: ClassVar[str] = "ID:X"
    many: ClassVar[bool] = True
    number: Number
    max_items: int = MAX_TOKEN_IDS

    def checked(self, value: object) -> object:
        pairs = list(value.items()) if isinstance(value, Mapping) else value
        if isinstance(pairs, list | tuple) and len(pairs) > self.max_items:
            raise ValueError(f"must have at most {self.max_items} token ids, got {len(pairs)}")
        if not isinstance(pairs, list | tuple) or not all(isinstance(p, list | tuple) and len(p) == 2 for p in pairs):
            raise ValueError(f"must map token ids to numbers, got {shown(value)}")
        found: dict[object, object] = {}
        for token, number in pairs:
            token_id = TokenIds.token.checked(self._from_key(token) if isinstance(token, str) else token)
            if token_id in found:
                raise ValueError(f"has two numbers for token id {token_id}")
            found[token_id] = self.number.checked(number)
        return tuple(sorted(found.items()))

    def _from_key(self, key: str) -> object:
        """The token id in a JSON key. ``int`` alone takes "1_0", "+8" and the digits of other scripts."""
        return TokenIds.token.parse(key) if key.isascii() and key.isdecimal() else key

    def parse(self, text: str) -> tuple[int, float]:
        token, _, number = text.partition(":")
        return TokenIds.token.parse(token), self.number.parse(number)

    def allowed(self) -> str:
        return f"token ids with numbers from {self.number.allowed()}"


@dataclass(frozen=True)
class StructuredOutputs(Kind):
    """A grammar in the form of vLLM's ``structured_outputs``: an object with one of ``forms``."""

    metavar: ClassVar[str] = "OBJECT"
    forms: ClassVar[tuple[str, ...]] = ("json", "json_object", "regex", "choice", "grammar")
    max_characters: int
    """Of a schema, an expression or a grammar, or of all choices together."""
    max_choices: int

    def checked(self, value: object) -> object:
        if isinstance(value, Grammar):
            return value
        if not isinstance(value, Mapping):
            raise ValueError(f"must be {self.allowed()}, got {shown(value)}")
        given = {name: item for name, item in value.items() if item is not None}
        if unknown := given.keys() - {*self.forms}:
            raise ValueError(f"has {shown(min(unknown, key=str))}; choose one of {', '.join(self.forms)}")
        if len(given) != 1:
            raise ValueError(f"must have one of {', '.join(self.forms)}, got {', '.join(given) or 'none'}")
        [(kind, item)] = given.items()
        text = self._text_of(kind, item)
        if len(text) > self.max_characters:
            raise ParameterError(kind, f"must have at most {self.max_characters} characters, got {len(text)}")
        return Grammar(kind, text)

    def _text_of(self, kind: str, item: object) -> str:
        if kind == "json_object":
            if item is not True:
                raise ParameterError(kind, f"must be true, got {shown(item)}")
            return ""
        if kind == "json":
            return self._schema(item)
        if kind == "choice":
            if not isinstance(item, list | tuple) or not 0 < len(item) <= self.max_choices:
                raise ParameterError(kind, f"must be a list of 1 to {self.max_choices} texts, got {shown(item)}")
            for index, text in enumerate(item):
                if not isinstance(text, str) or not text:
                    raise ParameterError((kind, index), f"must be a text that is not empty, got {shown(text)}")
            return json.dumps(list(dict.fromkeys(map(_text, item))))
        if not isinstance(item, str) or not item:
            raise ParameterError(kind, f"must be a text that is not empty, got {shown(item)}")
        return _text(item)

    def _schema(self, item: object) -> str:
        """A JSON schema, given as an object or as text, on one line. The order of its keys stays."""
        if isinstance(item, str) and len(item) > self.max_characters:
            return item
        try:
            schema = json.loads(item) if isinstance(item, str) else item
            text = json.dumps(schema, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise ParameterError("json", f"is no JSON: {error}") from None
        if not isinstance(schema, dict | bool):
            raise ParameterError("json", f"must be a JSON schema, got {shown(schema)}")
        return text

    def allowed(self) -> str:
        return f"an object with one of {', '.join(self.forms)}"
