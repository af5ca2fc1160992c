"""What the documents of an op refuse, and the two ways to take them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class NpuConstraint(RuntimeError):
    """An op is called in a way that its documents exclude, or that this laboratory does not know."""


class _Mode:
    numeric = False


def require(condition: bool, what: str) -> None:
    if not condition:
        raise NpuConstraint(what)


def require_kind(condition: bool, what: str) -> None:
    """A constraint on a dtype or on the size of a head: it does not hold in numeric mode."""
    require(condition or _Mode.numeric, what)


@contextmanager
def numeric() -> Iterator[None]:
    """Numeric mode lifts the constraints on dtypes and head sizes, and no others: for models in float32 and small ones.

    Everything else is strict mode.
    """
    before, _Mode.numeric = _Mode.numeric, True
    try:
        yield
    finally:
        _Mode.numeric = before
