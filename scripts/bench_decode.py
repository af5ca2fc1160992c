"""Measures decoding speed on a CPU beside a stand-in of the published code's arithmetic, and each part of a step beside
the least time that it could take on this machine. Peaks and times are of one run.

    python -m scripts.bench_decode
    python -m scripts.bench_decode --branches 8 --formats bfloat16 --windows full --plot step.png

The workload is a random Dream of 125 M parameters (hidden size 768, 12 layers, vocabulary 32,000) with a prompt of 128
tokens, 128 new tokens and blocks of 32. Times are CPU seconds of this process, so other work on the machine disturbs
them little. Takes minutes; prints one row for each decode, with the columns

  forwards       forward passes for the new tokens
  TPF            visible tokens for each forward pass
  tokens/step    tokens computed in a step; positions that branches share are computed once
  cpu secs       CPU seconds of the decode; the median of the rounds
  wall secs      seconds of the same decode by the clock: what more threads shorten, if nothing else runs
  forward        FLOP/s of the model's forward passes (linear layers); in brackets as a share of the GEMM peak
  decode         FLOP/s of the whole decode: linear layers and LM head by all CPU seconds; in brackets as a share of the
                 GEMM peak
  stand-in       CPU seconds of the stand-in divided by ours. The stand-in decodes in the same rounds, with as many
                 branches and full attention; it computes branches one after the other with transformers' Qwen2
                 (scripts/decode_bench)
  a token        the same ratio for each computed token. In half precision, rounding can lead the two sides to different
                 tokens, and so to more or fewer forward passes; this ratio does not depend on their number

and below the table, for each decode, the CPU milliseconds of a step's parts (scripts/decode_bench/parts.py) with their
floors in brackets.

With full attention in float32 the output ids are compared with those of the published code.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

from lopa_ascend import LLM, DecodingParams
from lopa_ascend.config.help import HelpFormatter
from lopa_ascend.types import GenerationOutput
from scripts.arguments import number_from, picture
from scripts.benchmarking.machine import describe_machine
from scripts.decode_bench.draw import StepParts, draw_parts
from scripts.decode_bench.parts import PARTS, Parts, Peaks, measure_parts, measure_peaks
from scripts.decode_bench.stand_in import StandIn, StandInOutput
from scripts.decode_bench.workload import WORKLOAD, workload_prompt, write_model

RECORDED = {0: "d2f", 4: "bf4", 8: "bf8"}
"""Lookahead branches -> name under which the workload file has the published code's output ids."""
NEW_TOKENS = 128
"""New tokens of the recorded decodes."""
HEADINGS = (
    "forwards",
    "   TPF",
    "tokens/step",
    " cpu secs",
    "wall secs",
    "forward GFLOP/s",
    "  decode GFLOP/s",
    " stand-in",
    "  a token",
)
"""Titles of the columns of ``report``, each as wide as its column."""
Item = TypeVar("Item")


@dataclass(frozen=True)
class Measurement:
    """One decode."""

    output: GenerationOutput
    parts: Parts
    wall: float
    """Seconds by the clock."""

    @property
    def total(self) -> float:
        """CPU seconds of the decode."""
        return sum(part.seconds for part in self.parts.by_name.values())


def measure(llm: LLM, prompt: list[int], params: DecodingParams) -> Measurement:
    """Decodes a prompt, and measures the CPU time of the parts."""
    outputs: list[GenerationOutput] = []
    started = time.perf_counter()
    parts = measure_parts(llm, lambda: outputs.extend(llm.generate([prompt], params, quiet=True)))
    return Measurement(outputs[0], parts, time.perf_counter() - started)


def report(measured: Measurement, peak: float, stand_in: StandInOutput | None, verdict: str) -> str:
    """The row of the table for one decode.

    Args:
        measured: the decode.
        peak: FLOP/s of the GEMM peak, in the faster of the model's dtype and float32.
        stand_in: the same decode by the stand-in; None if it was not run.
        verdict: whether the output ids are those of the published code; empty if these were not recorded.
    """
    output, work = measured.output, measured.parts.by_name
    # As counted call by call: after its attention, the last layer computes only the rows that are read.
    layers_flop = work["products"].flops + work["products"].int8_flops
    forward_speed = layers_flop / measured.parts.forward
    decode_speed = (layers_flop + work["head and score"].flops) / measured.total
    cells = (
        f"{output.num_forwards:8d}",
        f"{output.tokens_per_forward:6.2f}",
        f"{output.model_tokens / output.num_forwards:11.1f}",
        f"{measured.total:9.2f}",
        f"{measured.wall:9.2f}",
        f"{forward_speed / 1e9:8.1f} ({forward_speed / peak:4.2f})",
        f"{decode_speed / 1e9:8.1f} ({decode_speed / peak:4.2f})",
        *_compared(measured, stand_in),
        verdict,
    )
    return "  ".join(cells)


def _compared(measured: Measurement, stand_in: StandInOutput | None) -> tuple[str, str]:
    """CPU seconds of the stand-in divided by ours, of the decode and of a computed token."""
    if stand_in is None:
        return " " * 9, " " * 9
    ratio = stand_in.seconds / measured.total
    a_token = ratio * measured.output.model_tokens / stand_in.model_tokens
    return f"{ratio:7.2f} x", f"{a_token:7.2f} x"


def step_parts(label: str, measured: Measurement, peaks: Peaks, before: dict[str, dict[str, float]]) -> StepParts:
    """The parts of a decode's mean step.

    Args:
        label: of the decode.
        measured: the decode.
        peaks: of the same run.
        before: milliseconds by label and part that another run has written; empty for none.
    """
    scale = 1000 / measured.output.num_forwards
    return StepParts(
        label=label,
        taken={name: scale * measured.parts.by_name[name].seconds for name in PARTS},
        floors={name: scale * measured.parts.by_name[name].floor(peaks) for name in PARTS},
        before=before.get(label),
    )


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench_decode", description=__doc__, formatter_class=HelpFormatter
    )
    parser.add_argument(
        "--branches",
        type=number_from(0),
        nargs="+",
        default=[0, 4, 8],
        metavar="K",
        help="lookahead branches, the paper's k; 0 is D2F (default: 0 4 8)",
    )
    for name, choices, text in (
        ("--formats", ["float32", "bfloat16", "w8a8"], "number formats of the weights; w8a8 is int8 beside bfloat16"),
        ("--windows", ["full", "block_causal"], "window attentions"),
    ):
        parser.add_argument(name, nargs="+", default=choices, choices=choices, help=f"{text} (default: all)")
    parser.add_argument(
        "--threads",
        type=number_from(1),
        nargs="+",
        default=[1],
        metavar="N",
        help="numbers of CPU threads (default: 1)",
    )
    parser.add_argument(
        "--rounds",
        type=number_from(1),
        default=1,
        metavar="N",
        help="decodes of each kind, all kinds in turn (default: 1)",
    )
    parser.add_argument(
        "--new-tokens",
        type=number_from(1),
        default=NEW_TOKENS,
        metavar="N",
        help=f"tokens to decode (default: {NEW_TOKENS})",
    )
    parser.add_argument("--no-stand-in", action="store_true", help="only our side: leaves the column stand-in empty")
    parser.add_argument(
        "--model",
        type=Path,
        default=Path("build/bench-model"),
        metavar="DIR",
        help="where the random model is kept (default: build/bench-model)",
    )
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the parts of the steps there, as JSON")
    parser.add_argument(
        "--before", type=Path, metavar="FILE", help="parts that --write of an earlier run has written, to draw beside"
    )
    parser.add_argument("--plot", type=picture, metavar="FILE.png", help="draw the parts of the steps")
    return parser


def decoding_params(k: int, window: str, new_tokens: int) -> DecodingParams:
    """How the workload is decoded with k lookahead branches."""
    return DecodingParams(
        decoding="lopa" if k else "d2f", num_branches=k, max_new_tokens=new_tokens, confidence="neg_entropy",
        window_attention=window, finish_at_eos=False, ignore_eos=True,
    )  # fmt: skip


def run_format(
    args: argparse.Namespace, work: dict[str, Any], form: str, threads: int, before: dict[str, dict[str, float]]
) -> list[StepParts]:
    """Measures and prints the decodes in one number format with one number of threads.

    Args:
        args: all arguments of the command.
        work: the contents of the workload file.
        form: one of the choices of --formats.
        threads: of torch.
        before: as in ``step_parts``.
    """
    dtype, quantization = ("bfloat16", form) if form == "w8a8" else (form, None)
    llm = LLM(args.model, dtype=dtype, quantization=quantization, enable_prefix_caching=False)
    stand_in = None if args.no_stand_in else StandIn(args.model, getattr(torch, dtype))
    torch.set_num_threads(threads)
    peaks, own, wide = measure_peaks(getattr(torch, dtype))
    ours, theirs = decode_in_turn(args, workload_prompt(work), llm, stand_in)
    print(
        f"\n{form}, {threads} thread(s): {dtype} GEMM peak {own / 1e9:.1f} GFLOP/s a core, float32 {wide / 1e9:.1f}, "
        f"int8 {peaks.int8_flops / 1e9:.1f}; "
        f"copies {peaks.bytes / 1e9:.1f} GB/s, "
        f"reads from memory {peaks.memory / 1e9:.1f} GB/s"
    )
    print("  ".join([f"{'window':>12s}   k", *HEADINGS]))
    found = []
    for (window, k), measured in ours.items():
        middle = _middle(measured, lambda one: one.total)
        is_recorded = window == "full" and form == "float32" and args.new_tokens == NEW_TOKENS
        verdict = compare_ids(middle.output, work["expected"], k) if is_recorded else ""
        stand_in_middle = _middle(theirs[k], lambda one: one.seconds) if theirs[k] else None
        print(f"{window:>12s} {k:3d}  {report(middle, peaks.flops, stand_in_middle, verdict)}", flush=True)
        label = f"{form}, {window}, k = {k}, {threads} thread(s)"
        found.append(step_parts(label, middle, peaks, before))
    return found


def decode_in_turn(
    args: argparse.Namespace, prompt: list[int], llm: LLM, stand_in: StandIn | None
) -> tuple[dict[tuple[str, int], list[Measurement]], dict[int, list[StandInOutput]]]:
    """Makes all kinds of decode in each round, so that a machine that becomes slower makes all of them slower.

    Returns:
        Our decodes by window attention and lookahead branches, and the stand-in's by lookahead branches.
    """
    ours: dict[tuple[str, int], list[Measurement]] = {(window, k): [] for window in args.windows for k in args.branches}
    theirs: dict[int, list[StandInOutput]] = {k: [] for k in args.branches}
    for _ in range(args.rounds):
        if stand_in is not None:
            for k in args.branches:
                theirs[k].append(stand_in.decode(prompt, decoding_params(k, "full", args.new_tokens)))
        for (window, k), measured in ours.items():
            measured.append(measure(llm, prompt, decoding_params(k, window, args.new_tokens)))
    return ours, theirs


def _middle(decodes: Sequence[Item], seconds: Callable[[Item], float]) -> Item:
    """The decode with the median time; of an even number of decodes the slower one of the two in the middle."""
    return sorted(decodes, key=seconds)[len(decodes) // 2]


def compare_ids(output: GenerationOutput, expected: dict[str, Any], k: int) -> str:
    """Whether the output ids are those of the published code.

    Args:
        output: a decode with full attention in float32.
        expected: the published code's decodes by name, as in the workload file.
        k: lookahead branches; empty is returned where this number was not recorded.
    """
    if k not in RECORDED:
        return ""
    recorded = expected[f"{RECORDED[k]}/float32"]["output_ids"]
    return "same ids" if list(output.token_ids) == recorded else "OTHER IDS"


def print_parts(decodes: Sequence[StepParts]) -> None:
    """The parts of all decodes as a table."""
    print("\nCPU ms of a step (floor)\n" + " " * 44 + "".join(f"{part:>24s}" for part in PARTS))
    for decode in decodes:
        cells = (f"{decode.taken[part]:.1f} ({decode.floors[part]:.1f})" for part in PARTS)
        print(f"{decode.label:44s}" + "".join(f"{cell:>24s}" for cell in cells))


def main(argv: Sequence[str] | None = None) -> None:
    args = build_parser().parse_args(argv)
    work = json.loads(WORKLOAD.read_text())
    if not (args.model / "config.json").exists():
        write_model(args.model, work)
    before = json.loads(args.before.read_text()) if args.before else {}
    decodes: list[StepParts] = []
    for form in args.formats:
        for num_threads in args.threads:
            decodes += run_format(args, work, form, num_threads, before)
    print_parts(decodes)
    if args.write:
        args.write.write_text(json.dumps({decode.label: dict(decode.taken) for decode in decodes}, indent=1) + "\n")
    if args.plot:
        draw_parts(decodes, f"{describe_machine()['processor']}, random Dream of 125 M parameters", args.plot)


if __name__ == "__main__":
    main()
