"""Problems that are told by one template each: comparisons, groups, prices, measures, ages, and small stories."""

from __future__ import annotations

import itertools
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


def relations_of(file: str) -> list[Relation]:
    """The wordings of a file.

    Raises:
        ValueError: a line does not have the three parts of a wording.
    """
    wordings = []
    for line in itertools.chain.from_iterable(read(file).values()):
        parts = line.split(" :: ")
        if len(parts) != 3:
            raise ValueError(f"{file}.txt: write a line as 'expression :: unit :: template', not {line!r}")
        wordings.append(Relation(*parts))
    return wordings


RELATIONS = [relation for file in FILES for relation in relations_of(file)]
UNSEEN = relations_of("unseen")
"""Wordings that are never trained on: they tell what the model makes of other people's words."""
