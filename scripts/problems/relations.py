"""Problems in which nothing changes: parts and wholes, comparisons, groups, shares, prices, measures, ages, times."""

from __future__ import annotations

from dataclasses import dataclass

from scripts.problems.wordings import read


@dataclass(frozen=True)
class Relation:
    """One wording."""

    expression: str
    """How the result is calculated from the numbers."""
    unit: str
    """Template of what the result counts."""
    template: str
    """The problem; the numbers are its slots."""


RELATIONS = [Relation(*line.split(" :: ")) for lines in read("relations").values() for line in lines]
