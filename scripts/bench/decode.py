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

  forwards, TPF      forward passes, and tokens of answers divided by them
  tokens/step        tokens that the model computes in an engine step; positions that branches share count once
  cpu s, wall s      CPU seconds of all answers, the median of the rounds, with the least and the most in brackets; and
                     seconds by the clock of the same decode
  tokens/s           tokens of answers for each CPU second
  longest step       CPU milliseconds; every other request waits so long

With --arriving there are the median and the longest step of the others, how long they wait between two steps while the
prompt comes in (median and longest), both waits in median steps, and CPU seconds and steps until it is computed.

Below it the CPU milliseconds of an engine step by part; --floors adds the least time that each part could take by
memory and by products, and which share of its time the longer of the two is. Peaks of this machine are measured in the
same run (scripts/bench/parts.py).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from lopa_ascend.config import ConfigError, DecodingParams, EngineConfig, ParameterError
from lopa_ascend.config.combinations import fitting_defaults
from lopa_ascend.config.engine import QUANTIZATIONS
from lopa_ascend.config.settings import Setting, refuse_unknown, settings
from lopa_ascend.demo import DEMO_MODEL
from lopa_ascend.families import recommended_decoding
from scripts.arguments import add_numbers, model_directory
from scripts.bench.machine import describe_machine
from scripts.bench.prompts import text_prompts
from scripts.bench.tables import table

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
        parser.add_argument(name, nargs="+", default=[], metavar="NAME=VALUE", help=text)
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


def run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Measures and prints what the command line asks for."""
    from lopa_ascend.checkpoint import CheckpointError

    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is loaded
    try:
        params = _given(DecodingParams.parameters(), args.params)
        report = measure_all(args, _given(settings(EngineConfig), args.engine), params)
    except (CheckpointError, ConfigError, ParameterError) as error:
        parser.error(str(error))
    print(json.dumps(report) if args.json else tables(report))
    return 0


def _given(known: Mapping[str, Setting], texts: list[str]) -> dict[str, Any]:
    """The values of NAME=VALUE.

    Raises:
        ParameterError: there is no such name, or the value is of the wrong kind.
    """
    given = dict(text.partition("=")[::2] for text in texts)
    refuse_unknown(given, list(known))
    found = {}
    for name, text in given.items():
        try:
            found[name] = known[name].kind.parse(text)
        except ValueError as error:
            raise ParameterError(name, str(error)) from error
    return found


def measure_all(args: argparse.Namespace, engine: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Everything that was measured, as it is printed with --json; ``engine`` and ``given`` are further settings and
    decoding parameters."""
    from scripts.bench import measure, parts

    cases = [
        (requests, case_params(args, given, k, block_size))
        for block_size, requests, k in itertools.product(args.block_size or [None], args.requests, args.branches)
    ]
    llm = load(args, engine)
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
    if args.arriving:
        [long] = text_prompts(llm, 1, args.arriving)
        arrivals = [
            _keys(requests, params) | measure.arrive(llm, prompts[:requests], params, long)
            for requests, params in cases
        ]
        llm.close()
        return about | {"arrivals": arrivals}
    peaks = None
    if args.floors:
        peaks = parts.measure_peaks(llm.engine.runner.model.head.dtype, llm.engine.ranks[0].weights)
    decode = partial(measure.decode, llm, prompts, cached=args.cached_prompts, peaks=peaks)
    rounds = [[decode(params, requests) for requests, params in cases] for _ in range(args.rounds)]
    llm.close()
    of_cases = zip(*rounds, strict=True)
    decodes = [_keys(*case) | measure.middle(found) for case, found in zip(cases, of_cases, strict=True)]
    return about | {"peaks": peaks and asdict(peaks), "decodes": decodes}


def _keys(requests: int, params: DecodingParams) -> dict[str, Any]:
    """What distinguishes decodes."""
    return dict(zip(KEYS, (params.num_branches, params.block_size, requests), strict=True))


def load(args: argparse.Namespace, engine: dict[str, Any]) -> LLM:
    """The model that is measured.

    Raises:
        ParameterError: its steps would be compiled.
    """
    from lopa_ascend import LLM

    if engine.get("graph_mode", "eager") != "eager":
        raise ParameterError("graph_mode", "must be 'eager': a compiled step cannot be divided into parts")
    options: dict[str, Any] = {
        "enable_prefix_caching": args.cached_prompts,
        "max_num_seqs": max(args.requests) + bool(args.arriving),
        "threads": args.threads,
        "graph_mode": "eager",
        **(format_options(args.dtype) if args.dtype else {}),
    }
    return LLM(args.model, **{**options, **engine})


def format_options(name: str) -> dict[str, str]:
    """The settings of an engine for one of ``FORMATS``."""
    return {"dtype": "bfloat16", "quantization": name} if name in QUANTIZATIONS else {"dtype": name}


def case_params(args: argparse.Namespace, given: dict[str, Any], k: int, block_size: int | None) -> DecodingParams:
    """How a case is decoded; without ``block_size`` in blocks of the model's."""
    options: dict[str, Any] = {
        "decoding": "lopa" if k else given.get("base", "d2f"),
        "num_branches": k,
        "window_attention": "block_causal",
        "max_new_tokens": args.new_tokens,
    }
    if block_size is not None:
        options["block_size"] = block_size
    options |= given
    if not k:
        options.pop("base", None)
    recommended = recommended_decoding(args.model or DEMO_MODEL)
    return DecodingParams(**{**fitting_defaults(recommended, options), **options})


# ---- tables ----------------------------------------------------------------------------------------------------------

KEYS = ("k", "block_size", "requests")
HEADINGS = ("forwards", "TPF", "tokens/step", "cpu s", "wall s", "tokens/s", "longest step, ms")


def tables(report: dict[str, Any]) -> str:
    """The figures and the parts in Markdown."""
    of_all = (f"{name} {report[name]}" for name in ("model", "dtype", "threads"))
    lines = [f"{report['machine']['processor']}: {', '.join(of_all)}\n"]
    if "arrivals" in report:
        return "\n".join([*lines, table(list(report["arrivals"][0]), (one.values() for one in report["arrivals"]))])
    decodes, figures, parts = report["decodes"], [], []
    names = list(decodes[0]["parts"])
    for one in decodes:
        cells = [one[key] for key in KEYS]
        seconds, model_tokens = one["cpu_seconds"], one["model_tokens"] / one["steps"]
        low, high = one["cpu_spread"]
        spread = f" ({low:.2f} to {high:.2f})" if low < high else ""
        times = (f"{seconds:.2f}{spread}", f"{one['wall_seconds']:.2f}", f"{one['tokens'] / seconds:.1f}")
        rates = (f"{one['tpf']:.2f}", f"{model_tokens:.1f}", *times, f"{one['longest_step_ms']:.1f}")
        figures.append([*cells, one["forwards"], *rates])
        parts.append([*cells, *(f"{1000 * one['parts'].get(name, 0) / one['steps']:.1f}" for name in names)])
    lines += [table((*KEYS, *HEADINGS), figures), "\nCPU ms of a step:\n", table((*KEYS, *names), parts)]
    if "floors" in decodes[0]:
        peaks = ", ".join(f"{name} {value / 1e9:.1f}" for name, value in report["peaks"].items())
        columns = (*KEYS, "part", "CPU ms", "least by memory", "least by products", "share")
        lines += [
            f"\nPeaks of a CPU second, in 10^9: {peaks}\n",
            table(columns, itertools.chain(*map(floors, decodes))),
        ]
    return "\n".join(lines)


def floors(one: dict[str, Any]) -> list[list[Any]]:
    """For each part of a decode its time, the least times, and the share of its time that the longer one is."""
    rows = [(name, one["parts"][name], *least.values()) for name, least in one["floors"].items()]
    least = sum(max(memory, products) for _, _, memory, products in rows)
    shares = [max(row[2:]) / row[1] for row in rows] + [least / one["cpu_seconds"]]
    rows.append(("all", *(sum(row[column] for row in rows) for column in (1, 2, 3))))
    keys = [one[key] for key in KEYS]
    return [
        [*keys, name, *(f"{1000 * value / one['steps']:.2f}" for value in seconds), f"{share:.0%}"]
        for (name, *seconds), share in zip(rows, shares, strict=True)
    ]
