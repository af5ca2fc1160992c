"""What the clients of a server see, and when, after one of its processes was killed or stopped."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from dataclasses import dataclass, field

import httpx

from scripts.judge.client import Answer, Ask, ask, chat, connect, questions
from scripts.judge.report import Report
from scripts.judge.server import Server, children, ended

NOTICED = 1.0
"""Seconds in which /health must say 503."""
ANSWERED = 2.0
"""Seconds in which every client must have heard of it."""
GONE = 10.0
"""Seconds in which every process must have ended."""
PATIENCE = 120.0
"""Seconds after which nobody waits any longer for an answer or an end."""
# One forward pass after another, for longer than anybody looks on.
ENDLESS = {"max_tokens": 1500, "ignore_eos": True, "tau_conf": 1.0, "tau_add": 1.0, "tau_act": 1.0}


@dataclass
class Outcome:
    """What followed when a process was killed or stopped, in seconds since: when /health said what, when each client
    heard of it (and what), when each process was gone; and the server's exit status."""

    health: list[tuple[float, int]] = field(default_factory=list)
    heard: list[tuple[float, str]] = field(default_factory=list)
    gone: list[float] = field(default_factory=list)
    status: int | None = None

    @property
    def noticed(self) -> float:
        """When /health said 503 first."""
        return min((seconds for seconds, status in self.health if status == 503), default=float("inf"))

    @property
    def answered(self) -> float:
        return max((seconds for seconds, _ in self.heard), default=0.0)

    def faults(self, patience: float = 0.0) -> list[str]:
        """What is not as it must be; a process that was stopped may hang for ``patience`` seconds."""
        wrong = [what for _, what in self.heard if not what.startswith(("status 503", "event"))]
        recovered = any(status == 200 and seconds > self.noticed for seconds, status in self.health)
        verdicts = {
            f"/health was not 503 within {patience + NOTICED:g} s": self.noticed > patience + NOTICED,
            "/health recovered": recovered,
            f"a client waited for more than {patience + ANSWERED:g} s": self.answered > patience + ANSWERED,
            f"neither a 503 nor an error event: {wrong[:3]}": bool(wrong),
            f"a process was there after {patience + GONE:g} s": max(self.gone) > patience + GONE,
            f"exit status {self.status}": not self.status,
        }
        return [what for what, found in verdicts.items() if found]

    def judge(self, what: str, report: Report, patience: float = 0.0) -> None:
        faults = self.faults(patience)
        report.check(what, not faults, f"{self}{''.join('; ' + fault for fault in faults)}")

    def __str__(self) -> str:
        return (
            f"/health 503 after {self.noticed:5.2f} s, the last of {len(self.heard)} clients {self.answered:5.2f} s, "
            f"the last process {max(self.gone):5.2f} s, exit status {self.status}"
        )


async def strike(server: Server, victim: int, blow: signal.Signals, clients: int) -> Outcome:
    """Sends ``blow`` to a process of the server while ``clients`` wait for their answers, every other one of them for a
    stream, and watches until all processes have ended."""
    outcome, processes = Outcome(), [server.pid, *children(server.pid)]
    assert victim in processes, victim
    async with connect(server.url, PATIENCE) as client:
        requests = [chat(question, stream=i % 2 == 0, **ENDLESS) for i, question in enumerate(questions()[:clients])]
        asked = [asyncio.create_task(_hear(client, request)) for request in requests]
        await asyncio.to_thread(_await_load, server, clients)
        os.kill(victim, blow)
        struck = time.perf_counter()
        ending = asyncio.gather(*(_await_end(pid) for pid in processes))
        await _watch_health(server.url, struck, outcome)
        outcome.heard = [(when - struck, what) for when, what in await asyncio.gather(*asked)]
        outcome.gone = [when - struck for when in await ending]
    assert server.process is not None
    outcome.status = server.process.poll()
    return outcome


async def _hear(client: httpx.AsyncClient, request: Ask) -> tuple[float, str]:
    """When the request ended, and with what."""
    try:
        answer: Answer = await ask(client, request)
    except httpx.HTTPError as error:
        return time.perf_counter(), f"{type(error).__name__}: {error}"
    if answer.status == 200:
        return time.perf_counter(), f"event {answer.error}" if answer.error and answer.done else str(answer)
    return time.perf_counter(), f"status {answer.status}: {answer.error}"


def _await_load(server: Server, clients: int) -> None:
    """Until all requests have arrived and some are under way."""
    while clients:
        found = server.metrics()
        arrived = found["vllm:num_requests_running"] + found["vllm:num_requests_waiting"]
        if arrived == clients and found["vllm:diffusion_num_committed_tokens_total"] > clients:
            return
        time.sleep(0.1)


async def _await_end(pid: int) -> float:
    """When the kernel was done with the process; infinity if it gave no end."""
    deadline = time.perf_counter() + PATIENCE
    while not ended(pid):
        if time.perf_counter() > deadline:
            return float("inf")
        await asyncio.sleep(0.02)
    return time.perf_counter()


async def _watch_health(url: str, start: float, outcome: Outcome) -> None:
    """Asks until nobody answers any more."""
    with contextlib.suppress(httpx.TransportError):
        async with httpx.AsyncClient(base_url=url, timeout=5) as client:
            while time.perf_counter() < start + PATIENCE:
                status = (await client.get("/health")).status_code
                outcome.health.append((time.perf_counter() - start, status))
                await asyncio.sleep(0.05)
