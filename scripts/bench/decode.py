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
prompt comes in (median and longest), both waits in median steps (stalls), and CPU seconds and steps until it is
computed.

--floors adds the least time that each part could take by memory and by products, and which share of its time the longer
of the two is. Peaks of this machine are measured in the same run (scripts/bench/parts.py).
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from lopa_ascend.config import DecodingParams, ParameterError
from lopa_ascend.config.combinations import fitting_defaults
from lopa_ascend.config.engine import QUANTIZATIONS
from lopa_ascend.core import Request
from lopa_ascend.demo import DEMO_MODEL
from lopa_ascend.families import recommended_decoding
from scripts.arguments import add_numbers, model_directory, named_value
from scripts.bench.machine import describe_machine
from scripts.bench.processes import timed_calls
from scripts.bench.prompts import text_prompts
from scripts.bench.tables import records

if TYPE_CHECKING:
    from lopa_ascend import LLM
    from scripts.bench.parts import Peaks

ORDINARY_STEPS = 40
"""Steps by which an ordinary one is known, before a prompt comes in."""
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
    from scripts.bench.parts import measure_peaks

    cases = [
        (case_params(args, k, block_size), requests)
        for block_size, requests, k in itertools.product(args.block_size or [None], args.requests, args.branches)
    ]
    with load(args) as llm:
        report: dict[str, Any] = {
            "machine": describe_machine(),
            "model": str(args.model or "bundled"),
            "dtype": args.dtype or llm.config.dtype,
            "threads": args.threads,
        }
        prompts = text_prompts(llm, max(args.prompts or NUM_PROBLEMS, *args.requests), args.prompt_tokens)
        for params, _ in cases:  # first calls take longer
            llm.generate(prompts[:1], first_block(params), quiet=True)
        if args.arriving:
            [long] = text_prompts(llm, 1, args.arriving)
            return report | {"arrivals": [arrive(llm, prompts[:count], params, long) for params, count in cases]}
        peaks = None
        if args.floors:
            peaks = measure_peaks(llm.engine.runner.model.head.dtype, llm.engine.ranks[0].weights)
        once = partial(decode, llm, prompts, cached=args.cached_prompts, peaks=peaks)
        rounds = [[once(*case) for case in cases] for _ in range(args.rounds)]
    report["decodes"] = [middle(found) for found in zip(*rounds, strict=True)]
    if peaks is not None:
        report["peaks"] = [{f"{name}, 10^9/s": round(value / 1e9, 1) for name, value in asdict(peaks).items()}]
        report["floors"] = [row for one in report["decodes"] for row in one.pop("floors")]
    return report


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


def first_block(params: DecodingParams) -> DecodingParams:
    """To decode no more than one block."""
    return replace(params, max_new_tokens=min(params.block_size, params.max_new_tokens))


def keys(params: DecodingParams, requests: int) -> dict[str, Any]:
    """What distinguishes the rows of a table."""
    return {"k": params.num_branches, "block_size": params.block_size, "requests": requests}


# ---- what is measured ------------------------------------------------------------------------------------------------


def decode(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    params: DecodingParams,
    together: int,
    *,
    cached: bool,
    peaks: Peaks | None,
) -> dict[str, Any]:
    """The figures of all prompts, decoded once in batches of ``together``, by the headings of the table; with ``peaks``
    of this machine also "floors" by part.

    With ``cached`` prompts are computed before, and taken from the prefix cache, so that only decoding is measured;
    RuntimeError if it has no room for them.
    """
    from scripts.bench.parts import floors, timed_parts

    batches = [prompts[first : first + together] for first in range(0, len(prompts), together)]
    if cached:  # with full attention a prompt is kept together with the first block that it was computed with
        for batch in batches:
            llm.generate(batch, first_block(params), quiet=True)
    before, started = llm.engine.stats(), time.perf_counter()
    with timed_calls(llm.engine, "step") as steps, timed_parts(llm) as parts:
        outputs = [output for batch in batches for output in llm.generate(batch, params, quiet=True)]
    wall, after = time.perf_counter() - started, llm.engine.stats()
    # A causal model computes a prompt's last token again, whose prediction begins the answer.
    is_causal = llm.engine.runner.model.properties.is_causal
    if cached and not is_causal and after.num_prefill_steps != before.num_prefill_steps:
        raise RuntimeError("prompts were computed again: the prefix cache has no room for them")
    forwards = sum(output.num_forwards for output in outputs)
    tokens = sum(len(output.token_ids) for output in outputs)
    ids = repr([tuple(output.token_ids) for output in outputs])
    seconds = sum(part.seconds for part in parts.values())
    found = keys(params, together) | {
        "tokens": tokens,
        "digest": hashlib.sha256(ids.encode()).hexdigest()[:16],
        "forwards": forwards,
        "TPF": round(tokens / forwards, 3),
        "steps": len(steps),
        "tokens/step": round(sum(output.model_tokens for output in outputs) / len(steps), 1),
        **dict.fromkeys(("cpu s", "least", "most"), round(seconds, 3)),
        "wall s": round(wall, 3),
        "tokens/s": round(tokens / seconds, 1),
        "longest step, ms": round(1000 * max(steps), 2),
        **{name: round(1000 * part.seconds / len(steps), 2) for name, part in parts.items()},
    }
    if peaks is not None:
        found["floors"] = [keys(params, together) | row for row in floors(parts, peaks, len(steps))]
    return found


def middle(decodes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The decode with the median CPU time, of an even number the slower one in the middle, and the range of all."""
    ranked = sorted(decodes, key=lambda one: one["cpu s"])
    return {**ranked[len(ranked) // 2], "least": ranked[0]["cpu s"], "most": ranked[-1]["cpu s"]}


def arrive(
    llm: LLM, prompts: Sequence[Sequence[int]], params: DecodingParams, arriving: Sequence[int]
) -> dict[str, float]:
    """The figures of the table while the prompt ``arriving`` comes in and others are decoded; RuntimeError if these end
    before it is computed."""
    engine, name = llm.engine, "arriving"
    others = {f"other {number}": tuple(prompt) for number, prompt in enumerate(prompts)}
    for request_id, prompt in others.items():
        engine.add(Request(request_id, prompt, params))
    try:
        while any(sequence.in_prefill for sequence in engine.scheduler.running.values()) or engine.scheduler.waiting:
            engine.step()
        with timed_calls(engine, "step") as own:
            for _ in range(ORDINARY_STEPS):
                engine.step()
        engine.add(Request(name, tuple(arriving), params))
        waits, waited = list[float](), 0.0
        with timed_calls(engine, "step") as steps:
            while waited or engine.scheduler.waiting or engine.scheduler.running[name].in_prefill:
                updates = engine.step()
                waited += steps[-1]
                if any(update.finish_reason for update in updates):
                    raise RuntimeError("a request ended before the prompt was computed: ask for more --new-tokens")
                if any(update.request_id in others for update in updates):
                    waits, own, waited = [*waits, waited], [*own, steps[-1]], 0.0
    finally:
        for request_id in (name, *others):
            engine.abort(request_id)
    step, wait = statistics.median(own), statistics.median(waits)
    times = {"step": step, "longest_step": max(own), "wait": wait, "longest_wait": max(waits)}
    return {
        **keys(params, len(prompts)),
        **{f"{name}_ms": round(1000 * seconds, 1) for name, seconds in times.items()},
        "usual_stall": round(wait / step, 2),
        "stall": round(max(waits) / step, 2),
        "cpu_seconds": round(sum(steps), 1),
        "steps": len(steps),
    }
