"""Shows how LoPA fills an answer, pass by pass: python examples/stream.py ["A question"]

It prints the text as it becomes final. Then it prints the winner of each pass, 0 for the anchor and r for the lookahead
branch of rank r, and how many positions the pass filled.
"""

from __future__ import annotations

import sys

from lopa_ascend import LLM
from lopa_ascend.types import winner_rank

QUESTION = "Tom has 12 apples. Tom buys 35 more. How many apples does Tom have now?"


def main() -> None:
    llm = LLM()
    question = sys.argv[1] if len(sys.argv) > 1 else QUESTION
    prompt = llm.tokenize_chat([{"role": "user", "content": question}])
    for progress in llm.stream(prompt, trace=True):
        if progress.output is None:
            print(repr(progress.text))
        else:
            for record in progress.output.trace or ():
                print(f"pass {record.index}: branch {winner_rank(record)} wins, {len(record.fills)} positions filled")
            print(progress.output.text)


if __name__ == "__main__":
    main()
