"""Typed access to the fields of a JSON object, with errors that name the file, the field and what was expected."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lopa_ascend.config.files import shown


class ConfigError(ValueError):
    """A model configuration that this engine cannot run. The message names file and field, and what was expected."""


class Fields:
    """The fields of a JSON object.

    Args:
        values: the object.
        source: path of its file.
    """

    def __init__(self, values: Mapping[str, Any], source: str):
        self.values, self.source = values, source

    def error(self, name: str, expected: str) -> ConfigError:
        """The error of a field whose value is not what was expected."""
        return ConfigError(f"{self.source}: {name} is {shown(self.values.get(name))}, expected {expected}")

    def expect(self, name: str, allowed: tuple[object, ...], default: object = None) -> None:
        """Raises ConfigError if the field has another value than the allowed ones."""
        if self.values.get(name, default) not in allowed:
            raise self.error(name, " or ".join(map(repr, allowed)))

    def integer(self, name: str, at_most: int, default: int | None = None) -> int:
        """A positive integer.

        Args:
            name: the field.
            at_most: far more than any model has. It bounds the time and memory of everything that depends on the field.
            default: of a field that is missing; None: the field must be there.
        """
        value = self.values.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(name, "a positive integer")
        if value > at_most:
            raise self.error(name, f"at most {at_most}")
        return value

    def number(self, name: str, default: float, *, at_least: float = 0.0, at_most: float = 1e12) -> float:
        """A positive number in a range."""
        value = self.values.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value:
            raise self.error(name, "a positive number")
        if not at_least <= value <= at_most:
            raise self.error(name, f"a number from {at_least:g} to {at_most:g}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self.values.get(name, default)
        if not isinstance(value, bool):
            raise self.error(name, "true or false")
        return value

    def token(self, name: str, vocab: int) -> int:
        """A token id."""
        value = self.values.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < vocab:
            raise self.error(name, f"a token id below vocab_size {vocab}")
        return value
