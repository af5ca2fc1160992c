"""What the tasks of this folder call: problems, and the programs in answers, as the published evaluations take them.

lm-eval loads this file by its path.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Programs = list[list[str]]
"""By problem, the programs of its answers."""


def held_out(**_: object) -> Any:
    """The bundled model's held-out problems."""
    from datasets import Dataset

    from lopa_ascend.demo import HELD_OUT

    return {"test": Dataset.from_list([json.loads(line) for line in HELD_OUT.read_text("utf-8").splitlines()])}


def dream_programs(responses: Sequence[Sequence[str]], problems: Sequence[Mapping[str, Any]]) -> Programs:
    """As Dream does it: the prompt, and then the code in the first Python fence, or the whole answer if it has none."""

    def program(problem: Mapping[str, Any], answer: str) -> tuple[str, str]:
        code = answer.split("```python\n", 1)[-1].split("```")[0]
        return f"{problem['prompt']}\n{code}", problem["entry_point"]

    return _sanitized(program, responses, problems)


def humaneval_plus_programs(responses: Sequence[Sequence[str]], problems: Sequence[Mapping[str, Any]]) -> Programs:
    """The prompt, which may import and define what the answer needs, and then the answer up to the closing fence."""

    def program(problem: Mapping[str, Any], answer: str) -> tuple[str, str]:
        return problem["prompt"] + answer.split("```")[0], problem["entry_point"]

    return _sanitized(program, responses, problems)


def mbpp_plus_prompt(problem: Mapping[str, Any]) -> str:
    """The docstring that evalplus gives to a model, without the newline at its end."""
    return f'"""\n{problem["prompt"]}\n{problem["test_list"][0]}\n"""'


def mbpp_plus_programs(responses: Sequence[Sequence[str]], problems: Sequence[Mapping[str, Any]]) -> Programs:
    """The prompt and the answer up to the closing fence, sanitised for the function that the first test calls."""

    def program(problem: Mapping[str, Any], answer: str) -> tuple[str, str | None]:
        defined = [node.name for node in ast.parse(problem["code"]).body if isinstance(node, ast.FunctionDef)]
        called = [name for name in defined if re.search(rf"\b{name}\(", problem["test_list"][0])]
        return f"{mbpp_plus_prompt(problem)}\n{answer.split('```')[0]}", called[-1] if called else None

    return _sanitized(program, responses, problems)


def _sanitized(
    program: Callable[[Mapping[str, Any], str], tuple[str, str | None]],
    responses: Sequence[Sequence[str]],
    problems: Sequence[Mapping[str, Any]],
) -> Programs:
    """Programs as evalplus sanitises them, from which Dream's sanitize.py is taken.

    Args:
        program: text and entry point, of a problem and an answer to it.
    """
    from evalplus.sanitize import sanitize

    return [
        [sanitize(*program(problem, answer)) for answer in answers]
        for answers, problem in zip(responses, problems, strict=True)
    ]


def pass_at_1(references: Sequence[str], predictions: Sequence[Sequence[str]]) -> float:
    """Whether the program passes its tests, as lm-eval runs programs."""
    from lm_eval.tasks.mbpp.utils import pass_at_1 as run  # refuses to be imported without HF_ALLOW_CODE_EVAL=1

    return float(run(list(references), [list(answers) for answers in predictions]))
