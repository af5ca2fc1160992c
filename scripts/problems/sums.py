"""Sums in symbols or words, without a story; several together are practice in arithmetic."""

from __future__ import annotations

import random

from scripts.problems.language import words
from scripts.problems.wordings import read
from scripts.problems.working import LARGEST, Step, draw_numbers, work

SUMS = read("sums")
"""By section of sums.txt."""
PRACTICE_LENGTH = 105
"""Characters of all calculations of a practice, with five more for each; the answer then fits in four blocks of 32."""
LONG_SHARE = 0.5
"""Share of the sums of a practice that have long calculations."""
SYMBOLS = {
    "+": ("+", " + ", " plus ", " + "), "-": ("-", " - ", " minus ", " - "),
    "*": ("*", " * ", " times ", " x ", "x", " multiplied by "), "/": ("/", " / ", " divided by ", " : ", "÷", " ÷ "),
}  # fmt: skip
SHORT = ("n+m", "n+m", "n+m", "n-m", "n-m", "n-m", "n*m", "n*m", "n/m", "n/m", "n/2", "n*2")
LONGER = ("n+m+k", "n-m+k", "n+m-k", "n-m-k", "n*m+k", "n*m-k", "n+m*k", "n-m*k", "n+m+k+j", "n+m-k+j")


def make_sum(rng: random.Random) -> tuple[str, list[Step]]:
    """A question, and the steps of its answer."""
    if rng.random() < 0.25:
        expression = rng.choice(LONGER)
    else:
        expression = rng.choice(SHORT)
    numbers, steps = draw_numbers(rng, expression)
    in_words = rng.random() < 0.06
    said = {name: words(n) if in_words and n < 100 else str(n) for name, n in numbers.items()}
    if f"phrases {expression}" in SUMS and rng.random() < (1 if "2" in expression else 0.3):
        if rng.random() < 0.4:
            return rng.choice(SUMS[f"commands {expression}"]).format(**said), steps
        text = rng.choice(SUMS[f"phrases {expression}"]).format(**said)
    else:
        style = rng.uniform(0.4, 0.8) if in_words else rng.random()  # words need spaces between them
        said |= {op: _symbol(rng, op, style) for op in SYMBOLS}
        text = "".join(said.get(char, char) for char in expression)
    return rng.choice(SUMS["frames"]).format(e=text), steps


def _symbol(rng: random.Random, op: str, style: float) -> str:
    """An operator: closed up, with spaces, or in other ways."""
    closed_up, spaced = SYMBOLS[op][:2]
    if style < 0.4:
        return closed_up
    return spaced if style < 0.8 else rng.choice(SYMBOLS[op])


def make_practice(rng: random.Random) -> tuple[str, list[Step]]:
    """Several sums that have nothing to do with one another, and a step for each.

    >>> make_practice(random.Random(0))[0]
    '18*5, 28-4, 30/2, 760/5, 156/6'
    """
    steps: list[Step] = []
    length = 0
    while True:
        step = _long_sum(rng) if rng.random() < LONG_SHARE else draw_numbers(rng, rng.choice(SHORT))[1][0]
        length += len(work(step)) + 5
        if length > PRACTICE_LENGTH:
            return ", ".join(f"{step.left}{_symbol(rng, step.op, 0.0)}{step.right}" for step in steps), steps
        steps.append(step)


def _long_sum(rng: random.Random) -> Step:
    """A sum of large numbers, whose calculation is long; problems seldom have one. Two of three are products and
    quotients."""
    op = rng.choice("+-**//")
    if op == "+":
        left = rng.randint(100, LARGEST - 10)
        return Step(left, op, rng.randint(10, LARGEST - left))
    if op == "-":
        left = rng.randint(100, LARGEST)
        return Step(left, op, rng.randint(10, left))
    few = rng.randint(2, 15 if op == "*" else 12)
    many = rng.randint(11, LARGEST // few)
    if op == "/":
        return Step(few * many, op, few)
    return Step(few, op, many) if rng.random() < 0.5 else Step(many, op, few)
