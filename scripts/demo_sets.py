"""The sets of problems that judge the bundled model: held-out, worded by others, and typed in other ways.

`scripts.eval_demo` measures the model on them. None of their problems is trained on.
"""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lopa_ascend.demo import HELD_OUT
from scripts.demo_problems import Message, is_held_out, parse_result, problems
from scripts.problems.relations import UNSEEN
from scripts.problems.telling import NAME, tell, tell_next, tell_relation
from scripts.problems.working import answer

NEW_NAMES = (
    "Thaddeus", "Eowyn", "Caspian", "Leocadia", "Balthasar", "Cressida", "Hortense", "Evander", "Guinevere", "Tiberius",
)  # fmt: skip
"""Names that no training problem has."""
OTHER_SEED = 100
"""Of held-out problems beside those of the file."""
SYSTEM_PROMPT = "You are a helpful assistant."
CALCULATION = re.compile(r": \d+[-+*/]\d")
"""Begins each step of a worked answer."""
STEPS = {"two steps": 2, "three steps": 3, "four steps": 4, "five steps": 5}
"""By kind."""
Conversation = list[Message]


@dataclass(frozen=True)
class Question:
    """A problem of one of the sets."""

    text: str
    result: int
    """The number that the answer must end in."""
    kind: str
    """As in `scripts.problems.working.kind_of`."""
    worked_answer: str = ""
    """The answer that a training problem would have, with each step; empty where other people worded the problem."""

    @property
    def num_steps(self) -> int:
        """Calculations of the worked answer; without one by the kind, where a plain sum has one fewer than numbers."""
        if self.worked_answer:
            return len(CALCULATION.findall(self.worked_answer))
        if self.kind == "plain sum":
            return max(1, len(re.findall(r"\d+", self.text)) - 1)
        return STEPS.get(self.kind, 1)


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
        worked_answer = row["answer"] if isinstance(row["answer"], str) else ""
        result = parse_result(worked_answer) if worked_answer else row["answer"]
        if result is None:
            raise ValueError(f"{path}: the answer to {row['question']!r} has no number after ####")
        questions.append(Question(row["question"], result, row["kind"], worked_answer))
    return questions


def read(limit: int | None = None) -> list[tuple[str, int]]:
    """The first held-out problems, or all: question and result."""
    return [(question.text, question.result) for question in read_set(HELD_OUT, limit)]


def asked(question: str) -> Conversation:
    """A conversation that is one question."""
    return [{"role": "user", "content": question}]


def unseen(count: int) -> list[Question]:
    """Problems of different templates that no training problem is made from."""
    rng = random.Random(3)
    chosen = rng.sample(UNSEEN, min(count, len(UNSEEN)))
    narratives = [tell_relation(rng, relation) for relation in chosen]
    return [Question(narrative.question, narrative.steps[-1].result, narrative.kind) for narrative in narratives]


def other_held_out(count: int) -> list[Question]:
    """Held-out problems that are not in the file.

    They choose between checkpoints, so that the choice does not flatter the figures of the file.
    """
    in_file = {question.text for question in read_set(HELD_OUT)}
    stream = problems(OTHER_SEED, held_out=True, plain=True)
    others = (problem for problem in stream if problem.question not in in_file)
    return [
        Question(problem.question, problem.result, problem.kind, problem.answer)
        for problem in itertools.islice(others, count)
        if problem.result is not None
    ]


def typed_ways(limit: int) -> tuple[dict[str, list[Conversation]], list[int]]:
    """Held-out problems as people type them, and after other messages.

    Args:
        limit: number of problems, at most one fewer than the file has: the problem behind each comes first as an
            earlier turn.

    Returns:
        the conversations by way of typing, and the results, which are the same for each way.
    """
    *questions, last = read_set(HELD_OUT, limit + 1)
    system = [{"role": "system", "content": SYSTEM_PROMPT}]
    other_problems = [*questions[1:], last]
    earlier = [
        [*asked(question.text), {"role": "assistant", "content": question.worked_answer}] for question in other_problems
    ]
    changes: dict[str, Callable[[str], str]] = {
        "plain": lambda text: text,
        'without "?"': lambda text: text.rstrip("?"),
        "with a newline at the end": lambda text: text + "\n",
        "in lower case": str.lower,
        "with new names": with_new_names,
    }
    texts = [question.text for question in questions]
    ways = {name: [asked(change(text)) for text in texts] for name, change in changes.items()}
    ways["after a system prompt"] = [system + asked(text) for text in texts]
    ways["in a second turn"] = [before + asked(text) for before, text in zip(earlier, texts, strict=True)]
    return ways, [question.result for question in questions]


def with_new_names(question: str) -> str:
    """The question with its names replaced by ``NEW_NAMES``."""
    names = list(dict.fromkeys(NAME.findall(question)))
    for name, new_name in zip(names, random.Random(question).sample(NEW_NAMES, len(names)), strict=True):
        question = re.sub(rf"\b{name}\b", new_name, question)
    return question


def going_on(count: int) -> tuple[list[Conversation], list[int]]:
    """Conversations of two questions, the second of which needs the answer to the first; and the results of the second.

    The first question is held out, and its answer stands between the two.
    """
    rng = random.Random(7)
    conversations: list[Conversation] = []
    results: list[int] = []
    while len(conversations) < count:
        narrative = tell(rng)
        following = tell_next(rng, narrative) if is_held_out(narrative.question) else None
        if following:
            reply = {"role": "assistant", "content": answer(rng, narrative.steps, narrative.unit)}
            conversations.append([*asked(narrative.question), reply, *asked(following.question)])
            results.append(following.steps[-1].result)
    return conversations, results
