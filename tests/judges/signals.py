"""Kills or stops a process of a server under load, and records what its clients get, and when."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx

from tests.judges.client import Answer, Ask, ask, chat, connect, questions
from tests.judges.report import Report
from tests.judges.server import Server, children, ended

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
RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
COMMITTED = "vllm:diffusion_num_committed_tokens_total"


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
    no_load: str = ""
    """Why there was no signal: what happened in place of the load."""

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
        if self.no_load:
            return [self.no_load]
        wrong = [what for _, what in self.answers if not what.startswith(("status 503", "event"))]
        recovered = any(status == 200 and seconds > self.health_time for seconds, status in self.health)
        health_limit, answer_limit = notice_time + HEALTH_LIMIT, notice_time + ANSWER_LIMIT
        end_limit = notice_time + END_LIMIT
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
        if self.no_load:
            return "no signal"
        return (
            f"/health 503 after {self.health_time:5.2f} s, "
            f"the last of {len(self.answers)} clients {self.answer_time:5.2f} s, "
            f"the last process {max(self.ends):5.2f} s, exit status {self.status}"
        )


async def signal_under_load(server: Server, pid: int, number: signal.Signals, clients: int) -> Outcome:
    """Signals a process of a server while clients wait for answers, and waits until all processes have ended.

    Sends no signal if the clients do not get to wait: ``Outcome.no_load`` says why.

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
        if no_load := await _await_load(server, asked):
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
            return Outcome(no_load=no_load)
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


async def _await_load(server: Server, asked: Sequence[asyncio.Task[tuple[float, str]]]) -> str:
    """Waits until all requests have arrived and some are under way.

    Args:
        server: the server.
        asked: the requests, each with its result of ``_await_answer``.

    Returns:
        What went wrong: a request has ended, or it took too long. "" if nothing did.
    """
    deadline = time.perf_counter() + GIVE_UP
    found: dict[str, float] = {}
    while asked:
        if early := [task.result()[1] for task in asked if task.done()]:
            return f"a client did not have to wait: {early[0]}"
        if time.perf_counter() > deadline:
            return f"{len(asked)} requests were not under way after {GIVE_UP:g} s: {found}"
        with contextlib.suppress(httpx.HTTPError):  # a client's answer says more, if the server has ended
            metrics = await asyncio.to_thread(server.metrics)
            found = {name: metrics[name] for name in (RUNNING, WAITING, COMMITTED)}
            if found[RUNNING] + found[WAITING] == len(asked) and found[COMMITTED] > len(asked):
                break
        await asyncio.sleep(0.1)
    return ""


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
