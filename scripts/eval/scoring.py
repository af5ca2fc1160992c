"""Scores answers as the published evaluations do: lm-eval's GSM8K, MATH and MBPP, Dream's HumanEval, evalplus."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from typing import Any

from scripts.eval import latex
from scripts.eval.problems import parse_result
from scripts.eval.sandbox import passes
from scripts.eval.sanitize import sanitize_dream, sanitize_evalplus

_STRICT = re.compile(r"#### (\-?[0-9\.\,]+)")
_FLEXIBLE = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")
_IGNORED = tuple(map(re.compile, (",", r"\$", r"(?s).*#### ", r"\.$")))
"""What lm-eval removes from both sides before it compares numbers."""
NO_NUMBER = "[invalid]"


def check_problem(problem: Mapping[str, Any]) -> None:
    """Raises ValueError if ``score_problem`` finds no number in the right answer."""
    if parse_result(problem["answer"]) is None:
        raise ValueError('"answer" has no whole number after "####"; task gsm8k takes other numbers too')


def score_problem(problem: Mapping[str, Any], text: str) -> dict[str, float]:
    """The bundled model's problems: the whole number after the last "####"."""
    expected = parse_result(problem["answer"])
    return {"exact": float(expected is not None and parse_result(text) == expected)}


def score_gsm8k(problem: Mapping[str, Any], text: str) -> dict[str, float]:
    """The first number after "####", and the last number of all."""
    strict = _STRICT.findall(text)
    flexible = _FLEXIBLE.findall(text)
    found = {
        "strict_match": strict[0].strip() if strict else NO_NUMBER,
        "flexible_extract": next(filter(None, flexible[-1])).strip() if flexible else NO_NUMBER,
    }
    expected = _plain_number(problem["answer"])
    return {name: float(_plain_number(number) == expected) for name, number in found.items()}


def _plain_number(text: str) -> str:
    for pattern in _IGNORED:
        text = pattern.sub("", text)
    return text.lower()


def check_math(problem: Mapping[str, Any]) -> None:
    """Raises ValueError if the solution has no boxed answer."""
    if not latex.boxed(problem["solution"]):
        raise ValueError('"solution" has no \\boxed{...}')


def score_math(problem: Mapping[str, Any], text: str) -> dict[str, float]:
    """Minerva's way: "Final Answer: The final answer is ... I hope it is correct.", and equality as sympy sees it."""
    expected = latex.normalize(latex.boxed(problem["solution"]))
    return {"exact_match": float(latex.is_equivalent(latex.normalize(latex.final_answer(text)), expected))}


def score_mbpp(problem: Mapping[str, Any], text: str) -> dict[str, float]:
    """The answer as it is, and the first three tests after it."""
    tests = "\n".join(problem["test_list"][:3])
    return {"pass_at_1": float(passes(text, tests))}


def score_humaneval(problem: Mapping[str, Any], text: str) -> dict[str, float]:
    """As Dream does it: the prompt, and then the code in the first Python fence, or the whole answer if it has none."""
    completion = text.split("```python\n", 1)[-1].split("```")[0]
    program = sanitize_dream(f"{problem['prompt']}\n{completion}", problem["entry_point"])
    return {"pass_at_1": float(passes(program, _check(problem)))}


def score_humaneval_plus(problem: Mapping[str, Any], text: str) -> dict[str, float]:
    """DiffuCoder's way: the prompt, which may import and define what the answer needs, and then the answer up to the
    closing fence, as evalplus sanitises it."""
    program = sanitize_evalplus(problem["prompt"] + text.split("```")[0], problem["entry_point"])
    return {"pass_at_1": float(passes(program, _check(problem)))}


def _check(problem: Mapping[str, Any]) -> str:
    return f"{problem['test']}\ncheck({problem['entry_point']})"


def mbpp_plus_prompt(problem: Mapping[str, Any]) -> str:
    """The docstring that evalplus gives to a model, without the newline at its end."""
    return f'"""\n{problem["prompt"]}\n{problem["test_list"][0]}\n"""'


def check_mbpp_plus(problem: Mapping[str, Any]) -> None:
    """Raises ValueError if the solution is no Python, or there is no test."""
    if not problem["test_list"]:
        raise ValueError('"test_list" is empty')
    try:
        ast.parse(problem["code"])
    except SyntaxError as error:
        raise ValueError(f'"code" is not Python: {error.msg}, line {error.lineno}') from error


def score_mbpp_plus(problem: Mapping[str, Any], text: str) -> dict[str, float]:
    """DiffuCoder's way: the prompt, which is a docstring, and the answer up to the closing fence, as evalplus sanitises
    it for the function that the problem's first test calls."""
    defined = [node.name for node in ast.parse(problem["code"]).body if isinstance(node, ast.FunctionDef)]
    called = [name for name in defined if re.search(rf"\b{name}\(", problem["test_list"][0])]
    answer = mbpp_plus_prompt(problem) + "\n" + text.split("```")[0]
    program = sanitize_evalplus(answer, called[-1] if called else None)
    return {"pass_at_1": float(passes(program, problem["test"]))}
