"""Measures what several ranks send each other, and how the work of a decode divides among branch-parallel ranks.

    bench ranks traffic                                 the bundled model, tp 2 x bp 2; half a minute
    bench ranks traffic --tp 1 --bp 4 --window full --model DIR
    bench ranks scaling                                 a random model; two minutes

traffic: ranks decode held-out problems together, as a server does. What a rank sends in each step must equal a formula
over what the step computed, and stay below an upper bound; the exit status is 1 if it does not. The formulas, in bytes,
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
  agreement   32 for each comparison of the ranks' decisions

scaling: one decode with four branches is made by 1, 2 and 4 ranks of one thread each, on the random Dream of 125 M
parameters that `bench decode --random` has. With full attention branches share no positions.

All times are CPU seconds. The main thread of a rank computes everything, and sleeps while it waits for another rank, so
its CPU time has no waiting in it; the time of the other threads is measured too.

  scaling     CPU time of a decode by one rank, divided by bp times the CPU time of the busiest rank when bp ranks make
              it together (all threads counted); the median of the repetitions. 1 is the ideal. Ranks of one machine
              share caches and memory, so it is less even if the work divides evenly
  exchange    the exchange of predictions between the ranks
  rest        the host's work of a step without the exchange: plan, layout, policy; host is both
"""

from __future__ import annotations

import argparse

from lopa_ascend.config import DecodingParams, EngineConfig
from lopa_ascend.decode.block_pipeline import WINDOW_ATTENTIONS
from lopa_ascend.demo import DEMO_MODEL
from scripts.arguments import model_directory, number_from


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=("traffic", "scaling"), help="what is measured")
    for name, default, text in (
        ("--max-tokens", 128, "tokens of an answer"),
        ("--tp", 2, "traffic: ranks that split each forward pass"),
        ("--bp", 2, "traffic: groups of --tp ranks that take different branches"),
        ("--problems", 32, "traffic: held-out problems to decode"),
        ("--max-num-seqs", 4, "traffic: problems decoded at a time"),
        ("--repetitions", 3, "scaling: decodes of each kind"),
    ):
        parser.add_argument(
            name, type=number_from(1), default=default, metavar="N", help=f"{text} (default: {default})"
        )
    parser.add_argument(
        "--branches", type=number_from(0), default=3, metavar="K", help="traffic: lookahead branches (default: 3)"
    )
    parser.add_argument(
        "--model",
        type=model_directory,
        default=DEMO_MODEL,
        metavar="MODEL",
        help="traffic: a Dream with a chat template (default: the bundled model)",
    )
    parser.add_argument(
        "--dtype",
        default="float32",
        choices=("float32", "bfloat16"),
        help="traffic: number format of the weights (default: float32)",
    )
    parser.add_argument(
        "--window",
        default="block_causal",
        choices=WINDOW_ATTENTIONS,
        help="traffic: window attention (default: block_causal)",
    )


def run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Measures; the status is 1 if a rank sent something else than the formulas say, or the ranks' tokens differ."""
    if args.what == "scaling":
        return _scaling(args)
    if args.tp * args.bp == 1:
        parser.error("one rank sends nothing: choose a larger --tp or --bp")
    return _traffic(args)


def _traffic(args: argparse.Namespace) -> int:
    from scripts.bench.ranks.traffic import measure  # imports torch, which takes seconds

    config = EngineConfig(
        model=str(args.model),
        dtype=args.dtype,
        tensor_parallel_size=args.tp,
        branch_parallel_size=args.bp,
        enable_prefix_caching=False,
        max_num_seqs=args.max_num_seqs,
        threads=1,
    )
    params = DecodingParams(num_branches=args.branches, max_new_tokens=args.max_tokens, window_attention=args.window)
    return int(not measure(config, args.model, params, args.problems))


def _scaling(args: argparse.Namespace) -> int:
    from scripts.bench.ranks.scaling import measure
    from scripts.bench.workload import RANDOM_MODEL, write_random_model

    write_random_model(RANDOM_MODEL)
    return int(not measure(RANDOM_MODEL, args.max_tokens, args.repetitions))
