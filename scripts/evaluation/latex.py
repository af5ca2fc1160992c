"""Final answers in LaTeX: finds them in a text, brings them into one form, and says whether two are equal.

As appendix D of Minerva (Lewkowycz et al. 2022) and lm-eval's minerva_math do.
"""

from __future__ import annotations

import importlib.metadata
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

ANTLR = "antlr4-python3-runtime"
TIMEOUT = 5.0
"""Seconds that a comparison may take. sympy can take for ever."""
NO_ANSWER = "[invalidanswer]"
_SUBSTITUTIONS = (
    ("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), (r"\ ", ""), (" ", ""), ("mbox", "text"), (",\\text{and}", ","),
    ("\\text{and}", ","), ("\\text{m}", "\\text{}"),
)  # fmt: skip
_REMOVED = (
    "square", "ways", "integers", "dollars", "mph", "inches", "ft", "hours", "km", "units", "\\ldots", "sue", "points",
    "feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students",
    "childrentickets", "multiples", "\\text{s}", "\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3", "\\text{\n}",
    "\\text{}", r"\mathrm{th}", r"^\circ", r"^{\circ}", r"\;", r",\!", "{,}", '"', "\\dots",
)  # fmt: skip
_REWRITES = (
    (r"(.*?)(\$)(.*?)(\$)(.*)", r"$\3$"),
    (r"(\\text\{)(.*?)(\})", r"\2"),
    (r"(\\textbf\{)(.*?)(\})", r"\2"),
    (r"(\\overline\{)(.*?)(\})", r"\2"),
    (r"(\\boxed\{)(.*)(\})", r"\2"),
    (r"(frac)([^{])(.)", r"frac{\2}{\3}"),
    (r"(sqrt)([^{])", r"sqrt{\2}"),
)


def missing_package() -> str | None:
    """What has to be installed before answers can be compared; None if nothing."""
    try:
        version = importlib.metadata.version(ANTLR)
    except importlib.metadata.PackageNotFoundError:
        version = "none"
    if version.startswith("4.11"):
        return None
    return f"minerva_math needs {ANTLR} 4.11, and {version} is installed: pip install -e '.[eval]'"


def boxed(text: str) -> str:
    """The content of the last \\boxed or \\fbox of a text; an empty text if there is none."""
    if "\\boxed " in text:
        return text.split("\\boxed ")[-1].split("$")[0]
    command = max(text.rfind("\\boxed{"), text.rfind("\\fbox{"))
    if command < 0:
        return ""
    opening = text.index("{", command)
    depth = 0
    for position in range(opening, len(text)):
        if text[position] == "{":
            depth += 1
        elif text[position] == "}":
            depth -= 1
        if depth == 0:
            return text[opening + 1 : position]
    return ""  # the closing brace is missing


def final_answer(text: str) -> str:
    """The text that follows "Final Answer: The final answer is"."""
    match = re.search(r"Final Answer: The final answer is(.*?). I hope it is correct.", text + "I hope it is correct.")
    return match[1].strip() if match else NO_ANSWER


def normalize(answer: str) -> str:
    """The one form of an answer."""
    answer = answer.split("=")[-1]
    for before, after in _SUBSTITUTIONS:
        answer = answer.replace(before, after)
    for removed in _REMOVED:
        answer = answer.replace(removed, "")
    for pattern, replacement in _REWRITES:
        answer = re.sub(pattern, replacement, answer)
    answer = answer.replace("$", "")
    return answer.replace(",", "") if answer.replace(",", "").isdigit() else answer


class TookTooLongError(BaseException):
    """Raised in code that has used up its time. No Exception, so that sympy cannot handle it by mistake."""


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """A context that ends with TookTooLongError after ``seconds``; in the main thread alone.

    A signal also ends one long power of integers.
    """

    def expire(_number: int, _frame: FrameType | None) -> None:
        raise TookTooLongError

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def is_equivalent(answer: str, expected: str) -> bool:
    """Whether two normalized answers are the same text, or the same for sympy. To be called in the main thread.

    Raises:
        RuntimeError: the parser of LaTeX is not installed.
    """
    if (missing := missing_package()) is not None:
        raise RuntimeError(missing)
    if NO_ANSWER in (answer, expected):
        return False
    if answer == expected:
        return bool(answer)
    import sympy
    from sympy.parsing.latex import parse_latex

    try:
        with _alarm(TIMEOUT):
            difference = parse_latex(answer) - parse_latex(expected)
            return bool(sympy.simplify(difference) == 0)
    except (Exception, TookTooLongError):  # noqa: BLE001  # sympy raises many kinds for what it cannot parse or simplify
        return False
