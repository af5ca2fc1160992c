"""Judge: when the engine is killed, every client gets an error at once, /health says so, and the server ends."""

from __future__ import annotations

import asyncio
import signal

from tests.judges.report import Options, Report
from tests.judges.server import serving
from tests.judges.signals import signal_under_load

CLIENTS = 48
"""More than the default --max-num-seqs: some of them wait."""


def judge(options: Options, report: Report) -> None:
    for load in (CLIENTS, 0):
        with serving(options.url, options.out / f"kill-{load}.log") as server:
            outcome = asyncio.run(signal_under_load(server, server.engine_pid, signal.SIGKILL, load))
        outcome.report(f"SIGKILL, {load} clients", report)
