"""Measures on a CPU what computing requests together gains, with short and with long prompts.

    python -m scripts.bench_batches                                   the model of scripts.bench_decode; some minutes
    python -m scripts.bench_batches --requests 1 4 --prompts 512 --branches 3 --plot batches.png

All requests of a decode start together, each with a random prompt of its own. Their prompts are computed first and kept
in the prefix cache, so that the steps that are measured decode only. Times are CPU seconds of this process. Prints one
row for each decode, with the columns

  prompt, requests, k   tokens of a prompt, requests decoded together, lookahead branches
  prompts               prompt tokens for each CPU second, when the prompts were computed together
  tokens/step           tokens that the model computes in a step
  model tokens/s        tokens that the model computes for each CPU second of decoding
  new tokens/s          tokens that requests get for each CPU second of decoding

and then the CPU microseconds for each computed token that every part of the steps takes, with its floor in brackets
(scripts/decode_bench/parts.py). Where a part falls from row to row, computing requests together helps it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

from lopa_ascend import LLM, DecodingParams
from lopa_ascend.config.help import HelpFormatter
from lopa_ascend.types import GenerationOutput
from scripts.arguments import number_from, picture
from scripts.bench_decode import decoding_params
from scripts.decode_bench.parts import PARTS, Parts, Peaks, measure_parts, measure_peaks
from scripts.decode_bench.workload import WORKLOAD, write_model


@dataclass(frozen=True)
class Decode:
    """Requests that were decoded together."""

    prompt_tokens: int
    """Of each request."""
    requests: int
    """How many."""
    k: int
    """Lookahead branches."""
    prefill_seconds: float
    """CPU seconds for all prompts."""
    outputs: tuple[GenerationOutput, ...]
    num_steps: int
    parts: Parts

    @property
    def seconds(self) -> float:
        """CPU seconds of the steps."""
        return sum(part.seconds for part in self.parts.by_name.values())

    @property
    def model_tokens(self) -> int:
        return sum(output.model_tokens for output in self.outputs)


def decode(llm: LLM, prompts: list[list[int]], k: int, params: DecodingParams) -> Decode:
    """Computes prompts together, and then decodes them together."""
    started = time.process_time()
    llm.generate(prompts, replace(params, max_new_tokens=1), quiet=True)
    prefill_seconds = time.process_time() - started
    # With full attention a prompt is kept together with the first block that it was computed with: 32 positions.
    llm.generate(prompts, replace(params, max_new_tokens=params.block_size), quiet=True)
    before = llm.engine.stats()
    outputs: list[GenerationOutput] = []
    parts = measure_parts(llm, lambda: outputs.extend(llm.generate(prompts, params, quiet=True)))
    after = llm.engine.stats()
    if after.num_prefill_steps != before.num_prefill_steps:
        raise RuntimeError("the prompts were computed again: the prefix cache has no room for them")
    steps = after.num_steps - before.num_steps
    return Decode(len(prompts[0]), len(prompts), k, prefill_seconds, tuple(outputs), steps, parts)


def row(one: Decode, peaks: Peaks) -> str:
    """The row of the table for one decode."""
    tokens = one.model_tokens
    cells = [
        f"{one.prompt_tokens:6d}",
        f"{one.requests:8d}",
        f"{one.k:2d}",
        f"{one.requests * one.prompt_tokens / one.prefill_seconds:8.0f}",
        f"{tokens / one.num_steps:11.0f}",
        f"{tokens / one.seconds:14.0f}",
        f"{sum(len(output.token_ids) for output in one.outputs) / one.seconds:12.1f}",
    ]
    for name in PARTS:
        part = one.parts.by_name[name]
        cells.append(f"{1e6 * part.seconds / tokens:9.0f} ({1e6 * part.floor(peaks) / tokens:.0f})".rjust(21))
    return "  ".join(cells)


def draw(decodes: Sequence[Decode], path: Path) -> None:
    """Draws how many tokens the model computes in a second against the number of requests."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for prompt, k in dict.fromkeys((one.prompt_tokens, one.k) for one in decodes):
        line = [one for one in decodes if (one.prompt_tokens, one.k) == (prompt, k)]
        speeds = [one.model_tokens / one.seconds for one in line]
        axes.plot([one.requests for one in line], speeds, marker="o", label=f"prompts of {prompt}, k = {k}")
    axes.set(
        xscale="log", xlabel="requests decoded together", ylabel="computed tokens for each CPU second", ylim=(0, None)
    )
    axes.legend()
    figure.savefig(path, dpi=150)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench_batches", description=__doc__, formatter_class=HelpFormatter
    )
    for name, default, least, text in (
        ("--requests", [1, 8, 32], 1, "numbers of requests"),
        ("--prompts", [32, 1500], 1, "tokens of a prompt"),
        ("--branches", [0, 3], 0, "lookahead branches, the paper's k; 0 is D2F"),
    ):
        shown = " ".join(map(str, default))
        parser.add_argument(
            name, type=number_from(least), nargs="+", default=default, metavar="N", help=f"{text} (default: {shown})"
        )
    parser.add_argument(
        "--new-tokens", type=number_from(1), default=64, metavar="N", help="tokens to decode (default: 64)"
    )
    parser.add_argument(
        "--dtype",
        default="bfloat16",
        choices=("float32", "bfloat16"),
        help="number format of the weights (default: bfloat16)",
    )
    parser.add_argument("--threads", type=number_from(1), default=1, metavar="N", help="threads of torch (default: 1)")
    parser.add_argument(
        "--model", type=Path, default=Path("build/bench-model"), metavar="DIR",
        help="where the random model is kept (default: build/bench-model)",
    )  # fmt: skip
    parser.add_argument("--plot", type=picture, metavar="FILE.png", help="draw computed tokens/s against requests")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    args = build_parser().parse_args(argv)
    if not (args.model / "config.json").exists():
        write_model(args.model, json.loads(WORKLOAD.read_text()))
    llm = LLM(args.model, dtype=args.dtype, max_num_seqs=max(args.requests), max_num_batched_tokens=16384)
    torch.set_num_threads(args.threads)
    peaks, _, _ = measure_peaks(getattr(torch, args.dtype))
    print(f"{args.dtype}, {args.threads} thread(s), {peaks.flops / 1e9:.0f} GFLOP/s a core\n")
    heads = ["prompt", "requests", " k", " prompts", "tokens/step", "model tokens/s", "new tokens/s"]
    print("  ".join([*heads, *(name.rjust(21) for name in PARTS)]))
    rng = random.Random(0)
    decodes = []
    for prompt_tokens in args.prompts:
        for k in args.branches:
            for requests in args.requests:
                prompts = [[rng.randrange(100) for _ in range(prompt_tokens)] for _ in range(requests)]
                decodes.append(decode(llm, prompts, k, decoding_params(k, "full", args.new_tokens)))
                print(row(decodes[-1], peaks), flush=True)
    if args.plot:
        draw(decodes, args.plot)


if __name__ == "__main__":
    main()
