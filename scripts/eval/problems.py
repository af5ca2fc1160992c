"""Problems that the bundled model was not trained on, as `lopa_ascend.demo` has them, and the result of an answer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from lopa_ascend.demo import HANDWRITTEN, HELD_OUT, INDEPENDENT

SETS = {"held-out": HELD_OUT, "handwritten": HANDWRITTEN, "independent": INDEPENDENT}
"""The files of problems by the names that people use."""


@dataclass(frozen=True)
class Question:
    """A problem of one of the sets."""

    text: str
    result: int
    """The number that the answer must end in."""
    kind: str
    """Such as "add", "two steps" or "plain sum"."""


def read_set(path: Path, limit: int | None = None) -> list[Question]:
    """The problems of one of the files of `lopa_ascend.demo`.

    Args:
        path: the file. The answers in it are worked answers, or numbers.
        limit: how many problems, from the first one on; None for all.

    Raises:
        ValueError: an answer does not end in a number.
    """
    questions = []
    for line in path.read_text(encoding="utf-8").splitlines()[:limit]:
        row = json.loads(line)
        result = parse_result(row["answer"]) if isinstance(row["answer"], str) else row["answer"]
        if result is None:
            raise ValueError(f"{path}: the answer to {row['question']!r} has no number after ####")
        questions.append(Question(row["question"], result, row["kind"]))
    return questions


def read(limit: int | None = None) -> list[tuple[str, int]]:
    """The first held-out problems, or all: question and result."""
    return [(question.text, question.result) for question in read_set(HELD_OUT, limit)]


def asked(question: str) -> list[dict[str, str]]:
    """A conversation that is one question."""
    return [{"role": "user", "content": question}]


def parse_result(text: str) -> int | None:
    """The number after the last "####"; None if there is none."""
    words = text.rpartition("####")[2].split()
    return int(words[0]) if "####" in text and words and words[0].isdecimal() else None
