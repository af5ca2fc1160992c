"""The tasks that can be evaluated: what a problem must hold, what the model is asked, and how its answer is scored.

Prompts, stop strings and scores are those of lm-eval's tasks of the same name; of the tasks with "plus" in their name,
those of evalplus, on the data sets of that name which Hugging Face has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from scripts.eval import scoring

Problem = Mapping[str, Any]
"""One line of a task file."""
Scores = dict[str, float]
"""By metric, 0 or 1."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """One kind of problem."""

    name: str
    fields: Mapping[str, type]
    """What a line of a task file must have: a text or a list of texts by each of these names."""
    question: Callable[[Problem], str]
    """What the model is asked."""
    example_answer: Callable[[Problem], str]
    """The answer that an example in the prompt shows."""
    separator: str
    """What stands between question and answer of an example, where both are in one text."""
    stop: tuple[str, ...]
    """Strings that end an answer; none where the score itself says what belongs to the program."""
    score: Callable[[Problem, str], Scores]
    """The scores of an answer, which was cut at ``stop`` or not, as the evaluation wants it."""
    metric: str
    """The score that tables show."""
    runs_code: bool = False
    """Answers are programs, which a sandbox runs."""
    check: Callable[[Problem], None] = lambda problem: None
    """Raises ValueError for a problem that no answer can solve."""
    always_cut: tuple[str, ...] = ()
    """Strings at which the published code cuts answers even where it cuts at no others."""

    def cut(self, text: str, *, at_stop: bool = True) -> str:
        """An answer up to the first of the task's stop strings."""
        for stop in self.stop if at_stop else self.always_cut:
            text = text.split(stop)[0]
        return text


def _mbpp_question(problem: Problem) -> str:
    tests = "\n".join(problem["test_list"][:3])
    head = f"You are an expert Python programmer, and here is your task: {problem['text']} Your code should pass these"
    return f"{head} tests:\n\n{tests}\n[BEGIN]\n"


_QUESTION_ANSWER = {"question": str, "answer": str}
_HUMANEVAL = {"prompt": str, "entry_point": str, "test": str, "canonical_solution": str}

TASKS = {
    task.name: task
    for task in (
        Task(
            name="problems",
            fields=_QUESTION_ANSWER,
            question=lambda problem: problem["question"],
            example_answer=lambda problem: problem["answer"],
            separator="\n",
            stop=(),
            score=scoring.score_problem,
            check=scoring.check_problem,
            metric="exact",
        ),
        Task(
            name="gsm8k",
            fields=_QUESTION_ANSWER,
            question=lambda problem: f"Question: {problem['question']}\nAnswer:",
            example_answer=lambda problem: problem["answer"],
            separator=" ",
            stop=("Question:", "</s>", "<|im_end|>"),
            score=scoring.score_gsm8k,
            metric="flexible_extract",
        ),
        Task(
            name="minerva_math",
            fields={"problem": str, "solution": str},
            question=lambda problem: f"Problem:\n{problem['problem']}\n\nSolution:",
            example_answer=lambda problem: problem["solution"],
            separator=" ",
            stop=("Problem:",),
            score=scoring.score_math,
            check=scoring.check_math,
            metric="exact_match",
        ),
        Task(
            name="mbpp",
            fields={"text": str, "code": str, "test_list": list},
            question=_mbpp_question,
            example_answer=lambda problem: f"{problem['code']}\n[DONE]",
            separator="",
            stop=("[DONE]",),
            score=scoring.score_mbpp,
            metric="pass_at_1",
            runs_code=True,
            always_cut=("[DONE]",),
        ),
        Task(
            name="humaneval",
            fields=_HUMANEVAL,
            question=lambda problem: problem["prompt"],
            example_answer=lambda problem: problem["canonical_solution"],
            separator="",
            stop=(),
            score=scoring.score_humaneval,
            metric="pass_at_1",
            runs_code=True,
        ),
        Task(
            name="humaneval_plus",
            fields=_HUMANEVAL,
            question=lambda problem: problem["prompt"].strip(),
            example_answer=lambda problem: problem["canonical_solution"],
            separator="",
            stop=("```",),
            score=scoring.score_humaneval_plus,
            metric="pass_at_1",
            runs_code=True,
        ),
        Task(
            name="mbpp_plus",
            fields={"prompt": str, "code": str, "test_list": list, "test": str},
            question=scoring.mbpp_plus_prompt,
            example_answer=lambda problem: problem["code"],
            separator="",
            stop=("```",),
            score=scoring.score_mbpp_plus,
            check=scoring.check_mbpp_plus,
            metric="pass_at_1",
            runs_code=True,
        ),
    )
}
"""All tasks by name."""
