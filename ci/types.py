"""Lists the types that a request passes through: the classes of ours of which one generation makes objects.

    python -m ci.types

A generation of the bundled model is traced from ``LLM.generate`` to its output, by eager steps and by compiled ones.
Every class of ``lopa_ascend`` that is instantiated on the way counts, whether it is plain data or not. Not counted is
what exists before the request (the engine, its executors and settings), what the ops of a CPU make for themselves, and
what a compiled step makes while it is compiled: a graph only computes. The request is the usual one: a text, greedy
LoPA with lookahead branches, so neither penalties nor sampling.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any
from unittest.mock import patch

from lopa_ascend.backend.compiler import Eager
from lopa_ascend.graph import setup
from lopa_ascend.graph.step import DecodeStep
from lopa_ascend.llm import LLM

MOST = {"eager": 27, "graph": 34}
"""The most types by the kind of steps."""
PROMPT = "What is 7 times 8, and then 12 more?"
UNCOUNTED = "lopa_ascend.backend.cpu."
COMPILED = DecodeStep.__call__.__code__


def made_by(run: Callable[[], Any]) -> set[type]:
    """The classes of ``lopa_ascend`` of which ``run`` makes objects."""
    made: set[type] = set()
    in_graph = False

    def watch(frame: FrameType, event: str, _: Any) -> None:
        nonlocal in_graph
        code = frame.f_code
        if code is COMPILED and event in ("call", "return"):
            in_graph = event == "call"
        if event != "call" or in_graph:
            return
        first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        if code.co_name == "__init__":
            made.add(type(first))
        elif code.co_varnames[:1] == ("_cls",):  # of a NamedTuple
            assert isinstance(first, type)
            made.add(first)

    sys.setprofile(watch)
    try:
        run()
    finally:
        sys.setprofile(None)
    return {kind for kind in made if kind.__module__.startswith("lopa_ascend.")}


def types_of(kind: str) -> list[str]:
    """The types of a request by name.

    Args:
        kind: of the steps, one of ``MOST``.
    """
    # On a CPU a graph is the step as it is, so that nothing must be compiled.
    with patch.object(setup, "load_compiler", lambda *_, **__: Eager()):
        llm = LLM(graph_mode="inductor" if kind == "graph" else "eager", max_model_len=512, max_num_seqs=1)
    params = llm.params(max_new_tokens=96)
    llm.generate("An earlier request", params, quiet=True)  # what is made once and kept
    kinds = made_by(lambda: llm.generate(PROMPT, params, quiet=True))
    assert llm.engine.stats().num_steps > 1
    names = sorted(f"{kind.__module__}.{kind.__qualname__}" for kind in kinds)
    return [name for name in names if not name.startswith(UNCOUNTED)]


def main() -> int:
    """Prints the types and their numbers; 1 if there are too many."""
    status = 0
    for kind, most in MOST.items():
        names = types_of(kind)
        print(f"{kind} steps: {len(names)} types (at most {most})", *names, sep="\n  ")
        status |= len(names) > most
    return status


if __name__ == "__main__":
    sys.exit(main())
