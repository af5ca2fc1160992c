"""A conversation with the bundled model, or with the model directory given as the argument: python examples/chat.py

An empty line ends it.
"""

from __future__ import annotations

import sys

from lopa_ascend import LLM


def main() -> None:
    llm = LLM(*sys.argv[1:2])
    messages: list[dict[str, str]] = []
    while question := input("> "):
        messages.append({"role": "user", "content": question})
        output = llm.chat([messages], quiet=True)[0]
        print(f"{output.text}\n({output.num_forwards} passes, {output.tokens_per_forward:.1f} tokens each)")
        messages.append({"role": "assistant", "content": output.text or ""})


if __name__ == "__main__":
    main()
