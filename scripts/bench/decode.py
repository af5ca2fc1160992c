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
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lopa_ascend.config import ConfigError, DecodingParams, EngineConfig, ParameterError
from lopa_ascend.config.combinations import fitting_defaults
from lopa_ascend.config.engine import QUANTIZATIONS
from lopa_ascend.config.settings import Setting, refuse_unknown, settings
from lopa_ascend.decode.block_pipeline import WINDOW_ATTENTIONS
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
RANDOM_MODEL = Path("build/bench-model")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One kind of decode."""

    k: int
    window: str
    block_size: int | None
    """None: the model's."""
    requests: int
    """How many are decoded together."""
    prompt_tokens: int | None
    """None: as many as a prompt has."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--model", type=model_directory, metavar="MODEL", help="a model (default: the bundled one)")
    which.add_argument("--random", action="store_true", help=f"the random model, written to {RANDOM_MODEL}")
    add_numbers(
        parser,
        ("--branches", [0, 4, 8], 0, "lookahead branches, the paper's k; 0 is D2F"),
        ("--block-size", [], 1, "positions of a block; default: the model's"),
        ("--requests", [1], 1, "requests that are decoded together"),
        ("--prompt-tokens", [], 1, "tokens of a prompt; default: a problem's; 128 random ones"),
        ("--prompts", None, 1, f"prompts to decode (default: {NUM_PROBLEMS}, with --random 1, at least --requests)"),
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
    for name, choices, several, text in (
        ("--windows", WINDOW_ATTENTIONS, "+", "window attentions (default: block_causal)"),
        (
            "--dtype",
            FORMATS,
            None,
            "number format of the weights; quantised ones beside bfloat16 (default: the model's)",
        ),
        ("--graph-mode", ("eager", "inductor"), None, "how steps run (default: eager)"),
    ):
        parser.add_argument(name, choices=choices, nargs=several, help=text)
    for name, text in (
        ("--cached-prompts", "compute prompts before, so that only decoding is measured"),
        ("--floors", "measure the machine's peaks (seconds), and print floors"),
        ("--json", "print one line of JSON"),
    ):
        parser.add_argument(name, action="store_true", help=text)
    parser.set_defaults(windows=["block_causal"], graph_mode="eager")


def run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Measures and prints what the command line asks for."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is loaded
    if args.graph_mode != "eager" and any(len(values) > 1 for values in (args.branches, args.block_size, args.windows)):
        parser.error("steps are compiled for one decoding: give one of --branches, --block-size and --windows")
    try:
        params = _given(DecodingParams.parameters(), args.params)
        report = measure_all(args, _given(settings(EngineConfig), args.engine), params)
    except (ConfigError, ParameterError) as error:
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
        Case(k=k, window=window, block_size=block_size, requests=requests, prompt_tokens=prompt_tokens)
        for prompt_tokens, window, block_size, requests, k in itertools.product(
            args.prompt_tokens or [None], args.windows, args.block_size or [None], args.requests, args.branches
        )
    ]
    if args.random:
        measure.write_random_model(RANDOM_MODEL)
    model = RANDOM_MODEL if args.random else args.model
    recommended = recommended_decoding(model or DEMO_MODEL)
    params = {case: case_params(recommended, case, args, given) for case in cases}
    started = time.perf_counter()
    llm = load(model, args, engine, params[cases[0]])
    about = {
        "machine": describe_machine(),
        "model": "random" if args.random else str(args.model or "bundled"),
        "dtype": args.dtype or llm.config.dtype,
        "threads": args.threads,
        "graph_mode": args.graph_mode,
        "start_seconds": round(time.perf_counter() - started, 2),
    }
    count = args.prompts or (1 if args.random else NUM_PROBLEMS)
    prompts = {case: text_prompts(llm, max(count, case.requests), case.prompt_tokens) for case in cases}
    for case in cases:  # first calls take longer
        first_block = replace(params[case], max_new_tokens=min(args.new_tokens, params[case].block_size))
        llm.generate(prompts[case][:1], first_block, quiet=True)
    if args.arriving:
        [long] = text_prompts(llm, 1, args.arriving)
        arrivals = [asdict(case) | measure.arrive(llm, prompts[case], params[case], long) for case in cases]
        llm.close()
        return about | {"arrivals": arrivals}
    peaks = None
    if args.floors:
        peaks = parts.measure_peaks(llm.engine.runner.model.head.dtype, llm.engine.ranks[0].weights)
    found: dict[Case, list[dict[str, Any]]] = {case: [] for case in cases}
    for _, (case, decodes) in itertools.product(range(args.rounds), found.items()):
        together, cached = case.requests, args.cached_prompts
        decodes.append(measure.decode(llm, prompts[case], params[case], together, cached=cached, peaks=peaks))
    llm.close()
    decodes = []
    for case, rounds in found.items():
        known = {"block_size": params[case].block_size, "prompt_tokens": case.prompt_tokens or len(prompts[case][0])}
        decodes.append({**asdict(case), **known, **measure.middle(rounds)})
    return about | {"peaks": peaks and asdict(peaks), "decodes": decodes}


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
    """How a case is decoded. Answers of the random model, whose tokens mean nothing, do not end early."""
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


# ---- tables ----------------------------------------------------------------------------------------------------------

KEYS = ("k", "window", "block_size", "requests", "prompt_tokens")
"""What distinguishes decodes."""
HEADINGS = ("forwards", "TPF", "tokens/step", "cpu s", "wall s", "tokens/s", "longest step, ms")


def tables(report: dict[str, Any]) -> str:
    """The figures and the parts in Markdown."""
    of_all = (f"{name} {report[name]}" for name in ("model", "dtype", "threads", "graph_mode", "start_seconds"))
    lines = [f"{report['machine']['processor']}: {', '.join(of_all)}\n"]
    if "arrivals" in report:
        return "\n".join([*lines, table(list(report["arrivals"][0]), (one.values() for one in report["arrivals"]))])
    decodes, figures, parts = report["decodes"], [], []
    names = list(decodes[0]["parts"])
    for one in decodes:
        cells = [one[key] for key in KEYS]
        seconds, rates = one["cpu_seconds"], (one["tpf"], one["model_tokens"] / one["steps"])
        times = (f"{seconds:.2f}", f"{one['wall_seconds']:.2f}", f"{one['tokens'] / seconds:.1f}")
        figures.append(
            [*cells, one["forwards"], f"{rates[0]:.2f}", f"{rates[1]:.1f}", *times, f"{one['longest_step_ms']:.1f}"]
        )
        parts.append([*cells, *(f"{1000 * one['parts'].get(name, 0) / one['steps']:.1f}" for name in names)])
    lines += [table((*KEYS, *HEADINGS), figures), "\nCPU ms of a step:\n", table((*KEYS, *names), parts)]
    if "floors" in decodes[0]:
        peaks = ", ".join(f"{name} {value / 1e9:.1f}" for name, value in report["peaks"].items())
        columns = (*KEYS, "part", "CPU ms", "least by memory", "least by products", "share")
        lines += [
            f"\nPeaks of a CPU second, in 10^9: {peaks}\n",
            table(columns, itertools.chain(*map(floors, decodes))),
        ]
    for one in decodes:
        if "drafts" in one:
            lines.append(f"\nk = {one['k']}: {describe_drafts(one['drafts'])}")
        if "padding" in one:
            lines.append(f"\nk = {one['k']}: {one['padding']:.0%} of the tokens of compiled steps are padding")
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


def describe_drafts(found: dict[str, Any]) -> str:
    places = " ".join(f"{right / reached:.2f}" for reached, right in found["places"])
    return (
        f"{found['rounds']} rounds of {found['tokens_per_round']:.2f} tokens; right by place: {places}; second choice "
        f"right in {found['seconds']} of {found['wrong']} wrong drafts"
    )
