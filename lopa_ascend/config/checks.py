"""Checks of values, which name the field at fault."""

from __future__ import annotations


class ParameterError(ValueError):
    """A wrong value; ``param`` names the field."""

    def __init__(self, param: str, message: str):
        super().__init__(f"{param}: {message}")
        self.param = param


def choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if not (isinstance(value, str) and value in choices):
        raise ParameterError(name, f"unknown value {value!r}; choose one of {', '.join(choices)}")


def number(name: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ParameterError(name, f"must be a number from {low:g} to {high:g}, got {value!r}")


def integer(name: str, value: object, low: int, high: int = 2**31 - 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        limit = f"an integer of at least {low}" if high == 2**31 - 1 else f"an integer from {low} to {high}"
        raise ParameterError(name, f"must be {limit}, got {value!r}")


def flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ParameterError(name, f"must be true or false, got {value!r}")
