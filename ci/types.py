"""Lists the types that a request passes through: the classes of ours of which one generation makes objects.

A run of the bundled model is traced from ``LLM.generate`` to the output: every class of ``lopa_ascend`` that is
instantiated on the way counts, whether it is plain data or not. What exists before the request (the engine, its
executors and settings) does not. The request is the usual one: a text, greedy LoPA, several branches.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

MOST = {"eager": 25, "graph": 32}
"""The most types by mode."""
PROMPT = "What is 7 times 8, and then 12 more?"


def made_by(run: Callable[[], Any]) -> set[type]:
    """The classes of ``lopa_ascend`` of which ``run`` makes objects."""
    made: set[type] = set()

    def watch(frame: FrameType, event: str, _: Any) -> None:
        if event != "call":
            return
        code = frame.f_code
        if code.co_name == "__init__" and code.co_argcount:
            made.add(type(frame.f_locals[code.co_varnames[0]]))
        elif "_cls" in code.co_varnames[:1] and code.co_name == "<lambda>":  # a NamedTuple
            made.add(frame.f_locals["_cls"])

    sys.setprofile(watch)
    try:
        run()
    finally:
        sys.setprofile(None)
    return {kind for kind in made if kind.__module__.partition(".")[0] == "lopa_ascend"}


def types_of(mode: str) -> list[str]:
    """The types of a request by name, for a mode of ``MOST``."""
    from lopa_ascend.llm import LLM

    llm = LLM(graph_mode="eager") if mode == "graph" else LLM(mode="eager")
    params = llm.params(max_new_tokens=96)
    kinds = made_by(lambda: llm.generate(PROMPT, params, quiet=True))
    return sorted(f"{kind.__module__}.{kind.__qualname__}" for kind in kinds)


def main() -> int:
    """Prints the types and their number; 1 if there are too many."""
    status = 0
    for mode, most in MOST.items():
        names = types_of(mode)
        print(f"{mode}: {len(names)} types (at most {most})", *names, sep="\n  ")
        status |= len(names) > most
    return status


if __name__ == "__main__":
    sys.exit(main())
