"""Predicts how fast a decoding step can be on a device, what bounds it, and how best to use some dies.

    bench plan --tp 4 --bp 4 --k 3 --precision w8a8     one plan for Dream-7B on 910C dies
    bench plan --dies 16                                the best (tp, bp, k) for one request
    bench plan --dies 16 --tp 4                         the best (bp, k) with tp 4
    bench plan --dies 16 --requests 64 --json           the same for 64 requests, as JSON
    bench plan --captured                               a step added up from the tasks that npugraph_ex captures
    bench plan --validate                               the rows S1 to S18 of the paper, as one JSON line
    bench plan --device h200 --constants                the constants of a device with their sources

A prediction is a floor of a step's time, so an upper bound of tokens/s. Tokens per forward pass (TPF) are an input.
Collectives are counted twice, with optimistic and with pessimistic fixed costs, because no measured table of them is
public.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path

from lopa_ascend.config import ConfigError, ModelConfig
from scripts.arguments import number_from
from scripts.bench.plan import captured
from scripts.bench.plan.devices import Device, DeviceError, constants_table, known_devices, load_device
from scripts.bench.plan.models import known_models, load_model
from scripts.bench.plan.search import DEFAULT_TPF, Plan, best_plan, plan, tokens_per_forward
from scripts.bench.plan.step import COLLECTIVES, PRECISIONS, Workload
from scripts.bench.plan.validate import validate

CONTEXT = 1024
"""Positions in front of the window where nothing is said of them."""
TERMS = ("weights", "kv", "flops", "launches", "host", "collectives", "device", "step")


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        default="Dream-7B",
        metavar="MODEL",
        help=f"{' or '.join(known_models())}, or a directory with a config.json (default: Dream-7B)",
    )
    parser.add_argument(
        "--device",
        default="910c",
        metavar="DEVICE",
        help=f"{' or '.join(known_devices())}, or a JSON file of one device (default: 910c)",
    )
    parser.add_argument(
        "--precision", choices=PRECISIONS, default="bf16", help="number format of the weights (default: bf16)"
    )
    for name, default, least, text in (
        ("tp", None, 1, "tensor parallel size"),
        ("bp", None, 1, "branch parallel size"),
        ("k", None, 0, "lookahead branches beside the anchor"),
        ("window", 128, 1, "positions of a branch that one pass computes"),
        (
            "context",
            None,
            0,
            f"cached positions before the window (default: {CONTEXT}; with --captured {captured.CONTEXT})",
        ),
        ("requests", 1, 1, "requests at the same time, of all replicas"),
        ("dies", None, 1, "dies at most, with the best of --tp, --bp and --k not given; more make replicas"),
    ):
        shown = "" if default is None else f" (default: {default})"
        parser.add_argument(f"--{name}", type=number_from(least), default=default, metavar="N", help=text + shown)
    parser.add_argument(
        "--tpf",
        nargs="+",
        type=_parse_tpf,
        metavar="X",
        help="tokens per forward pass: one number for the given --k, or pairs K:X between which it is interpolated "
        "(default: " + " ".join(f"{k}:{tpf}" for k, tpf in DEFAULT_TPF.items()) + ", D2F-Dream on GSM8K in the paper)",
    )
    parser.add_argument(
        "--collectives",
        choices=COLLECTIVES,
        default="optimistic",
        help="with --dies: the cost of collectives by which the best plan is chosen (default: optimistic)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--captured",
        type=Path,
        nargs="?",
        const=captured.FILE,
        metavar="FILE",
        help="add up the steps of Dream-7B, TP 4 x BP 4, whose tasks FILE has (default: those of this project's step)",
    )
    parser.add_argument("--constants", action="store_true", help="print the constants of --device with their sources")
    parser.add_argument("--validate", action="store_true", help="print the paper's rows beside predictions")


def _parse_tpf(text: str) -> tuple[int | None, float]:
    """The pair (k, TPF) of a text such as 3:6.5; k is None where the text is one number."""
    before, colon, after = text.rpartition(":")
    try:
        k = int(before) if colon else None
        tpf = float(after)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number or K:NUMBER, got {text!r}") from None
    if k is not None and k < 0:
        raise argparse.ArgumentTypeError(f"K must be at least 0, got {text!r}")
    if not 0 < tpf < 1e6:
        raise argparse.ArgumentTypeError(f"must be above 0 and below a million, got {text!r}")
    return k, tpf


def _known_tpf(args: argparse.Namespace) -> dict[int, float]:
    """TPF by k, from --tpf.

    Raises:
        ValueError: one number without --k, or together with pairs.
    """
    if args.tpf is None:
        return dict(DEFAULT_TPF)
    single = [tpf for k, tpf in args.tpf if k is None]
    if not single:
        return dict(args.tpf)
    if len(args.tpf) > 1:
        raise ValueError("--tpf takes one number, or pairs K:X")
    if args.k is None:
        raise ValueError("--tpf with one number needs --k; give pairs K:X to compare numbers of branches")
    return {args.k: single[0]}


def _best(args: argparse.Namespace, model: ModelConfig, device: Device) -> Plan:
    """The plan that the command line asks for.

    Raises:
        ValueError: the flags do not go together, or nothing fits.
    """
    known = _known_tpf(args)
    context = CONTEXT if args.context is None else args.context
    work = Workload(precision=args.precision, window=args.window, context=context, requests=args.requests)
    given = {name: getattr(args, name) for name in ("tp", "bp", "k") if getattr(args, name) is not None}
    if args.dies is not None and len(given) < 3:
        if args.k is not None:
            known = {args.k: tokens_per_forward(known, args.k)}
        sizes = {name: size for name, size in given.items() if name != "k"}
        return best_plan(model, device, work, known, args.dies, args.collectives, sizes)
    chosen = replace(work, **{"tp": 1, "bp": 1, "k": 3, **given})
    return plan(model, device, chosen, tokens_per_forward(known, chosen.k), args.dies)


def _print_table(best: Plan) -> None:
    found = best.as_json()
    print(
        f"tp {found['tp']} x bp {found['bp']}, k = {found['k']}, {found['replicas']} replica(s), TPF {found['tpf']}\n"
    )
    print("| collectives | " + " | ".join(f"{term}, ms" for term in TERMS) + " | bound by | tokens/s, at most |")
    print("|---" * (len(TERMS) + 3) + "|")
    for case in COLLECTIVES:
        row = found[case]
        cells = [f"{row[f'{term}_ms']:.2f}" for term in TERMS]
        print(f"| {case} | {' | '.join(cells)} | {row['bound_by']} | {row['tokens_per_second']:.0f} |")


def _print_captured(args: argparse.Namespace, device: Device) -> None:
    """Prints the steps of all captured numbers of sequences, for both costs of collectives.

    Raises:
        ValueError: a flag asks for another step than was captured.
    """
    for name in ("tp", "bp", "k", "dies", "tpf"):
        if getattr(args, name) is not None:
            raise ValueError(f"--captured has one step, TP 4 x BP 4 with k = 3; leave --{name} out")
    context = captured.CONTEXT if args.context is None else args.context
    columns = [
        (f"{sequences}, {case}", captured.predict_captured(sequences, device, context, case, args.captured))
        for sequences in captured.captured_sequences(args.captured)
        for case in COLLECTIVES
    ]
    if args.json:
        print(json.dumps({name: asdict(found) for name, found in columns}))
    else:
        print(captured.table(columns))


def run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Prints what the command line asks for."""
    if args.validate:
        print(json.dumps({"rows": validate()}))
    else:
        try:
            _print_prediction(args)
        except (ConfigError, DeviceError, ValueError) as error:
            parser.error(str(error))
    return 0


def _print_prediction(args: argparse.Namespace) -> None:
    if args.constants:
        print(constants_table(args.device))
        return
    device = load_device(args.device)
    if args.captured:
        _print_captured(args, device)
        return
    best = _best(args, load_model(args.model), device)
    if args.json:
        print(json.dumps({"model": args.model, "device": args.device, "precision": args.precision, **best.as_json()}))
    else:
        _print_table(best)
