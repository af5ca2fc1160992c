"""Problems that the bundled model was not trained on, as `lopa_ascend.demo` has them, and the result of an answer."""

from __future__ import annotations

import json
from pathlib import Path

from lopa_ascend.demo import HANDWRITTEN, HELD_OUT, INDEPENDENT

SETS = {"held-out": HELD_OUT, "handwritten": HANDWRITTEN, "independent": INDEPENDENT}
"""The files of problems by the names that people use."""


def read(limit: int | None = None, path: Path = HELD_OUT) -> list[tuple[str, int]]:
    """Questions of a file, and the numbers that their answers must end in.

    Args:
        limit: how many problems, from the first one on; None for all.
        path: the file. The answers in it are worked answers, or numbers.

    Raises:
        ValueError: an answer does not end in a number.
    """
    problems = []
    for line in path.read_text(encoding="utf-8").splitlines()[:limit]:
        row = json.loads(line)
        result = parse_result(row["answer"]) if isinstance(row["answer"], str) else row["answer"]
        if result is None:
            raise ValueError(f"{path}: the answer to {row['question']!r} has no number after ####")
        problems.append((row["question"], result))
    return problems


def asked(question: str) -> list[dict[str, str]]:
    """A conversation that is one question."""
    return [{"role": "user", "content": question}]


def parse_result(text: str) -> int | None:
    """The number after the last "####"; None if there is none."""
    words = text.rpartition("####")[2].split()
    return int(words[0]) if "####" in text and words and words[0].isdecimal() else None
