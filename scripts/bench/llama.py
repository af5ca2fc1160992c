"""Measures a forward pass of this engine beside one of llama.cpp, on this processor.

    bench llama llama-bench SDAR-1.7B qwen3-bf16.gguf qwen3-q8_0.gguf qwen3-q4_0.gguf

llama-bench is llama.cpp's own program. A model of ours is set beside GGUF files of a model with the same sizes, such as
SDAR-1.7B and Qwen3-1.7B; random weights (scripts.eval make-checkpoint) take as long as trained ones. docs/results.md
says how to build the program and the files.

A pass computes N positions of one request behind 128 others. Here it is an engine's step over the N masks of a block,
which computes the head for all of them and fills at least one; llama.cpp computes the head for the last position alone.
In each round both sides take their turns with each number of threads, and the fastest pass of all rounds counts.
Milliseconds by the clock; the last column divides our fastest format by the fastest one of llama.cpp.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lopa_ascend.core import Request
from scripts.arguments import InputError, add_numbers, model_directory
from scripts.bench.decode import FORMATS, format_options
from scripts.bench.machine import describe_machine
from scripts.bench.prompts import text_prompts
from scripts.bench.tables import records

if TYPE_CHECKING:
    from lopa_ascend import LLM

OURS = ("bfloat16", "w8a8", "w4a8", "w4a8_g128")
"""Number formats."""
CONTEXT = 128
"""Positions before those of the pass: a page, so that the prefix cache holds them."""
PASSES = 3
"""Passes of a kind in a round."""
MOST_SECONDS = 600
"""Of a call of llama-bench."""
Times = dict[tuple[int, int], dict[str, float]]
"""By threads and positions: seconds of the fastest pass, by the heading of its column."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    cores = os.cpu_count() or 1
    parser.add_argument("llama_bench", type=Path, metavar="LLAMA_BENCH", help="llama.cpp's program")
    parser.add_argument("model", type=model_directory, metavar="MODEL", help="a model of ours")
    parser.add_argument("gguf", nargs="+", metavar="GGUF", help="files to set beside it")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=OURS, help=f"ours (default: {' '.join(OURS)})")
    add_numbers(
        parser,
        ("--positions", [1, 4, 8, 16, 32], 1, "positions of a pass"),
        ("--threads", sorted({1, min(2, cores), cores}), 1, "threads of both sides"),
        ("--rounds", 3, 1, "of both sides"),
    )


def run(args: argparse.Namespace) -> int:
    """Measures and prints what the command line asks for."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is loaded: llama.cpp has the cores for itself
    times, machine = measure(args), describe_machine()
    [theirs] = llama_bench(args.llama_bench, {"-m": args.gguf[0], "-n": 0, "-p": 1, "-r": 1})
    versions = ", ".join(f"{name} {value}" for name, value in machine["versions"].items())
    versions += f"; llama.cpp {theirs['build_commit']}, {theirs['backends']}"
    print(f"{machine['processor']}, {machine['cores']} cores; {versions}")
    rows = []
    for (threads, positions), found in times.items():
        ours, other = (min(found[column] for column in found if column.startswith(side)) for side in ("ours", "llama"))
        cells = {column: f"{1000 * seconds:.1f}" for column, seconds in found.items()}
        rows.append({"threads": threads, "positions": positions, **cells, "ours / llama.cpp": f"{ours / other:.2f}"})
    print(f"\n{args.model.name}, ms of a pass:\n\n{records(rows)}")
    return 0


def measure(args: argparse.Namespace) -> Times:
    """Both sides take their turns."""
    import torch

    from lopa_ascend import LLM

    settings = {"max_model_len": 2 * CONTEXT, "max_num_seqs": 1, "threads": max(args.threads)}
    llms = {name: LLM(args.model, **settings, **format_options(name)) for name in args.formats}
    times: Times = defaultdict(dict)
    for _, threads in itertools.product(range(args.rounds), args.threads):
        torch.set_num_threads(threads)
        passes = [own_passes(llm, f"ours: {name}", args.positions) for name, llm in llms.items()]
        passes += [llama_passes(args.llama_bench, file, threads, args.positions) for file in args.gguf]
        for column, positions, seconds in itertools.chain(*passes):
            fastest = times[threads, positions]
            fastest[column] = min(seconds, fastest.get(column, seconds))
    for llm in llms.values():
        llm.close()
    return times


def own_passes(llm: LLM, column: str, positions: Sequence[int]) -> Iterator[tuple[str, int, float]]:
    """Column, positions and seconds of passes over a block of masks; InputError if the model computes others in one."""
    [prompt] = text_prompts(llm, 1, CONTEXT)
    for count in positions:
        params = llm.params(decoding="d2f", block_size=count, max_new_tokens=count, ignore_eos=True)
        llm.generate([prompt], params, quiet=True)  # keeps the prompt in the prefix cache
        for _ in range(PASSES):
            llm.engine.add(Request("pass", tuple(prompt), params))
            started = time.perf_counter()
            [update] = llm.engine.step()
            seconds = time.perf_counter() - started
            llm.engine.abort("pass")
            if update.model_tokens != count:
                raise InputError(f"a pass over {count} masks computes {update.model_tokens} positions")
            yield column, count, seconds


def llama_passes(program: Path, file: str, threads: int, positions: Sequence[int]) -> Iterator[tuple[str, int, float]]:
    """Those of llama.cpp."""
    options = {"-m": file, "-n": 0, "-p": ",".join(map(str, positions)), "-d": CONTEXT, "-t": threads, "-r": PASSES}
    for one in llama_bench(program, options):
        for nanoseconds in one["samples_ns"]:
            yield f"llama.cpp: {one['model_type']}", one["n_prompt"], nanoseconds / 1e9


def llama_bench(program: Path, options: dict[str, object]) -> list[dict[str, Any]]:
    """What llama-bench prints as JSON; InputError if it has failed."""
    command = [str(program), "-o", "json", *(str(part) for option in options.items() for part in option)]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=MOST_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InputError(str(error)) from error
    if ended.returncode:
        raise InputError(f"{' '.join(command)}: {ended.stderr.strip()[-1000:]}")
    found: list[dict[str, Any]] = json.loads(ended.stdout)
    return found
