"""The bundled model's problems: right, disjoint, and of the promised form."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

from scripts.demo_problems import STORIES, parse_result, problems

HELD_OUT = Path(__file__).parents[2] / "lopa_ascend" / "demo" / "heldout.jsonl"


def test_every_calculation_is_right() -> None:
    operators = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
    for problem in itertools.islice(problems(5, held_out=False), 500):
        calculations = re.findall(r"(\d+)([-+*])(\d+)=(\d+)", problem.answer)
        assert calculations
        for a, operator, b, result in calculations:
            assert operators[operator](int(a), int(b)) == int(result)
        assert parse_result(problem.answer) == problem.result
        assert all(1 <= int(n) <= 99 for n in re.findall(r"\d+", problem.question))


def test_held_out_questions_are_never_trained_on() -> None:
    held_out = {json.loads(line)["question"] for line in HELD_OUT.read_text().splitlines()}
    assert len(held_out) == 500
    assert not held_out & {p.question for p in itertools.islice(problems(1, held_out=False), 3000)}
    assert all(not p.held_out for p in itertools.islice(problems(2, held_out=False), 300))
    assert len(STORIES) >= 8


def test_parse_result() -> None:
    assert parse_result("12+3=15\n#### 15") == 15
    assert parse_result("#### 1 and #### 2") == 2
    assert parse_result("####") is None
    assert parse_result("no number") is None
