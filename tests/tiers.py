"""What every run of the tests has, and what only those with the tests marked slow: cases of a parametrised test, and
examples of a property."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest
from hypothesis import settings


def slow_but(cases: Iterable[Any], ordinary: Collection[Any]) -> list[Any]:
    """The cases for ``pytest.mark.parametrize``, all but the ``ordinary`` ones marked slow.

    Args:
        cases: all of them; a tuple is a value for each argument.
        ordinary: those that show every behaviour once.
    """
    cases = list(cases)
    unknown = [case for case in ordinary if case not in cases]
    assert not unknown, f"{unknown} are no cases"
    values = [case if isinstance(case, tuple) else (case,) for case in cases]
    marks = [() if case in ordinary else pytest.mark.slow for case in cases]
    return [pytest.param(*each, marks=mark) for each, mark in zip(values, marks, strict=True)]


def examples(count: int) -> int:
    """Examples of a property that is tested with ``count`` by default, in the profile of hypothesis that is loaded."""
    usual = settings.get_profile("repeatable").max_examples
    return max(count * settings().max_examples // usual, 1)
