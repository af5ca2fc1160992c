"""Reads the wordings of problems from the text files of this package."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent / "wordings"


def read(name: str) -> dict[str, list[str]]:
    """The lines of each section of a file; a section begins with "== title", and lines with "# " are comments.

    Raises:
        ValueError: a line stands before the first section.
    """
    sections: dict[str, list[str]] = {}
    title = None
    text = (FOLDER / f"{name}.txt").read_text(encoding="utf-8")
    for number, line in enumerate(text.splitlines(), start=1):
        if line.startswith("== "):
            title = line.removeprefix("== ")
            sections.setdefault(title, [])
        elif line and not line.startswith("# "):
            if title is None:
                raise ValueError(f"{name}.txt, line {number}: begin a section before it, with '== title'")
            sections[title].append(line)
    return sections


def read_words() -> dict[str, list[str]]:
    """The words of each section of words.txt."""
    return {
        title: [word for line in lines for word in line.removesuffix(",").split(", ")]
        for title, lines in read("words").items()
    }
