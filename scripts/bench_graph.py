"""Compares compiled decode steps with eager ones on this CPU, and measures the host's work for each of them.

    python -m scripts.bench_graph
    python -m scripts.bench_graph --problems 8 --sequences 4

Decodes the same held-out problems three times: eagerly, by the decode step as one function that is not compiled, and by
that function compiled by inductor. Takes minutes, most of them for compilation. Prints for each the CPU milliseconds of
a step; for the last two also the time of the start, the share of padding, and the host's work for a launch and for a
result. Steps as one function compute padding that eager steps leave out, so the first two differ in work; the last two
do the same work.

The host's work, to send off a launch and to take in its result, is what asynchronous scheduling hides on an NPU.
"""

from __future__ import annotations

import argparse
import time
from typing import Any
from unittest import mock

import torch
from tqdm import tqdm

from lopa_ascend import LLM, DecodingParams
from lopa_ascend.backend.compiler import Eager
from lopa_ascend.config.help import HelpFormatter
from lopa_ascend.graph import setup
from lopa_ascend.probe import PartTimes
from scripts.arguments import number_from
from scripts.eval.problems import asked, read


def measure(name: str, questions: list[str], options: dict[str, Any]) -> list[tuple[int, ...]]:
    """Decodes the questions and prints a row of the table; returns the token ids of each answer."""
    start, wall = time.process_time(), time.perf_counter()
    llm = LLM(**options)
    started, waited = time.process_time() - start, time.perf_counter() - wall
    chats = [asked(question) for question in questions]
    params = DecodingParams(max_new_tokens=128)
    llm.chat(chats[:1], params, quiet=True)
    steps = llm.engine.stats().num_steps
    times = PartTimes()
    llm.engine.runner.set_probe(times)
    start = time.process_time()
    outputs = llm.chat(chats, params, quiet=True)
    seconds = time.process_time() - start
    stats = llm.engine.stats()
    row = f"{name:24} {1e3 * seconds / (stats.num_steps - steps):9.1f} ms a step"
    if stats.graphs is not None:
        row += f"; start {waited:.0f} s ({started:.0f} CPU s, {stats.graphs.num_buckets} graphs)"
        row += f"; padding {stats.graphs.padded_tokens / stats.graphs.tokens:.0%}"
        launch, result = (1e3 * times.seconds[part] / times.calls[part] for part in ("inputs", "absorb"))
        row += f"; host {launch:.2f} ms a launch, {result:.2f} ms a result"
    tqdm.write(row)
    return [output.token_ids for output in outputs]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench_graph", description=__doc__, formatter_class=HelpFormatter
    )
    parser.add_argument(
        "--problems", type=number_from(1), default=4, metavar="N", help="held-out problems (default: 4)"
    )
    parser.add_argument(
        "--sequences", type=number_from(1), default=1, metavar="N", help="problems decoded at a time (default: 1)"
    )
    parser.add_argument(
        "--window-blocks", type=number_from(2), default=4, metavar="N", help="blocks of the largest window (default: 4)"
    )
    arguments = parser.parse_args()
    questions = [question for question, _ in read(arguments.problems)]
    common: dict[str, Any] = {
        "dtype": "float32",
        "max_num_seqs": arguments.sequences,
        "max_model_len": 512,
        "graph_window_blocks": arguments.window_blocks,
        "enable_prefix_caching": False,
    }
    torch.set_num_threads(1)
    eager = measure("eager", questions, common | {"graph_mode": "eager"})
    with mock.patch.object(setup, "load_compiler", return_value=Eager()):
        plain = measure("one function", questions, common | {"graph_mode": "inductor"})
    compiled = measure("inductor", questions, common | {"graph_mode": "inductor"})
    print(f"equal tokens: one function {plain == eager}, inductor {compiled == eager}")


if __name__ == "__main__":
    main()
