"""Kills or stops a process of a server under load, and records what its clients get, and when."""

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

HEALTH_LIMIT = 1.0
"""Seconds in which /health must say 503."""
ANSWER_LIMIT = 2.0
"""Seconds in which every client must have got an error."""
END_LIMIT = 10.0
"""Seconds in which every process must have ended."""
GIVE_UP = 120.0
"""Seconds after which an answer, or the end of a process, is not waited for any more."""
# One position in each forward pass, which takes longer than any of these limits.
ENDLESS = {"max_tokens": 1500, "ignore_eos": True, "tau_conf": 1.0, "tau_add": 1.0, "tau_act": 1.0}


@dataclass
class Outcome:
    """What happened after the signal. Times are seconds since then."""

    health: list[tuple[float, int]] = field(default_factory=list)
    """Times and status codes of all answers of /health."""
    answers: list[tuple[float, str]] = field(default_factory=list)
    """For each client, when its request ended and what it got."""
    ends: list[float] = field(default_factory=list)
    """For each process, when it had ended."""
    status: int | None = None
    """Exit status of the server."""

    @property
    def health_time(self) -> float:
        """When /health said 503 first."""
        return min((seconds for seconds, status in self.health if status == 503), default=float("inf"))

    @property
    def answer_time(self) -> float:
        """When the last client got its answer."""
        return max((seconds for seconds, _ in self.answers), default=0.0)

    def faults(self, notice_time: float = 0.0) -> list[str]:
        """What has gone wrong, in words.

        Args:
            notice_time: seconds that the server may need to notice the failure: none for a process that was killed, the
                timeout for one that was stopped.
        """
        wrong = [what for _, what in self.answers if not what.startswith(("status 503", "event"))]
        recovered = any(status == 200 and seconds > self.health_time for seconds, status in self.health)
        health_limit, answer_limit, end_limit = (
            notice_time + limit for limit in (HEALTH_LIMIT, ANSWER_LIMIT, END_LIMIT)
        )
        verdicts = {
            f"/health was not 503 within {health_limit:g} s": self.health_time > health_limit,
            "/health recovered": recovered,
            f"a client waited for more than {answer_limit:g} s": self.answer_time > answer_limit,
            f"neither a 503 nor an error event: {wrong[:3]}": bool(wrong),
            f"a process was there after {end_limit:g} s": max(self.ends) > end_limit,
            f"exit status {self.status}": not self.status,
        }
        return [what for what, found in verdicts.items() if found]

    def report(self, what: str, report: Report, notice_time: float = 0.0) -> None:
        """Adds the verdict on what was done, ``what``, to a report."""
        faults = self.faults(notice_time)
        report.check(what, not faults, f"{self}{''.join('; ' + fault for fault in faults)}")

    def __str__(self) -> str:
        return (
            f"/health 503 after {self.health_time:5.2f} s, "
            f"the last of {len(self.answers)} clients {self.answer_time:5.2f} s, "
            f"the last process {max(self.ends):5.2f} s, exit status {self.status}"
        )


async def signal_under_load(server: Server, pid: int, number: signal.Signals, clients: int) -> Outcome:
    """Signals a process of a server while clients wait for answers, and waits until all processes have ended.

    Args:
        server: the server.
        pid: the process, which is the server's or a child of it.
        number: the signal.
        clients: how many clients wait, every other one of them for a stream.
    """
    outcome, processes = Outcome(), [server.pid, *children(server.pid)]
    assert pid in processes, pid
    async with connect(server.url, GIVE_UP) as client:
        requests = [chat(question, stream=i % 2 == 0, **ENDLESS) for i, question in enumerate(questions()[:clients])]
        asked = [asyncio.create_task(_await_answer(client, request)) for request in requests]
        await asyncio.to_thread(_await_load, server, clients)
        os.kill(pid, number)
        start = time.perf_counter()
        ends = asyncio.gather(*(_await_end(process) for process in processes))
        await _watch_health(server.url, start, outcome)
        outcome.answers = [(when - start, what) for when, what in await asyncio.gather(*asked)]
        outcome.ends = [when - start for when in await ends]
    assert server.process is not None
    outcome.status = server.process.poll()
    return outcome


async def _await_answer(client: httpx.AsyncClient, request: Ask) -> tuple[float, str]:
    """When a request ended, and with what."""
    try:
        answer: Answer = await ask(client, request)
    except httpx.HTTPError as error:
        return time.perf_counter(), f"{type(error).__name__}: {error}"
    if answer.status == 200:
        return time.perf_counter(), f"event {answer.error}" if answer.error and answer.done else str(answer)
    return time.perf_counter(), f"status {answer.status}: {answer.error}"


def _await_load(server: Server, clients: int) -> None:
    """Waits until all requests have arrived and some are under way."""
    while clients:
        found = server.metrics()
        arrived = found["vllm:num_requests_running"] + found["vllm:num_requests_waiting"]
        if arrived == clients and found["vllm:diffusion_num_committed_tokens_total"] > clients:
            return
        time.sleep(0.1)


async def _await_end(pid: int) -> float:
    """When the kernel was done with a process; infinity if that took too long."""
    deadline = time.perf_counter() + GIVE_UP
    while not ended(pid):
        if time.perf_counter() > deadline:
            return float("inf")
        await asyncio.sleep(0.02)
    return time.perf_counter()


async def _watch_health(url: str, start: float, outcome: Outcome) -> None:
    """Asks /health until the server does not answer any more."""
    with contextlib.suppress(httpx.TransportError):
        async with httpx.AsyncClient(base_url=url, timeout=5) as client:
            while time.perf_counter() < start + GIVE_UP:
                status = (await client.get("/health")).status_code
                outcome.health.append((time.perf_counter() - start, status))
                await asyncio.sleep(0.05)
