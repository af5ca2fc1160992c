"""The first command on a machine with NPUs: do the ops compute there what the CPU computes, and which options to take?

    python -m scripts.selftest --json report.json    one NPU
    scripts/launch/node.sh --selftest                    all NPUs of a node, in the environment of a server

Runs each op at the shapes of Dream-7B in bfloat16 and compares it with the CPU backend, lopa_ascend/backend/cpu; then
replays a captured layer with other KV lengths, and a compiled step's policy; then, with several ranks, times the
all-reduces of each group and replays the collectives of a step. Meanwhile rank 0 writes to stderr which check runs. At
the end it prints a line for each check with a verdict, the largest error as a share of the largest value, and
microseconds a call:

  ok       the NPU computed what the CPU computes
  refused  the op raised an error; other options may do without it
  WRONG    the NPU computed something else
  asked    a question to the kernel; the engine does not depend on the answer

The last line has the options for the server. The report is made to be sent to others: it names versions and devices,
but no folders and no addresses, also where it has the text of an error. The exit status is 1 if something was computed
wrongly, or if no options work.

    python -m scripts.selftest --device cuda --json report.json                 one NVIDIA GPU: is it usable, how fast
    python -m scripts.selftest --device cuda --first-hour --json report.json    everything that is open, in 10 minutes

Each part runs in a process of its own within a limit of time. The report is written whenever something is found, and
what is expected stands in it before it is measured. The first wrong kernel ends it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from lopa_ascend.config.settings import HelpFormatter
from scripts.arguments import new_file, number_from

SECONDS = 600.0
"""For the self-test of a GPU."""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.selftest",
        description=__doc__,
        formatter_class=HelpFormatter,
    )
    parser.add_argument("--device", choices=("npu", "cuda"), default="npu", help="what to examine (default: npu)")
    parser.add_argument(
        "--first-hour",
        action="store_true",
        help="on a GPU also: memory by order of captures, candidates for products, counters, a server, two GPUs",
    )
    parser.add_argument("--json", type=new_file, metavar="FILE", help="also write the report as JSON")
    parser.add_argument(
        "--tensor-parallel-size",
        type=number_from(1),
        default=1,
        metavar="N",
        help="ranks of a tensor parallel group, under torchrun (default: 1)",
    )
    parser.add_argument(
        "--repeats", type=number_from(1), default=20, metavar="N", help="timed calls of each op (default: 20)"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    arguments = build_parser().parse_args(argv)
    if arguments.device == "cuda":
        return examine_cuda(arguments.json, everything=arguments.first_hour)
    from lopa_ascend.parallel.collectives import RankError  # these import torch, which takes seconds
    from scripts.selftest.node import examine_node, report_text

    try:
        report, findings, rank = examine_node(arguments.tensor_parallel_size, arguments.repeats)
    except (ValueError, RankError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if rank == 0:
        print(report_text(report, findings))
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return int(report["options"] is None or any(finding.verdict == "WRONG" for finding in findings))


def examine_cuda(file: Path | None, *, everything: bool) -> int:
    """Examines this machine's first GPU: whether it is usable, or everything. The JSON report goes to ``file``."""
    from scripts.selftest.gpu import SHORT, Plan, first_hour
    from scripts.selftest.hour import Examination

    steps = [step for step in first_hour(Plan()) if everything or step.name in SHORT]
    faults = Examination(file, SECONDS).run(steps)
    print("\n".join(["", *faults] if faults else ["", "nothing is wrong"]))
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
