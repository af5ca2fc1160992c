"""Reads the wordings of problems from the text files of this package."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent / "wordings"


def read(name: str) -> dict[str, list[str]]:
    """The lines of each section of a file; a section begins with "== title", and lines with "# " are comments."""
    sections: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in (FOLDER / f"{name}.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("== "):
            lines = sections.setdefault(line.removeprefix("== "), [])
        elif line and not line.startswith("# "):
            lines.append(line)
    return sections


def read_words() -> dict[str, list[str]]:
    """The words of each section of words.txt."""
    return {
        title: [word for line in lines for word in line.removesuffix(",").split(", ")]
        for title, lines in read("words").items()
    }
