"""Stories of an amount that changes: how each kind begins, grows, shrinks and is asked for."""

from __future__ import annotations

from dataclasses import dataclass

from scripts.problems.lexicon import WORDS
from scripts.problems.wordings import read

SECTIONS = read("stories")


@dataclass(frozen=True)
class Story:
    """The wordings of one kind of story; "{n}" is the number of each."""

    nouns: list[str]
    """What is counted."""
    start: list[str]
    """There are n."""
    more: list[str]
    """n come."""
    fewer: list[str]
    """n go."""
    ask: list[str]
    """How many are there at the end?"""
    ask_left: list[str]
    """The same, where some went."""


def _story(name: str, nouns: str) -> Story:
    """The story whose sections begin with ``name``, about a section of nouns."""
    wordings = [SECTIONS[f"{name} {part}"] for part in ("start", "more", "fewer", "ask", "ask_left")]
    return Story(WORDS[nouns], *wordings)


OWNED = _story("owned", "things")
PEOPLE = _story("people", "people")
ANIMALS = _story("animals", "animals")
MONEY = _story("money", "money")
SHOP = _story("shop", "things")
STORIES = (OWNED, OWNED, PEOPLE, ANIMALS, MONEY, SHOP)
"""With the frequency of each."""
