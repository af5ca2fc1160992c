"""Reads the text and JSON files of a model directory, with errors that name the file and what was expected.

A directory may come from anywhere, so reading is bounded: only regular files of limited size are opened, JSON has a
limited depth, and messages show at most the beginning of a value.
"""

from __future__ import annotations

import codecs
import json
import os
import re
import reprlib
import stat
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

SINGLE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
"""A model's weights in one file, or the index of several. The single file wins if both are there."""
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""The files of a PEFT adapter."""
MAX_FILE = 4 * 2**20
"""Default limit of a file in bytes. Configurations have some kilobytes."""
MAX_VOCABULARY = 32 * 2**20
"""Limit of a vocabulary file in bytes. The largest byte-level ones in use have 28 million."""
MAX_HEADER = 4 * 2**20
"""Limit of a safetensors header in bytes. A tensor takes some 120. Each mapped tensor reads the header again."""
MAX_DEPTH = 64
"""Most levels of nested objects and lists."""
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
"""A surrogate as JSON escapes it. A pair is a character, a single one is no text."""

_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother = 3, 120, 120
_SHORT.maxdict = _SHORT.maxlist = _SHORT.maxtuple = 8


def shown(value: object) -> str:
    """The shortened ``repr`` of a value, for messages. A full one can take seconds."""
    return _SHORT.repr(value)


def check_regular(file: Path, error_class: type[ValueError]) -> os.stat_result:
    """Raises ``error_class`` for anything but a regular file: opening a named pipe waits for a writer. Raises OSError
    if there is no file, or its status cannot be read."""
    try:
        status = file.stat()
    except ValueError as error:  # a NUL character, which no path has
        raise error_class(f"{str(file)!r}: {error}") from error
    if not stat.S_ISREG(status.st_mode):
        kind = "a directory" if stat.S_ISDIR(status.st_mode) else "a pipe, socket or device"
        raise error_class(f"{file}: is {kind}, expected a file")
    return status


def read_bytes(file: Path, error_class: type[ValueError], max_bytes: int) -> bytes:
    """The content of a file without a byte order mark. Raises ``error_class`` if it is too large, and as
    ``check_regular``."""
    size = check_regular(file, error_class).st_size
    if size > max_bytes:
        raise error_class(f"{file}: has {size} bytes, expected at most {max_bytes}")
    return file.read_bytes().removeprefix(codecs.BOM_UTF8)


def read_text(file: Path, error_class: type[ValueError], *, max_bytes: int = MAX_FILE) -> str:
    """The text of a UTF-8 file. Raises ``error_class`` if it cannot be read, is too large, or is not UTF-8."""
    try:
        return read_bytes(file, error_class, max_bytes).decode("utf-8")
    except OSError as error:
        raise error_class(f"{file}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise error_class(f"{file}: is not UTF-8 text ({error})") from error


def read_json_object(
    file: Path, error_class: type[ValueError], *, optional: bool = False, max_bytes: int = MAX_FILE
) -> dict[str, Any]:
    """The JSON object in a file; an ``optional`` file that does not exist counts as an empty one. Raises
    ``error_class`` if the file cannot be read, is too large, or holds no JSON object."""
    try:
        raw = read_bytes(file, error_class, max_bytes)
    except OSError as error:
        if optional and isinstance(error, FileNotFoundError | NotADirectoryError):
            return {}
        raise error_class(f"{file}: cannot be read ({error.strerror}), expected a JSON object") from error
    try:
        return parse_json_object(raw)
    except TypeError as error:
        raise error_class(f"{file}: {error}") from error
    except ValueError as error:
        raise error_class(f"{file}: is not valid JSON ({error}), expected a JSON object") from error


def parse_json_object(raw: bytes) -> dict[str, Any]:
    """The JSON object in UTF-8 text. Raises TypeError for another value, and ValueError for text that is not UTF-8 or
    JSON, has a name twice in an object, or is nested too deeply."""
    too_deep = f"objects and lists are nested more than {MAX_DEPTH} levels deep"
    try:
        value = strict_json(raw)
    except RecursionError:
        raise ValueError(too_deep) from None
    if not isinstance(value, dict):
        raise TypeError(f"expected a JSON object, found {type(value).__name__}")
    if _depth(value) > MAX_DEPTH:
        raise ValueError(too_deep)
    if _SURROGATE.search(raw):
        json.dumps(value, ensure_ascii=False).encode()  # raises UnicodeEncodeError for half a character
    return value


def strict_json(raw: bytes, **numbers: Any) -> Any:
    """The value of JSON in UTF-8. Names in an object must differ: readers disagree on which of two equal ones counts.
    Raises ValueError and RecursionError as ``json.loads``, which gets the options ``numbers``."""
    return json.loads(raw.decode("utf-8"), object_pairs_hook=_unique, **numbers)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError(f"the name {shown(repeated(name for name, _ in pairs))} occurs twice in an object")
    return values


def repeated(names: Iterable[Any]) -> Any:
    """The first name that occurs twice; None if all differ."""
    return next((name for name, count in Counter(names).items() if count > 1), None)


def _depth(value: object) -> int:
    """Levels of nested objects and lists; counting stops at ``MAX_DEPTH`` + 1."""
    level, depth = [value], 0
    while level and depth <= MAX_DEPTH:
        depth += 1
        level = [item for container in level for item in _items(container) if isinstance(item, dict | list)]
    return depth


def _items(container: object) -> Iterable[object]:
    if isinstance(container, dict):
        return container.values()
    return container if isinstance(container, list) else ()


class ConfigError(ValueError):
    """A model configuration that this engine cannot run. The message names file and field, and what was expected."""


class Fields:
    """The fields of a JSON object from the file ``source``. ``names`` has the file's names of fields, by the names that
    the methods take, if they differ."""

    def __init__(self, values: Mapping[str, Any], source: str, names: Mapping[str, str] | None = None):
        self.values, self.source, self._names = values, source, names or {}
        self.read: set[str] = set()
        """The file's names of the fields that were asked for."""

    def name(self, field: str) -> str:
        return self._names.get(field, field)

    def has(self, field: str) -> bool:
        return self.get(field) is not None

    def get(self, field: str, default: object = None) -> Any:
        """The unchecked value of a field."""
        self.read.add(self.name(field))
        return self.values.get(self.name(field), default)

    def error(self, name: str, expected: str) -> ConfigError:
        return ConfigError(f"{self.source}: {self.name(name)} is {shown(self.get(name))}, expected {expected}")

    def expect(self, name: str, allowed: tuple[object, ...], default: object = None) -> None:
        """Raises ConfigError if the field has another value than the allowed ones."""
        if self.get(name, default) not in allowed:
            raise self.error(name, " or ".join(map(repr, allowed)))

    def integer(self, name: str, at_most: int, default: int | None = None) -> int:
        """A positive integer. ``at_most`` is far more than any model has: it bounds time and memory that depend on the
        field. Without a default the field must be there."""
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(name, "a positive integer")
        if value > at_most:
            raise self.error(name, f"at most {at_most}")
        return value

    def number(self, name: str, default: float, *, at_least: float = 0.0, at_most: float = 1e12) -> float:
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value:
            raise self.error(name, "a positive number")
        if not at_least <= value <= at_most:
            raise self.error(name, f"a number from {at_least:g} to {at_most:g}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise self.error(name, "true or false")
        return value

    def token(self, name: str, vocab: int) -> int:
        value = self.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < vocab:
            raise self.error(name, f"a token id below {self.name('vocab_size')} {vocab}")
        return value
