"""Judge: when the engine is killed, every client hears of it at once, and the server says so and ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from dataclasses import dataclass, field

import httpx

from scripts.judge.client import Answer, Ask, ask, chat, connect, questions
from scripts.judge.report import Options, Report
from scripts.judge.server import Server, ended, serving

CLIENTS = 48
"""More than the default --max-num-seqs: some of them wait."""
WITHIN = 2.0
"""Seconds in which a client must hear of it."""
EXIT_WITHIN = 30.0
# One token a forward pass, for longer than this judge looks on.
ENDLESS = {"max_tokens": 1500, "ignore_eos": True, "decoding": "d2f", "tau_conf": 1.0, "tau_add": 1.0, "tau_act": 1.0}


@dataclass
class Watch:
    """Seconds since the kill: when the process was gone, a client heard of it (and what), /health said what."""

    gone: float = 0.0
    heard: list[tuple[float, str]] = field(default_factory=list)
    health: list[tuple[float, int]] = field(default_factory=list)


def judge(options: Options, report: Report) -> None:
    for load in (CLIENTS, 0):
        with serving(options.url, options.out / f"kill-{load}.log") as server:
            watch = asyncio.run(_judge(server, load))
            assert server.process is not None
            status = server.process.wait(EXIT_WITHIN)
            _check(report, f"{load} clients" if load else "idle", load, watch, status)


def _check(report: Report, name: str, load: int, watch: Watch, status: int) -> None:
    print(f"    {name}: the engine process was gone after {watch.gone:.2f} s")
    if load:
        late = [(seconds, what) for seconds, what in watch.heard if seconds > WITHIN]
        slowest = max(seconds for seconds, _ in watch.heard)
        report.check(
            f"{name}: heard of it within {WITHIN} s", not late, late[:3] or f"the slowest after {slowest:.2f} s"
        )
        wrong = [what for _, what in watch.heard if "503" not in what and "event" not in what]
        report.check(f"{name}: got a 503 or an error event", not wrong, wrong[:3] or f"{len(watch.heard)} clients")
    down = [seconds for seconds, status in watch.health if status == 503]
    report.check(f"{name}: /health is 503 within {WITHIN} s", bool(down) and down[0] < WITHIN, watch.health)
    back = [seconds for seconds, status in watch.health if status == 200 and down and seconds > down[0]]
    report.check(f"{name}: /health does not recover", not back, back)
    report.check(f"{name}: exit status is not 0", status != 0, status)


async def _judge(server: Server, load: int) -> Watch:
    watch = Watch()
    async with connect(server.url) as client:
        requests = [
            chat(question, stream=index % 2 == 0, **ENDLESS) for index, question in enumerate(questions()[:load])
        ]
        asked = [asyncio.create_task(_hear(client, request)) for request in requests]
        await _await_load(client, load)
        engine = server.engine_pid
        os.kill(engine, signal.SIGKILL)
        killed = time.perf_counter()
        ending = asyncio.create_task(asyncio.to_thread(_await_end, engine))
        watching = asyncio.create_task(_watch_health(server.url, killed, watch))
        for ended, what in await asyncio.gather(*asked):
            watch.heard.append((ended - killed, what))
        await watching
        watch.gone = await ending - killed
    return watch


async def _hear(client: httpx.AsyncClient, request: Ask) -> tuple[float, str]:
    """When the request ended, and with what."""
    try:
        answer: Answer = await ask(client, request)
    except httpx.HTTPError as error:
        return time.perf_counter(), f"{type(error).__name__}: {error}"
    if answer.status == 200:
        return time.perf_counter(), f"event {answer.error}" if answer.error and answer.done else str(answer)
    return time.perf_counter(), f"status {answer.status}: {answer.error}"


def _await_end(pid: int) -> float:
    """When the kernel was done with the process: freeing its memory takes time, more so on a busy machine."""
    while not ended(pid):
        time.sleep(0.01)
    return time.perf_counter()


async def _await_load(client: httpx.AsyncClient, load: int) -> None:
    """Until all requests have arrived and some of them run."""
    while load:
        lines = [line.rpartition(" ") for line in (await client.get("/metrics")).text.splitlines()]
        found = {name.partition("{")[0]: float(value) for name, _, value in lines if not name.startswith("#")}
        running, waiting = found["vllm:num_requests_running"], found["vllm:num_requests_waiting"]
        if running and running + waiting == load:
            return
        await asyncio.sleep(0.1)


async def _watch_health(url: str, start: float, watch: Watch) -> None:
    """Asks until nobody answers any more."""
    with contextlib.suppress(httpx.TransportError):
        async with httpx.AsyncClient(base_url=url, timeout=5) as client:
            while True:
                status = (await client.get("/health")).status_code
                watch.health.append((round(time.perf_counter() - start, 2), status))
                await asyncio.sleep(0.2)
