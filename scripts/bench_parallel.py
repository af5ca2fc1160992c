"""Measures what several ranks send each other, and how the work of a decode divides among branch-parallel ranks.

    python -m scripts.bench_parallel traffic                            the bundled model, tp 2 x bp 2; half a minute
    python -m scripts.bench_parallel traffic --window full --model DIR
    python -m scripts.bench_parallel scaling --plot scaling.png         a random model; two minutes

Prints Markdown tables, which `traffic --help` and `scaling --help` explain; docs/ranks.md has those of one machine.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from lopa_ascend.config import WINDOW_ATTENTIONS, DecodingParams, EngineConfig
from lopa_ascend.config.help import HelpFormatter
from lopa_ascend.demo import DEMO_MODEL
from scripts.arguments import number_from, picture

TRAFFIC = """\
Ranks decode held-out problems together, as a server does. What a rank sends in each step must equal a formula over
what the step computed, and stay below an upper bound; the exit status is 1 if it does not. The formulas, in bytes,
where s is the size of a hidden state's number:

  layers      2 (layers - 1) tokens x hidden x s, and for the last layer 2 x hidden x s for each row that is needed;
              at most 2 x layers x tokens x hidden x s
  vocabulary  a few float32 numbers for each predicted position: the shard's best token, its logit, and sums of the
              softmax
  branches    12 for each masked position of the group that has most of them; at most, with control and agreement,
              12 x positions of active blocks x slots of a rank + 256
  kv          with block-causal windows 0; with full windows the keys and values of the committed positions, and one
              hidden state
  control     8, and what arrives from outside
  agreement   32 each agreement_interval steps

The published engine gathers the whole logits of all branches at all positions of the window instead, 2 bytes a
logit, and every rank receives them all; it makes steps with one branch on one rank. A second table compares the two.
"""
SCALING = """\
One decode with four branches is made by 1, 2 and 4 ranks of one thread each, on a random Dream of 125 M parameters
(that of scripts.bench_decode). Branches share no positions: one rank would gain by sharing, and several would not.

All times are CPU seconds. The main thread of a rank computes everything, and sleeps while it waits for another rank, so
its CPU time has no waiting in it; the time of the other threads is measured too.

  scaling       CPU time of a decode by one rank, divided by bp times the CPU time of the busiest rank when bp ranks
                make it together (all threads counted); the median of the repetitions. 1 is the ideal, and 2 ranks
                should reach 0.85
  alone         one rank decodes while the others wait
  side by side  two ranks make a decode each at the same time; they share caches and memory, and so each needs more time
  exchange      the exchange of predictions between the ranks
  rest          the host's work of a step without the exchange: plan, layout, policy
"""


def traffic(args: argparse.Namespace) -> int:
    if args.tp * args.bp == 1:
        sys.exit("one rank sends nothing: choose a larger --tp or --bp")
    from scripts.ranks.traffic import measure  # imports torch, which takes seconds

    config = EngineConfig(
        model=str(args.model),
        dtype=args.dtype,
        tensor_parallel_size=args.tp,
        branch_parallel_size=args.bp,
        enable_prefix_caching=False,
        max_num_seqs=args.max_num_seqs,
        threads=1,
    )
    params = DecodingParams(
        num_branches=args.num_branches, max_new_tokens=args.max_tokens, window_attention=args.window
    )
    return int(not measure(config, args.model, params, args.problems))


def scaling(args: argparse.Namespace) -> int:
    from scripts.decode_bench.workload import WORKLOAD, write_model
    from scripts.ranks.scaling import draw, measure

    workload = json.loads(WORKLOAD.read_text())
    if not (args.model / "config.json").exists():
        write_model(args.model, workload)
    points = measure(args.model, workload, args.max_tokens, args.repetitions)
    if points is None:
        return 1
    if args.plot:
        draw(points, args.plot)
    return 0


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench_parallel",
        description=__doc__,
        formatter_class=HelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="{traffic,scaling}")
    add_traffic(commands)
    add_scaling(commands)
    return parser


def add_traffic(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command that measures what ranks send."""
    sent = commands.add_parser(
        "traffic",
        help="bytes between ranks, against formulas and the published engine",
        description=TRAFFIC,
        formatter_class=HelpFormatter,
    )
    sent.set_defaults(report=traffic)
    sent.add_argument(
        "--tp", type=number_from(1), default=2, metavar="N", help="ranks that split each forward pass (default: 2)"
    )
    sent.add_argument(
        "--bp",
        type=number_from(1),
        default=2,
        metavar="N",
        help="groups of --tp ranks that take different branches (default: 2)",
    )
    sent.add_argument(
        "--model",
        type=Path,
        default=DEMO_MODEL,
        metavar="DIR",
        help="Dream directory with a chat template (default: the bundled model)",
    )
    sent.add_argument(
        "--dtype",
        default="float32",
        choices=["float32", "bfloat16"],
        help="number format of the weights (default: float32)",
    )
    sent.add_argument(
        "--num-branches",
        type=number_from(0),
        default=3,
        metavar="K",
        help="lookahead branches, the paper's k (default: 3)",
    )
    sent.add_argument(
        "--window", default="block_causal", choices=WINDOW_ATTENTIONS, help="window attention (default: block_causal)"
    )
    sent.add_argument(
        "--problems", type=number_from(1), default=32, metavar="N", help="held-out problems to decode (default: 32)"
    )
    sent.add_argument(
        "--max-num-seqs", type=number_from(1), default=4, metavar="N", help="problems decoded at a time (default: 4)"
    )
    sent.add_argument(
        "--max-tokens", type=number_from(1), default=128, metavar="N", help="tokens of an answer (default: 128)"
    )


def add_scaling(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command that measures how work divides among ranks."""
    times = commands.add_parser(
        "scaling",
        help="CPU seconds of 1, 2 and 4 branch-parallel ranks",
        description=SCALING,
        formatter_class=HelpFormatter,
    )
    times.set_defaults(report=scaling)
    times.add_argument(
        "--model",
        type=Path,
        default=Path("build/bench-model"),
        metavar="DIR",
        help="where the random model is kept (default: build/bench-model)",
    )
    times.add_argument(
        "--max-tokens", type=number_from(1), default=128, metavar="N", help="tokens of the decode (default: 128)"
    )
    times.add_argument(
        "--repetitions", type=number_from(1), default=3, metavar="N", help="decodes of each kind (default: 3)"
    )
    times.add_argument("--plot", type=picture, metavar="FILE", help="also write the tables as a picture")


def main() -> None:
    args = build_parser().parse_args()
    sys.exit(args.report(args))


if __name__ == "__main__":
    main()
