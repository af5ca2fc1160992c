"""Judge: when a rank dies or hangs, every client hears of it, the server says so, and all its processes end."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

from lopa_ascend.parallel.watch import BEAT_INTERVAL
from scripts.judge.report import Options, Report
from scripts.judge.server import children, serving
from scripts.judge.strike import strike

CLIENTS = 24
TIMEOUT = 5
# Fewer places than clients: some of them wait.
FLAGS = (
    *("--tensor-parallel-size", "2", "--branch-parallel-size", "2"),
    *("--distributed-timeout-seconds", str(TIMEOUT), "--max-num-seqs", "16"),
)
NUM_RANKS = 4


def judge(options: Options, report: Report) -> None:
    for blow, patience in ((signal.SIGKILL, 0.0), (signal.SIGSTOP, TIMEOUT + BEAT_INTERVAL)):
        for rank in range(NUM_RANKS):
            with serving(options.url, options.out / f"ranks-{blow.name}-{rank}.log", *FLAGS) as server:
                outcome = asyncio.run(strike(server, by_rank(server.pid)[rank], blow, CLIENTS))
            outcome.judge(f"{blow.name} of rank {rank}", report, patience)


def by_rank(pid: int) -> dict[int, int]:
    """The processes of the ranks that the server ``pid`` has started, by rank."""
    found = {}
    for child in children(pid):
        variables = dict(item.partition("=")[::2] for item in Path(f"/proc/{child}/environ").read_text().split("\0"))
        found[int(variables["RANK"])] = child
    return found
