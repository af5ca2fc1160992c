"""Calculations, and the worked answers that show them."""

from __future__ import annotations

import ast
import random
from collections.abc import Mapping
from dataclasses import dataclass

LARGEST = 999
NUMBERS = "nmkji"
"""Names of the numbers in a template and its expression: a template has at most so many."""
PHRASES = {
    "+": ("We add", "Adding up", "Sum up", "Put together"),
    "-": ("We subtract", "Taking away", "Take off", "That leaves"),
    "*": ("We multiply", "Multiplying gives", "Take times", "Count groups"),
    "/": ("We divide", "Dividing gives", "Share equally", "Split up"),
}
"""What a step begins with, in each of four styles. An answer has one style; the question does not say which, and that
is an uncertainty that branches resolve."""
ENDINGS = ("So the answer is", "The final answer is", "The result here is", "Therefore it is now")
"""How the last sentence begins, in each style."""
STYLE_WEIGHTS = (6, 2, 1, 1)
"""How frequent each style is. One prevails: if an answer's first word were the least certain one, decoding would fill
positions of later sentences before it."""
OPERATORS: Mapping[type[ast.operator], str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}


@dataclass(frozen=True)
class Step:
    """One operation on two numbers."""

    left: int
    op: str
    """A key of PHRASES."""
    right: int

    @property
    def result(self) -> int:
        """The number that comes out; a division has no remainder."""
        if self.op == "+":
            return self.left + self.right
        if self.op == "-":
            return self.left - self.right
        return self.left * self.right if self.op == "*" else self.left // self.right

    @property
    def is_easy(self) -> bool:
        """Whether the bundled model is to learn it."""
        if self.op == "/":
            return 1 < self.right <= 12 and self.left % self.right == 0 and 0 < self.result
        if self.op == "*":
            few, many = sorted((self.left, self.right))
            return 0 < few and self.result <= LARGEST and (len(parts(few)) == 1 or len(parts(many)) == 1 or few <= 15)
        return 0 <= self.result <= LARGEST


def parts(n: int) -> list[int]:
    """A number as hundreds, tens and ones, without zeros.

    >>> parts(405)
    [400, 5]
    """
    return [part for part in (n // 100 * 100, n // 10 % 10 * 10, n % 10) if part] or [0]


def work(step: Step) -> str:
    """The calculation, a chain of equal terms in which every link is easy.

    >>> work(Step(305, "-", 78))
    '305-78=235-8=227'
    >>> work(Step(4, "+", 84))
    '4+84=88'
    >>> work(Step(96, "*", 7))
    '96*7=630+42=670+2=672'
    >>> work(Step(96, "/", 4))
    '96/4=20+4=24'
    """
    a, b = step.left, step.right
    chain = f"{a}{step.op}{b}"
    if step.op in "+-":
        if step.op == "+" and len(parts(a)) < len(parts(b)):
            a, b = b, a
        return chain + _fold(a, step.op, b)
    if step.op == "/":
        quotient = parts(step.result)
        is_known = len(quotient) == 1 or step.result <= 12
        return chain + ("" if is_known else "=" + "+".join(map(str, quotient))) + f"={step.result}"
    split, whole = (a, b) if len(parts(a)) >= len(parts(b)) else (b, a)
    if len(parts(split)) == 1 or (split <= 12 and whole <= 12):
        return f"{chain}={step.result}"
    products = [part * whole for part in parts(split)]
    value = products[0]
    for i, product in enumerate(products[1:], 1):
        chain += "=" + "+".join(map(str, (value, *products[i:])))
        if i == len(products) - 1:
            return chain + _fold(value, "+", product)
        value += product
    raise AssertionError("a split number has two parts")


def _fold(a: int, op: str, b: int) -> str:
    """The links that follow "a + b" or "a - b": each takes the first part of b into a."""
    chain, rest = "", parts(b)
    for i, part in enumerate(rest):
        a = a + part if op == "+" else a - part
        remaining = sum(rest[i + 1 :])
        chain += f"={a}{op}{remaining}" if remaining else f"={a}"
    return chain


def steps_of(expression: str, numbers: Mapping[str, int]) -> list[Step] | None:
    """The steps of an expression like "n*m-k" in order; None if one is not easy.

    A sum or product begins with the result of the step before, if it uses that: so the order of its numbers follows
    from what was calculated, and does not have to be learned of every template.

    Args:
        expression: names, numbers, "+-*/" and brackets.
        numbers: of the names.
    """
    steps: list[Step] = []

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.Name):
            return numbers[node.id]
        if isinstance(node, ast.Constant):
            assert isinstance(node.value, int)
            return node.value
        assert isinstance(node, ast.BinOp)
        left, right = value(node.left), value(node.right)
        op = OPERATORS[type(node.op)]
        if op in "+*" and steps and steps[-1].result == right:
            left, right = right, left
        step = Step(left, op, right)
        if not step.is_easy:
            raise ValueError
        steps.append(step)
        return step.result

    try:
        value(ast.parse(expression, mode="eval").body)
    except (ValueError, ZeroDivisionError):
        return None
    return steps


def answer(rng: random.Random, steps: list[Step], unit: str) -> str:
    """A worked answer that ends in "#### N".

    Args:
        rng: of the style.
        steps: at least one; the last one has the result.
        unit: what the result counts; "" for nothing.
    """
    style = rng.choices(range(len(STYLE_WEIGHTS)), STYLE_WEIGHTS)[0]
    lines = [f"{PHRASES[step.op][style]}: {work(step)}." for step in steps]
    result = steps[-1].result
    ending = f"{ENDINGS[style]} {result}{' ' + unit if unit and result != 1 else ''}."
    return f"{' '.join(lines)} {ending}\n#### {result}"


def kind_of(steps: list[Step]) -> str:
    """The kind of problem, for tables."""
    if len(steps) > 1:
        return f"{('two', 'three', 'four', 'five')[len(steps) - 2]} steps"
    if steps[0].op == "/":
        return "half" if steps[0].right == 2 else "share"
    return {"+": "add", "-": "subtract", "*": "times"}[steps[0].op]


def draw_number(rng: random.Random) -> int:
    """A number from 0 to 999; small ones are more frequent, round ones too, and few are below 2."""
    size = rng.random()
    if size < 0.03:
        return 0 if size < 0.003 else 1
    if size < 0.35:
        return rng.randint(2, 20)
    if size < 0.78:
        return rng.randint(10, 99)
    if size < 0.84:
        return 10 * rng.randint(1, 99)
    return rng.randint(100, LARGEST)


def draw_small(rng: random.Random) -> int:
    """A number that something is multiplied or divided by."""
    return rng.randint(2, 10) if rng.random() < 0.9 else rng.randint(2, 30)


def draw_numbers(rng: random.Random, expression: str, others: str = "") -> tuple[dict[str, int], list[Step]]:
    """Numbers for the names in an expression and for others, and the expression's steps, all of which are easy."""
    names = [name for name in NUMBERS if name in expression or name in others]
    while True:
        numbers = {name: draw_number(rng) for name in names}
        for name in names:
            if f"/{name}" in expression or (f"*{name}" in expression and rng.random() < 0.6):
                numbers[name] = draw_small(rng)
            elif f"{name}*" in expression and rng.random() < 0.6:
                numbers[name] = draw_small(rng)
        if expression in ("n/m", "n/2"):
            numbers["n"] = draw_number(rng) * (numbers["m"] if "m" in numbers else 2)
            if numbers["n"] > LARGEST:
                continue
        steps = steps_of(expression, numbers)
        if steps and (steps[-1].result > 0 or rng.random() < 0.3):
            return numbers, steps
