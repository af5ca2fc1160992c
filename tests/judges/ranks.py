"""Judge: when a rank dies or hangs, every client gets an error, /health says so, and all processes end."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

from lopa_ascend.parallel.watch import BEAT_INTERVAL
from tests.judges.report import Options, Report
from tests.judges.server import children, serving
from tests.judges.signals import signal_under_load

CLIENTS = 24
"""More than --max-num-seqs: some of them wait."""
NUM_RANKS = 4
TIMEOUT = 5
"""Seconds for which a rank may hang."""
FLAGS = (
    "--tensor-parallel-size=2",
    "--branch-parallel-size=2",
    f"--distributed-timeout-seconds={TIMEOUT}",
    "--max-num-seqs=16",
)


def judge(options: Options, report: Report) -> None:
    for number, notice_time in ((signal.SIGKILL, 0.0), (signal.SIGSTOP, TIMEOUT + BEAT_INTERVAL)):
        for rank in range(NUM_RANKS):
            with serving(options.url, options.out / f"ranks-{number.name}-{rank}.log", *FLAGS) as server:
                outcome = asyncio.run(signal_under_load(server, by_rank(server.pid)[rank], number, CLIENTS))
            outcome.report(f"{number.name} of rank {rank}", report, notice_time)


def by_rank(pid: int) -> dict[int, int]:
    """The process ids of the ranks that a server with process id ``pid`` has started, by rank."""
    found = {}
    for child in children(pid):
        variables = dict(item.partition("=")[::2] for item in Path(f"/proc/{child}/environ").read_text().split("\0"))
        if "RANK" in variables:  # another one renders chat templates
            found[int(variables["RANK"])] = child
    return found
