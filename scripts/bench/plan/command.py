"""Predicts how long a decoding step takes on a device, what bounds it, and how best to use some dies.

    bench plan --tp 4 --bp 4 --k 3 --precision w8a8     one plan for Dream-7B on 910C dies
    bench plan --dies 16                                the best (tp, bp, k) for one request
    bench plan --dies 16 --tp 4                         the best (bp, k) with tp 4
    bench plan --dies 16 --requests 64 --json           the same for 64 requests, as JSON
    bench plan --device report.json --tp 4 --bp 4       with what the self-test has measured on your dies
    bench plan --validate                               predictions beside the paper's rows and measured steps, as JSON
    bench plan --device h200 --constants                the constants of a device with their sources

A prediction is a range, from the fastest to the slowest value of each constant. Padding to buckets and prompts come on
top. Tokens per forward pass (TPF) are an input. The least time by the data sheet has neither collectives nor fixed
costs, and all of the memory's and the products' peaks.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator

from lopa_ascend.config import ModelConfig
from scripts.arguments import add_numbers, number_from, positive
from scripts.bench.plan.devices import Range, constants_table, known_devices, load_device
from scripts.bench.plan.measured import compare
from scripts.bench.plan.models import PUBLISHED, load_model
from scripts.bench.plan.search import DEFAULT_TPF, Plan, all_plans, best_plan
from scripts.bench.plan.step import ENDS, floor
from scripts.bench.plan.tasks import PRECISIONS, Workload
from scripts.bench.plan.validate import published_engine, validate
from scripts.bench.tables import table

CONTEXT = 1024
"""Positions in front of the window where nothing is said of them."""
TERMS = {
    "products": "matrix products",
    "attention": "attention",
    "collectives": "collectives",
    "small_kernels": "small kernels",
    "gaps": "gaps between tasks",
    "device": "**device**",
    "updates": "host: KV lengths",
    "other_host": "host: launch, inputs, results",
    "step": "**step**",
}
"""The terms of a step, and what they are called."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    models = f"{' or '.join(PUBLISHED)}, a directory with a config.json, or a name on the hub (default: Dream-7B)"
    parser.add_argument("--model", default="Dream-7B", metavar="MODEL", help=models)
    known = f"{' or '.join(known_devices())}, or a report of the self-test (default: 910c)"
    parser.add_argument("--device", default="910c", metavar="DEVICE", help=known)
    parser.add_argument(
        "--precision", choices=PRECISIONS, default="bf16", help="number format of the weights (default: bf16)"
    )
    add_numbers(
        parser,
        ("--tp", None, 1, "tensor parallel size"),
        ("--bp", None, 1, "branch parallel size"),
        ("--k", None, 0, "lookahead branches beside the anchor"),
        ("--window", 128, 1, "positions of a branch that one pass computes"),
        ("--context", CONTEXT, 0, "cached positions before the window"),
        ("--block", 32, 1, "positions that are committed together; 1: tokens one by one"),
        ("--dies", None, 1, "dies at most, with the best of --tp, --bp and --k not given; more make replicas"),
        ("--requests", [1], 1, "requests at the same time, of all replicas; several numbers for a column each"),
    )
    for name, text in (
        ("--computed", "block-rows that a step computes, such as those that differ from the anchor's"),
        ("--predicted", "computed positions that go through the LM head, such as the masked ones"),
    ):
        parser.add_argument(name, type=_share, default=1.0, metavar="X", help=f"share of {text} (default: 1)")
    parser.add_argument(
        "--tpf",
        nargs="+",
        type=_tpf,
        default=DEFAULT_TPF.items(),
        metavar="K:X",
        help="tokens per forward pass by k, interpolated in between "
        f"(default: {' '.join(f'{k}:{tpf}' for k, tpf in DEFAULT_TPF.items())}, D2F-Dream on GSM8K in the paper)",
    )
    for name, text in (
        ("--json", "print JSON"),
        ("--constants", "print the constants of --device with their sources"),
        ("--validate", "print predictions beside published speeds"),
    ):
        parser.add_argument(name, action="store_true", help=text)


def _share(text: str) -> float:
    value = positive(text)
    if value > 1:
        raise argparse.ArgumentTypeError(f"must be at most 1, got {text!r}")
    return value


def _tpf(text: str) -> tuple[int, float]:
    """The pair (k, TPF) of a text such as 3:6.5."""
    k, colon, tpf = text.partition(":")
    if not colon:
        raise argparse.ArgumentTypeError(f"must be K:X, got {text!r}")
    return number_from(0)(k), positive(tpf)


def _best(args: argparse.Namespace, model: ModelConfig, devices: Range, requests: int) -> Plan:
    """The plan that the command line asks for."""
    names = ("precision", "window", "context", "block", "computed", "predicted")
    work = Workload(**{name: getattr(args, name) for name in names}, requests=requests)
    sizes = {name: getattr(args, name) for name in ("tp", "bp", "k") if getattr(args, name) is not None}
    if args.dies is None:
        sizes = {"tp": 1, "bp": 1, "k": 3, **sizes}
    return best_plan(all_plans(model, devices, work, dict(args.tpf), args.dies, sizes))


def steps_table(plans: dict[int, Plan]) -> str:
    """A column for each number of requests."""
    found = [best.as_json() for best in plans.values()]

    def span(key: str, digits: int) -> Iterator[str]:
        for best in found:
            yield " to ".join(f"{value:.{digits}f}" for value in sorted(best[end][key] for end in ENDS))

    rows = [(name, *span(f"{term}_ms", 1 if "*" in name else 2)) for term, name in TERMS.items()]
    bound = (" or ".join(dict.fromkeys(best[end]["bound_by"] for end in ENDS)) for best in found)
    rows += [("bound by", *(text.replace("_", " ") for text in bound)), ("tokens/s", *span("tokens_per_second", 0))]
    return table(("ms, by requests", *plans), rows)


def run(args: argparse.Namespace) -> int:
    """Prints what the command line asks for."""
    if args.validate:
        print(json.dumps({"rows": validate(), "published_engine": published_engine(), "measured": compare()}))
        return 0
    if args.constants:
        print(constants_table(args.device))
        return 0
    model, devices = load_model(args.model), load_device(args.device)
    plans = {requests: _best(args, model, devices, requests) for requests in args.requests}
    if args.json:
        asked = {"model": args.model, "device": args.device, "precision": args.precision}
        print("\n".join(json.dumps({**asked, "requests": n, **best.as_json()}) for n, best in plans.items()))
        return 0
    for requests, best in plans.items():
        sizes = f"tp {best.work.tp} x bp {best.work.bp}, k = {best.work.k}, {best.replicas} replica(s)"
        least = f"{1000 * floor(model, devices.low, best.work):.1f} ms"
        print(
            f"{requests} request(s): {sizes}, TPF {best.work.tpf:g}; at least {least} on the device, by its data sheet"
        )
    print(f"\n{steps_table(plans)}")
    return 0
