"""Constraints that the documents of the ops state, and the mode that lifts some of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class NpuConstraint(RuntimeError):
    """An op was called in a way that its documents exclude, or that the laboratory does not implement."""


class _Mode:
    numeric = False


def require(condition: bool, what: str) -> None:
    """A constraint that always holds; ``what`` is the message when it is broken."""
    if not condition:
        raise NpuConstraint(what)


def require_kind(condition: bool, what: str) -> None:
    """A constraint on a dtype or on the size of a head, which numeric mode lifts."""
    require(condition or _Mode.numeric, what)


@contextmanager
def numeric() -> Iterator[None]:
    """Numeric mode, for small models and for models in float32: it lifts the constraints on dtypes and head sizes.

    All other constraints hold. Strict mode is whatever is not inside this context.
    """
    before, _Mode.numeric = _Mode.numeric, True
    try:
        yield
    finally:
        _Mode.numeric = before
