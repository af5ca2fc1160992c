"""Measures this engine in this process: tokens, forward passes, CPU seconds, and the parts of a step.

    bench decode                                      the bundled model on held-out problems, D2F and k = 4 and 8
    bench decode --json                               the same as one line, to compare two checkouts
    bench decode --random --windows full block_causal --floors
    bench decode --requests 1 8 32 --cached-prompts   what decoding requests together gains
    bench decode --model MODEL --branches 0 3 --params base=linear_spec
                                                      drafts that a causal model checks, without and with branches
    bench decode --prompt-tokens 200 600              how long a step with a long prompt makes others wait
    bench decode --requests 16 --new-tokens 4000 --arriving 16384   and one that comes in while these decode
    bench decode --graph-mode inductor --branches 3   compiled steps; minutes of compilation first

A model without a tokenizer gets prompts of 128 random token ids. --random decodes with a random Dream of 125 M
parameters (hidden size 768, 12 layers, vocabulary 32,000), a prompt of 128 random tokens, 128 new tokens and blocks of
32. All combinations of the lists are decoded, in each round one after the other. Times are CPU seconds of this process,
so other work on the machine disturbs them little. The columns:

  forwards, TPF      forward passes, and tokens of answers divided by them
  tokens/step        tokens that the model computes in an engine step; positions that branches share count once
  cpu s, wall s      CPU seconds of all answers, the median of the rounds; and seconds by the clock of the same decode
  tokens/s           tokens of answers for each CPU second
  longest step       CPU milliseconds; every other request waits so long

With --arriving there are the median and the longest step of the others, how long they wait between two steps while the
prompt comes in (median and longest), both waits in median steps, and CPU seconds and steps until it is computed.

Below it the CPU milliseconds of an engine step by part; --floors adds the least time that each part could take by
memory and by products, and which share of its time the longer of the two is. Peaks of this machine are measured in the
same run (scripts/bench/parts.py). Steps of 1 to 32 positions, prompts left out, with any weights in published sizes:

    scripts.eval make-checkpoint --family sdar --size 1.7B SDAR-1.7B
    bench decode --model SDAR-1.7B --dtype w8a8 --branches 0 --block-size 1 4 8 16 32 --prompts 1 --new-tokens 32 \
                 --cached-prompts --floors

Compiled steps cannot be divided: of them "inputs" and "absorb" are the host's work to send a step off and to take in
its result.

Where drafts are checked, a line says how many tokens a round has written, how often the draft for each place was right
where those before it were, and how often the draft's second choice was what was written in the place of a wrong one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lopa_ascend.config import (
    ConfigError,
    DecodingParams,
    EngineConfig,
    ParameterError,
)
from lopa_ascend.config.combinations import fitting_defaults
from lopa_ascend.config.engine import QUANTIZATIONS
from lopa_ascend.config.settings import Setting, refuse_unknown, settings
from lopa_ascend.decode.block_pipeline import WINDOW_ATTENTIONS
from lopa_ascend.demo import DEMO_MODEL
from lopa_ascend.families import recommended_decoding
from scripts.arguments import model_directory, number_from
from scripts.bench.machine import describe_machine
from scripts.bench.prompts import text_prompts

if TYPE_CHECKING:
    from lopa_ascend import LLM
    from scripts.bench.measure import Case, Decode
    from scripts.bench.parts import Peaks

HEADINGS = ("forwards", "TPF", "tokens/step", "cpu s", "wall s", "tokens/s", "longest step, ms")
NUM_PROBLEMS = 8
"""Held-out problems that are decoded where nothing is said of it."""
NEW_TOKENS = 128
FORMATS = ("float32", "bfloat16", *QUANTIZATIONS)
"""Number formats of weights."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--model", type=model_directory, metavar="MODEL", help="a model (default: the bundled one)")
    which.add_argument("--random", action="store_true", help="the random model, written to build/bench-model")
    for name, default, least, text in (
        ("--branches", [0, 4, 8], 0, "lookahead branches, the paper's k; 0 is D2F"),
        ("--block-size", None, 1, "positions of a block; default: the model's"),
        ("--requests", [1], 1, "requests that are decoded together"),
        ("--prompt-tokens", None, 1, "tokens of a prompt; default: a problem's; 128 random ones"),
    ):
        shown = "" if default is None else f" (default: {' '.join(map(str, default))})"
        parser.add_argument(name, type=number_from(least), nargs="+", default=default, metavar="N", help=text + shown)
    parser.add_argument(
        "--windows",
        nargs="+",
        default=["block_causal"],
        choices=WINDOW_ATTENTIONS,
        help="window attentions (default: block_causal)",
    )
    parser.add_argument(
        "--prompts",
        type=number_from(1),
        metavar="N",
        help=f"prompts to decode (default: {NUM_PROBLEMS}, with --random 1, but at least as many as --requests)",
    )
    for name, number, text in (
        ("--new-tokens", NEW_TOKENS, "tokens of an answer, at most"),
        ("--threads", 1, "threads of torch"),
        ("--rounds", 1, "decodes of each kind"),
    ):
        parser.add_argument(name, type=number_from(1), default=number, metavar="N", help=f"{text} (default: {number})")
    parser.add_argument(
        "--dtype",
        choices=FORMATS,
        help="number format of the weights; quantised ones beside bfloat16 (default: the model's)",
    )
    parser.add_argument(
        "--graph-mode", choices=("eager", "inductor"), default="eager", help="how steps run (default: eager)"
    )
    parser.add_argument(
        "--cached-prompts", action="store_true", help="compute prompts before, so that only decoding is measured"
    )
    parser.add_argument(
        "--engine",
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help="engine settings, such as max_model_len=512",
    )
    parser.add_argument(
        "--params", nargs="+", default=[], metavar="NAME=VALUE", help="decoding parameters, such as tau_conf=0.8"
    )
    parser.add_argument(
        "--arriving", type=number_from(1), metavar="N", help="let a prompt of N tokens come in while others decode"
    )
    parser.add_argument("--floors", action="store_true", help="measure the machine's peaks (seconds), and print floors")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")


def run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Measures and prints what the command line asks for."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is loaded
    lists = (args.branches, args.block_size or [None], args.windows)
    if args.graph_mode != "eager" and any(len(values) > 1 for values in lists):
        parser.error("steps are compiled for one decoding: give one of --branches, --block-size and --windows")
    try:
        params = _given(DecodingParams.parameters(), args.params)
        report = measure_all(args, _given(settings(EngineConfig), args.engine), params)
    except (ConfigError, ParameterError) as error:
        parser.error(str(error))
    if args.json:
        print(json.dumps(report))
    else:
        print_tables(report)
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
    """Everything that was measured, as it is printed with --json.

    Args:
        args: all arguments of the command.
        engine: further settings of the engine.
        given: further decoding parameters.
    """
    from scripts.bench.measure import Case, arrive, decode, middle
    from scripts.bench.parts import measure_peaks
    from scripts.bench.workload import RANDOM_MODEL, write_random_model

    cases = [
        Case(k=k, window=window, block_size=block_size, requests=requests, prompt_tokens=prompt_tokens)
        for prompt_tokens, window, block_size, requests, k in itertools.product(
            args.prompt_tokens or [None], args.windows, args.block_size or [None], args.requests, args.branches
        )
    ]
    if args.random:
        write_random_model(RANDOM_MODEL)
    model = RANDOM_MODEL if args.random else args.model
    recommended = recommended_decoding(model or DEMO_MODEL)
    params = {case: case_params(recommended, case, args, given) for case in cases}
    started = time.perf_counter()
    llm = load(model, args, engine, params[cases[0]])
    start_seconds = time.perf_counter() - started
    prompts = {case: case_prompts(llm, case, args) for case in cases}
    found: dict[Case, list[Decode]] = {case: [] for case in cases}
    for case in cases:  # first calls take longer
        first_block = replace(params[case], max_new_tokens=min(args.new_tokens, params[case].block_size))
        llm.generate(prompts[case][:1], first_block, quiet=True)
    about = {
        "machine": describe_machine(),
        "model": "random" if args.random else str(args.model or "bundled"),
        "dtype": args.dtype or llm.config.dtype,
        "threads": args.threads,
        "graph_mode": args.graph_mode,
        "start_seconds": round(start_seconds, 2),
    }
    if args.arriving:
        [long] = text_prompts(llm, 1, args.arriving)
        arrivals = [_of_case(case) | arrive(llm, prompts[case], params[case], long) for case in cases]
        llm.close()
        return about | {"arrivals": arrivals}
    for _ in range(args.rounds):
        for case, decodes in found.items():
            decodes.append(decode(llm, prompts[case], params[case], case.requests, cached=args.cached_prompts))
    peaks = measure_peaks(llm.engine.runner.model.head.dtype, llm.engine.ranks[0].weights) if args.floors else None
    llm.close()
    return about | {
        "peaks": peaks and asdict(peaks),
        "decodes": [
            describe_case(case, middle(decodes), len(prompts[case][0]), peaks) for case, decodes in found.items()
        ],
    }


def load(model: Path | None, args: argparse.Namespace, engine: dict[str, Any], params: DecodingParams) -> LLM:
    """The model that is measured, with compiled steps for ``params`` if steps are compiled."""
    from lopa_ascend import LLM
    from lopa_ascend.config import GraphParams

    options: dict[str, Any] = {
        "enable_prefix_caching": args.cached_prompts,
        "max_num_seqs": max(args.requests) + bool(args.arriving),
        "threads": args.threads,
        "graph_mode": args.graph_mode,
    }
    if args.dtype:
        options |= format_options(args.dtype)
    if args.graph_mode != "eager":
        options["graph_params"] = GraphParams.of(params)
    return LLM(model, **{**options, **engine})


def format_options(name: str) -> dict[str, str]:
    """The settings of an engine for one of ``FORMATS``."""
    return {"dtype": "bfloat16", "quantization": name} if name in QUANTIZATIONS else {"dtype": name}


def case_params(
    recommended: dict[str, Any], case: Case, args: argparse.Namespace, given: dict[str, Any]
) -> DecodingParams:
    """How a case is decoded. Answers of the random model, whose tokens mean nothing, do not end early.

    Args:
        recommended: decoding parameters that the model's directory recommends.
        case: the case.
        args: all arguments of the command.
        given: further decoding parameters.
    """
    options: dict[str, Any] = {
        "decoding": "lopa" if case.k else given.get("base", "d2f"),
        "num_branches": case.k,
        "window_attention": case.window,
        "max_new_tokens": args.new_tokens,
    }
    if case.block_size is not None:
        options["block_size"] = case.block_size
    if args.random:
        options |= {"confidence": "neg_entropy", "finish_at_eos": False, "ignore_eos": True}
    options |= given
    if not case.k:
        options.pop("base", None)
    return DecodingParams(**{**fitting_defaults(recommended, options), **options})


def case_prompts(llm: LLM, case: Case, args: argparse.Namespace) -> list[list[int]]:
    """What a case decodes."""
    from scripts.bench.workload import random_prompts

    count = max(args.prompts or (1 if args.random else NUM_PROBLEMS), case.requests)
    if args.random:
        return random_prompts(count, case.prompt_tokens)
    return text_prompts(llm, count, case.prompt_tokens)


def describe_case(case: Case, found: Decode, prompt_tokens: int, peaks: Peaks | None) -> dict[str, Any]:
    """What was decoded, and the figures."""
    known = {"block_size": found.params.block_size}
    if case.prompt_tokens is None:
        known["prompt_tokens"] = prompt_tokens
    return {**_of_case(case), **known, **found.as_json(peaks)}


def _of_case(case: Case) -> dict[str, Any]:
    """What distinguishes a case."""
    return {
        "k": case.k,
        "window": case.window,
        "block_size": case.block_size,
        "requests": case.requests,
        "prompt_tokens": case.prompt_tokens,
    }


def describe_drafts(found: dict[str, Any]) -> str:
    places = " ".join(f"{right / reached:.2f}" for reached, right in found["places"])
    return (
        f"{found['rounds']} rounds of {found['tokens_per_round']:.2f} tokens; right by place: {places}; second choice "
        f"right in {found['seconds']} of {found['wrong']} wrong drafts"
    )


def print_floors(report: dict[str, Any], keys: Sequence[str]) -> None:
    """Prints the least times of the parts, and the share of its time that the longer one is.

    Args:
        report: what was measured.
        keys: what distinguishes decodes.
    """
    peaks = ", ".join(f"{name} {value / 1e9:.1f}" for name, value in report["peaks"].items())
    columns = (*keys, "part", "CPU ms", "least by memory", "least by products", "share")
    print(f"\nPeaks of a CPU second, in 10^9: {peaks}\n\n| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for one in report["decodes"]:
        rows = [(name, one["parts"][name], *floors.values()) for name, floors in one["floors"].items()]
        least = sum(max(memory, products) for _, _, memory, products in rows)
        shares = [max(row[2:]) / row[1] for row in rows] + [least / one["cpu_seconds"]]
        rows.append(("all", *(sum(row[column] for row in rows) for column in (1, 2, 3))))
        for (name, *seconds), share in zip(rows, shares, strict=True):
            cells = [*(str(one[key]) for key in keys), name]
            cells += [f"{1000 * value / one['steps']:.2f}" for value in seconds]
            print(f"| {' | '.join(cells)} | {share:.0%} |")


def print_tables(report: dict[str, Any]) -> None:
    """Prints the tables of figures and of parts in Markdown."""
    of_all = (f"{name} {report[name]}" for name in ("model", "dtype", "threads", "graph_mode", "start_seconds"))
    print(f"{report['machine']['processor']}: {', '.join(of_all)}\n")
    keys = ("k", "window", "block_size", "requests", "prompt_tokens")
    if "arrivals" in report:
        names = list(report["arrivals"][0])
        print(f"| {' | '.join(names)} |\n{'|---' * len(names)}|")
        for one in report["arrivals"]:
            print(f"| {' | '.join(map(str, one.values()))} |")
        return
    decodes = report["decodes"]
    print(f"| {' | '.join((*keys, *HEADINGS))} |\n{'|---' * (len(keys) + len(HEADINGS))}|")
    for one in decodes:
        cells = [str(one[key]) for key in keys]
        cells += [str(one["forwards"]), f"{one['tpf']:.2f}", f"{one['model_tokens'] / one['steps']:.1f}"]
        cells += [f"{one['cpu_seconds']:.2f}", f"{one['wall_seconds']:.2f}"]
        cells += [f"{one['tokens'] / one['cpu_seconds']:.1f}", f"{one['longest_step_ms']:.1f}"]
        print(f"| {' | '.join(cells)} |")
    names = list(decodes[0]["parts"])
    print("\nCPU ms of a step:\n")
    print(f"| {' | '.join((*keys, *names))} |\n{'|---' * (len(keys) + len(names))}|")
    for one in decodes:
        cells = [str(one[key]) for key in keys]
        cells += [f"{1000 * one['parts'].get(name, 0) / one['steps']:.1f}" for name in names]
        print(f"| {' | '.join(cells)} |")
    if "floors" in decodes[0]:
        print_floors(report, keys)
    for one in decodes:
        if "drafts" in one:
            print(f"\nk = {one['k']}: {describe_drafts(one['drafts'])}")
        if "padding" in one:
            print(f"\nk = {one['k']}: {one['padding']:.0%} of the tokens of compiled steps are padding")
