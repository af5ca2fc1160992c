"""Problems that are told by one template each: comparisons, groups, prices, measures, ages, and small stories."""

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


FILES = (
    "relations", "singles", "changes", "products", "comparisons", "longer", "informal", "ordinary", "scenes",
    "contrasts", "worksheets", "textbooks", "daily", "typed", "world", "tricky", "topics", "combined",
    "subtraction", "addition", "division", "crowd", "money", "relative", "measures", "everyday",
    "totals", "gains", "groups", "needless", "multiples", "quizzes", "easy", "sharing",
    "classroom", "trials", "mine", "verbs", "trades", "structures", "things", "quantities",
    "comings", "home", "lessons", "messages", "packs", "purchases", "rivals",
    "brisk", "five", "implied", "projects", "speakers",
    "cues", "rates", "comparing", "backward", "syntax", "extras", "stages",
    "voices", "doubles", "budget", "flows", "terse", "portions", "primer", "plans",
    "chatter", "lengths", "trios", "idioms", "events", "readers", "goods", "kids",
    "everyone", "fourfold", "weighed", "askers", "situations", "details", "weekdays", "bunches",
)  # fmt: skip
"""Text files of templates in scripts/problems/wordings/."""


def _relations(file: str) -> list[Relation]:
    return [Relation(*line.split(" :: ")) for section in read(file).values() for line in section]


RELATIONS = [relation for file in FILES for relation in _relations(file)]
UNSEEN = _relations("unseen")
"""Wordings that are never trained on: they tell what the model makes of other people's words."""
