"""Fills gaps: the body of a function between its head and its tests, and a form letter: python examples/infill.py MODEL

MODEL is the directory of a model that attends to all positions. Take a base model: Dream-Coder-v0-Base-7B for code,
Dream-v0-Base-7B or LLaDA-8B-Base for letters. Models that were tuned to chat saw masks in answers alone, and the
bundled model knows word problems alone.
"""

from __future__ import annotations

import sys

from lopa_ascend import LLM, Gap

HEAD = '''def median(numbers: list[float]) -> float:
    """The middle one of the sorted numbers, or the mean of the two middle ones."""
'''
TESTS = """

def test_median() -> None:
    assert median([3, 1, 2]) == 2
    assert median([4, 1, 3, 2]) == 2.5
"""
LETTER: list[str | Gap] = [
    "Dear Ms. Okafor,\n\nthank you for your order of ",
    Gap(max_tokens=12),
    ". It left our warehouse in ",
    Gap(tokens=3),
    " this morning and should reach you by ",
    Gap(max_tokens=8),
    ".\n\nKind regards,\n",
    Gap(max_tokens=8),
    "\nCustomer service\n",
]


def main(model: str) -> None:
    llm = LLM(model)
    params = llm.params(decoding="parallel", block_size=64)
    print(llm.infill([HEAD, Gap(max_tokens=64), TESTS], params).text)
    print(llm.infill(LETTER, params).text)


if __name__ == "__main__":
    main(sys.argv[1])
