"""Measures this engine in this process: tokens, forward passes, CPU seconds, and the parts of a step.

    bench decode                                      the bundled model on held-out problems, D2F and k = 4 and 8
    bench decode --json                               the same as one line, to compare two checkouts
    bench decode --requests 1 8 32 --cached-prompts   what decoding requests together gains
    bench decode --block-size 4 32 --dtype w8a8 --floors              what is left above the machine's limits
    bench decode --model MODEL --branches 0 3 --params base=linear_spec
                                                      drafts that a causal model checks, without and with branches
    bench decode --requests 16 --new-tokens 4000 --arriving 16384     how long a long prompt makes others wait

A model without a tokenizer gets prompts of 128 random token ids. All combinations of the lists are decoded, in each
round one after the other. Times are CPU seconds of this process, so other work on the machine disturbs them little. The
columns:

  tokens, digest     tokens of answers, and a digest of them
  forwards, TPF      forward passes, and tokens of answers divided by them
  steps, tokens/step engine steps, and tokens that the model computes in one; positions that branches share count once
  cpu s, wall s      CPU seconds of all answers, the median of the rounds, with the least and the most; and seconds by
                     the clock of the same decode
  tokens/s           tokens of answers for each CPU second
  longest step       CPU milliseconds; every other request waits so long
  products ... host  CPU milliseconds of an engine step by part

With --arriving there are the median and the longest step of the others, how long they wait between two steps while the
prompt comes in (median and longest), both waits in median steps, and CPU seconds and steps until it is computed.

--floors adds the least time that each part could take by memory and by products, and which share of its time the longer
of the two is. Peaks of this machine are measured in the same run (scripts/bench/parts.py).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from lopa_ascend.config import DecodingParams, ParameterError
from lopa_ascend.config.combinations import fitting_defaults
from lopa_ascend.config.engine import QUANTIZATIONS
from lopa_ascend.demo import DEMO_MODEL
from lopa_ascend.families import recommended_decoding
from scripts.arguments import add_numbers, model_directory, named_value
from scripts.bench.machine import describe_machine
from scripts.bench.prompts import text_prompts
from scripts.bench.tables import records

if TYPE_CHECKING:
    from lopa_ascend import LLM

NUM_PROBLEMS = 8
"""Held-out problems that are decoded where nothing is said of it."""
FORMATS = ("float32", "bfloat16", *QUANTIZATIONS)
"""Number formats of weights."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=model_directory, metavar="MODEL", help="(default: the bundled one)")
    add_numbers(
        parser,
        ("--branches", [0, 4, 8], 0, "lookahead branches, the paper's k; 0 is D2F"),
        ("--block-size", [], 1, "positions of a block; default: the model's"),
        ("--requests", [1], 1, "requests that are decoded together"),
        ("--prompt-tokens", None, 1, "tokens of a prompt; default: a problem's; 128 random ones"),
        ("--prompts", None, 1, f"prompts to decode (default: {NUM_PROBLEMS}, at least the largest of --requests)"),
        ("--new-tokens", 128, 1, "tokens of an answer, at most"),
        ("--threads", 1, 1, "threads of torch"),
        ("--rounds", 1, 1, "decodes of each kind"),
        ("--arriving", None, 1, "let a prompt of N tokens come in while others decode"),
    )
    for name, text in (
        ("--engine", "engine settings, such as max_model_len=512"),
        ("--params", "decoding parameters, such as tau_conf=0.8"),
    ):
        parser.add_argument(name, nargs="+", type=named_value, default=[], metavar="NAME=VALUE", help=text)
    parser.add_argument(
        "--dtype",
        choices=FORMATS,
        help="number format of the weights; quantised ones beside bfloat16 (default: the model's)",
    )
    for name, text in (
        ("--cached-prompts", "compute prompts before, so that only decoding is measured"),
        ("--floors", "measure the machine's peaks (seconds), and print floors"),
        ("--json", "print one line of JSON"),
    ):
        parser.add_argument(name, action="store_true", help=text)


def run(args: argparse.Namespace) -> int:
    """Measures and prints what the command line asks for."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is loaded
    report = measure_all(args)
    if args.json:
        print(json.dumps(report))
        return 0
    of_all = (f"{name} {report[name]}" for name in ("model", "dtype", "threads"))
    print(f"{report['machine']['processor']}: {', '.join(of_all)}")
    for found in report.values():
        if isinstance(found, list):
            print(f"\n{records(found)}")
    return 0


def measure_all(args: argparse.Namespace) -> dict[str, Any]:
    """Everything that was measured, as it is printed with --json: each list is a table."""
    from scripts.bench import measure, parts

    cases = [
        (requests, case_params(args, k, block_size))
        for block_size, requests, k in itertools.product(args.block_size or [None], args.requests, args.branches)
    ]
    llm = load(args)
    about = {
        "machine": describe_machine(),
        "model": str(args.model or "bundled"),
        "dtype": args.dtype or llm.config.dtype,
        "threads": args.threads,
    }
    prompts = text_prompts(llm, max(args.prompts or NUM_PROBLEMS, *args.requests), args.prompt_tokens)
    for _, params in cases:  # first calls take longer
        first_block = replace(params, max_new_tokens=min(args.new_tokens, params.block_size))
        llm.generate(prompts[:1], first_block, quiet=True)
    keys = [
        {"k": params.num_branches, "block_size": params.block_size, "requests": requests} for requests, params in cases
    ]
    if args.arriving:
        [long] = text_prompts(llm, 1, args.arriving)
        found = [measure.arrive(llm, prompts[:requests], params, long) for requests, params in cases]
        llm.close()
        return about | {"arrivals": [key | one for key, one in zip(keys, found, strict=True)]}
    peaks = None
    if args.floors:
        peaks = parts.measure_peaks(llm.engine.runner.model.head.dtype, llm.engine.ranks[0].weights)
    decode = partial(measure.decode, llm, prompts, cached=args.cached_prompts, peaks=peaks)
    rounds = [[decode(params, requests) for requests, params in cases] for _ in range(args.rounds)]
    llm.close()
    decodes = [key | measure.middle(found) for key, found in zip(keys, zip(*rounds, strict=True), strict=True)]
    if peaks is None:
        return about | {"decodes": decodes}
    floors = [key | row for key, one in zip(keys, decodes, strict=True) for row in one.pop("floors")]
    of_second = {f"{name}, 10^9/s": round(value / 1e9, 1) for name, value in asdict(peaks).items()}
    return about | {"decodes": decodes, "peaks": [of_second], "floors": floors}


def load(args: argparse.Namespace) -> LLM:
    """The model that is measured; ParameterError if its steps would be compiled."""
    from lopa_ascend import LLM

    options: dict[str, Any] = {
        "enable_prefix_caching": args.cached_prompts,
        "max_num_seqs": max(args.requests) + bool(args.arriving),
        "threads": args.threads,
        "graph_mode": "eager",
        **(format_options(args.dtype) if args.dtype else {}),
        **dict(args.engine),
    }
    if options["graph_mode"] != "eager":
        raise ParameterError("graph_mode", "must be 'eager': a compiled step cannot be divided into parts")
    return LLM(args.model, **options)


def format_options(name: str) -> dict[str, str]:
    """The settings of an engine for one of ``FORMATS``."""
    return {"dtype": "bfloat16", "quantization": name} if name in QUANTIZATIONS else {"dtype": name}


def case_params(args: argparse.Namespace, k: int, block_size: int | None) -> DecodingParams:
    """How a case is decoded; without ``block_size`` in blocks of the model's."""
    given = dict(args.params)
    options: dict[str, Any] = {
        "decoding": "lopa" if k else given.get("base", "d2f"),
        "num_branches": k,
        "window_attention": "block_causal",
        "max_new_tokens": args.new_tokens,
        **({} if block_size is None else {"block_size": block_size}),
        **given,
    }
    if not k:
        options.pop("base", None)
    recommended = recommended_decoding(args.model or DEMO_MODEL)
    return DecodingParams(**{**fitting_defaults(recommended, options), **options})
