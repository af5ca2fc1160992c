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
import json
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lopa_ascend.config import ConfigError, ParameterError
from lopa_ascend.core import Request
from scripts.arguments import add_numbers, model_directory
from scripts.bench.decode import FORMATS, format_options
from scripts.bench.machine import describe_machine
from scripts.bench.prompts import text_prompts
from scripts.bench.tables import table

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


class Kind(NamedTuple):
    """What is measured by itself."""

    side: str
    """"ours" or "llama.cpp"."""
    name: str
    """The number format, or what llama-bench calls the model."""
    threads: int
    positions: int


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


def run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Measures and prints what the command line asks for."""
    from lopa_ascend.checkpoint import CheckpointError

    refused = (CheckpointError, ConfigError, ParameterError)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is loaded: llama.cpp has the cores for itself
    try:
        times = measure(args)
    except (*refused, subprocess.TimeoutExpired, RuntimeError, OSError) as error:
        parser.error(str(error))
    print_table(args, times)
    return 0


def measure(args: argparse.Namespace) -> dict[Kind, float]:
    """Seconds of the fastest pass of each kind.

    Raises:
        RuntimeError: the model computes other positions in a pass than those of a block, or llama-bench has failed.
    """
    import torch

    from lopa_ascend import LLM

    settings = {"max_model_len": 2 * CONTEXT, "max_num_seqs": 1, "threads": max(args.threads)}
    llms = {name: LLM(args.model, **settings, **format_options(name)) for name in args.formats}
    fastest: dict[Kind, float] = {}
    for _ in range(args.rounds):
        for threads in args.threads:
            torch.set_num_threads(threads)
            found = [
                (Kind("ours", name, threads, count), seconds)
                for name, llm in llms.items()
                for count in args.positions
                for seconds in own_passes(llm, count)
            ]
            for file in args.gguf:
                found += llama_passes(args.llama_bench, file, threads, args.positions)
            for kind, seconds in found:
                fastest[kind] = min(seconds, fastest.get(kind, seconds))
    for llm in llms.values():
        llm.close()
    return fastest


def own_passes(llm: LLM, positions: int) -> Iterator[float]:
    """Seconds of passes over a block of masks."""
    params = llm.params(decoding="d2f", block_size=positions, max_new_tokens=positions, ignore_eos=True)
    [prompt] = text_prompts(llm, 1, CONTEXT)
    llm.generate([prompt], params, quiet=True)  # keeps the prompt in the prefix cache
    for _ in range(PASSES):
        llm.engine.add(Request("pass", tuple(prompt), params))
        started = time.perf_counter()
        [update] = llm.engine.step()
        seconds = time.perf_counter() - started
        llm.engine.abort("pass")
        if update.model_tokens != positions:
            raise RuntimeError(f"a pass over {positions} masks computes {update.model_tokens} positions")
        yield seconds


def llama_passes(program: Path, file: str, threads: int, positions: Sequence[int]) -> Iterator[tuple[Kind, float]]:
    """Kinds and seconds of llama.cpp's passes."""
    options = {"-m": file, "-n": 0, "-p": ",".join(map(str, positions)), "-d": CONTEXT, "-t": threads, "-r": PASSES}
    for one in llama_bench(program, options):
        for nanoseconds in one["samples_ns"]:
            yield Kind("llama.cpp", one["model_type"], threads, one["n_prompt"]), nanoseconds / 1e9


def llama_bench(program: Path, options: dict[str, object]) -> list[dict[str, Any]]:
    """What llama-bench prints as JSON.

    Raises:
        RuntimeError: it has failed.
    """
    command = [str(program), "-o", "json", *(str(part) for option in options.items() for part in option)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=MOST_SECONDS, check=False)
    if ended.returncode:
        raise RuntimeError(f"{' '.join(command)}: {ended.stderr.strip()[-1000:]}")
    found: list[dict[str, Any]] = json.loads(ended.stdout)
    return found


def print_table(args: argparse.Namespace, times: dict[Kind, float]) -> None:
    """Prints a table in Markdown."""
    machine = describe_machine()
    [theirs] = llama_bench(args.llama_bench, {"-m": args.gguf[0], "-n": 0, "-p": 1, "-r": 1})
    versions = ", ".join(f"{name} {value}" for name, value in machine["versions"].items())
    versions += f"; llama.cpp {theirs['build_commit']}, {theirs['backends']}"
    print(f"{machine['processor']}, {machine['cores']} cores; {versions}")
    columns = sorted({(kind.side, kind.name): None for kind in times}, key=lambda column: column[0] != "ours")
    names = ["threads", "positions", *(f"{side}: {name}" for side, name in columns), "ours / llama.cpp"]
    rows = []
    for size in dict.fromkeys((kind.threads, kind.positions) for kind in times):
        row = {column: times[Kind(*column, *size)] for column in columns}
        ours, other = (min(row[column] for column in columns if column[0] == side) for side in ("ours", "llama.cpp"))
        rows.append([*size, *(f"{1000 * seconds:.1f}" for seconds in row.values()), f"{ours / other:.2f}"])
    print(f"\n{args.model.name}, ms of a pass:\n\n{table(names, rows)}")
