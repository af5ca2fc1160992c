"""Judge: when the engine is killed, every client hears of it at once, and the server says so and ends."""

from __future__ import annotations

import asyncio
import signal

from scripts.judge.report import Options, Report
from scripts.judge.server import serving
from scripts.judge.strike import strike

CLIENTS = 48
"""More than the default --max-num-seqs: some of them wait."""


def judge(options: Options, report: Report) -> None:
    for load in (CLIENTS, 0):
        with serving(options.url, options.out / f"kill-{load}.log") as server:
            outcome = asyncio.run(strike(server, server.engine_pid, signal.SIGKILL, load))
        outcome.judge(f"SIGKILL, {load} clients", report)
