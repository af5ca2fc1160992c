"""Names, people, objects and places that occur in problems."""

from __future__ import annotations

from scripts.problems.wordings import read_words

WORDS = read_words()
"""By section of words.txt. An entry "box/boxes" is a noun with an irregular plural."""
WOMEN, MEN = WORDS["women"], WORDS["men"]


def plural(entry: str) -> str:
    """The plural of an entry, which is a regular noun, or "singular/plural"."""
    singular, _, irregular = entry.partition("/")
    return irregular or singular + "s"


def singular(entry: str) -> str:
    """The singular of an entry."""
    return entry.partition("/")[0]
