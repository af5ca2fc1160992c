"""Judge: minutes of mixed load, with clients that come and go, leave memory, pages and answers as they were."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import httpx

from tests.judges.client import COMPLETIONS, Ask, ask, chat, connect, questions
from tests.judges.report import Options, Report
from tests.judges.server import Server, check_afterwards, resident, serving

CLIENTS = 24
"""Clients that send one request after another."""
QUEUE = 32
"""--max-num-queued-reqs: a burst fills the queue."""
BURST = 120
"""Requests of a burst, about twice a minute."""
NUM_QUESTIONS = 40
"""Questions that are asked; so few that equal requests come again."""
MAX_GROWTH = 0.02
"""Share by which the memory of a process may grow."""
SAMPLE_INTERVAL = 2.0
"""Seconds between two looks at the memory."""
MIB = 2**20
# The KV pool is so small that it fills during the warm-up: memory of pages that are used for the first time is no leak.
FLAGS = ("--kv-cache-memory", "96MiB", "--max-num-seqs", "16", "--max-num-queued-reqs", str(QUEUE))


class Memory(NamedTuple):
    """One look at the memory of the server's processes."""

    seconds: float
    """Since the start."""
    http: int
    """Bytes of the HTTP process."""
    engine: int
    """Bytes of the engine process."""


@dataclass
class Soak:
    """What was seen."""

    outcomes: Counter[str] = field(default_factory=Counter)
    """How often each outcome of a request came, such as "200", "503 queue_full" or "left"."""
    faults: list[str] = field(default_factory=list)
    """Requests that went wrong."""
    memory: list[Memory] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)
    """By request: the first answer, which all later ones must equal."""

    def growth(self, process: Literal["http", "engine"], warm_up: float) -> float:
        """By what share the memory of a process has grown: the median of the last quarter against that of the first.

        Args:
            process: the HTTP process, or the engine process.
            warm_up: seconds at the beginning that do not count.
        """
        values = [getattr(memory, process) for memory in self.memory if memory.seconds >= warm_up]
        quarter = max(1, len(values) // 4)
        return statistics.median(values[-quarter:]) / statistics.median(values[:quarter]) - 1


def judge(options: Options, report: Report) -> None:
    with serving(options.url, options.out / "soak.log", *FLAGS) as server:
        print(f"    memory below is that of {_settings(server)}", flush=True)
        soak = asyncio.run(_send_load(server, options))
        warm_up = warm_up_seconds(options.minutes)
        last = soak.memory[-1]
        for name, growth, num_bytes in (
            ("HTTP process", soak.growth("http", warm_up), last.http),
            ("engine process", soak.growth("engine", warm_up), last.engine),
        ):
            what = f"growth of the {name} after {warm_up / 60:.1f} minutes, below {MAX_GROWTH:.0%}"
            report.check(what, growth < MAX_GROWTH, f"{growth:+.2%} to {num_bytes / MIB:.0f} MiB resident")
        what = "5xx but 503 for a full queue, broken answers, or texts that changed"
        report.check(what, not soak.faults, soak.faults[:5] or f"none in {dict(soak.outcomes)}")
        report.check(
            "the queue was full at times", soak.outcomes["503 queue_full"] > 0, soak.outcomes["503 queue_full"]
        )
        check_afterwards(server, report)


def _settings(server: Server) -> str:
    """What a memory figure has to name: model, number format, device and flags."""
    info = httpx.get(f"{server.url}/server_info").json()
    return f"the model {info['model']} in {info['backend']['dtype']} on {info['backend']['device']}, {' '.join(FLAGS)}"


def warm_up_seconds(minutes: float) -> float:
    """The time that does not count of a soak of ``minutes``: a quarter, but no more than five minutes."""
    return min(300.0, 15 * minutes)


async def _send_load(server: Server, options: Options) -> Soak:
    """Sends requests of all kinds for ``options.minutes``."""
    soak, start = Soak(), time.monotonic()
    end = start + 60 * options.minutes
    async with connect(server.url) as client:
        watching = asyncio.create_task(_watch(server, soak, start, end))
        clients = [_client(client, soak, random.Random(f"{options.seed} {i}"), end) for i in range(CLIENTS)]
        await asyncio.gather(*clients, _bursts(client, soak, random.Random(options.seed), end))
        await watching
    return soak


async def _watch(server: Server, soak: Soak, start: float, end: float) -> None:
    """Samples the memory, and prints the state once a minute."""
    http_pid, engine_pid = server.pid, server.engine_pid
    minute = 1
    while (now := time.monotonic()) < end:
        memory = Memory(now - start, resident(http_pid), resident(engine_pid))
        soak.memory.append(memory)
        if now - start >= 60 * minute:
            metrics = await asyncio.to_thread(server.metrics)
            pages, running = metrics["lopa:pages_in_use"], metrics["vllm:num_requests_running"]
            state = f"HTTP {memory.http / MIB:.1f} MiB, engine {memory.engine / MIB:.1f} MiB, "
            state += f"{pages:.0f} pages, {running:.0f} running"
            print(f"    minute {minute}: {state}, {len(soak.faults)} faults, {dict(soak.outcomes)}", flush=True)
            minute += 1
        await asyncio.sleep(SAMPLE_INTERVAL)


async def _client(client: httpx.AsyncClient, soak: Soak, rng: random.Random, end: float) -> None:
    """Sends one request after another, with short pauses."""
    while time.monotonic() < end:
        await _send(client, soak, rng, _request(rng))
        await asyncio.sleep(rng.choice([0, 0, 0.05, 0.5]))


async def _bursts(client: httpx.AsyncClient, soak: Soak, rng: random.Random, end: float) -> None:
    """Sends more requests at once than the queue holds, twice a minute."""
    while time.monotonic() < end:
        requests = [chat(rng.choice(questions()[:NUM_QUESTIONS]), max_tokens=8) for _ in range(BURST)]
        await asyncio.gather(*(_send(client, soak, random.Random(0), request, stay=True) for request in requests))
        await asyncio.sleep(rng.uniform(15, 35))


def _request(rng: random.Random) -> Ask:
    """A request with a random mixture of fields; one in twenty is invalid."""
    fields: dict[str, object] = {"max_tokens": rng.choice([1, 8, 32, 64, 64, 128, 256]), "stream": rng.random() < 0.6}
    if rng.random() < 0.3:
        fields |= {"temperature": rng.choice([0.3, 1.0]), "seed": rng.randrange(1000)}
        fields |= rng.choice([{}, {"top_p": 0.9}, {"top_k": 20}])
    fields |= rng.choice([{}, {}, {"stop": ["####"]}, {"stop": [" the", "\n"]}, {"ignore_eos": True}])
    fields |= rng.choice([{}, {}, {"num_branches": 7}, {"decoding": "d2f"}, {"window_attention": "full"}])
    fields |= rng.choice([{}, {}, {"n": rng.randint(2, 4)}])
    asked = rng.sample(questions()[:NUM_QUESTIONS], 3)
    kind = rng.random()
    if kind < 0.05:
        return Ask(COMPLETIONS, {"prompt": asked[0], **fields, "max_tokens": rng.choice([-1, 10**6])})
    if kind < 0.15:
        return Ask(COMPLETIONS, {"prompt": asked, **fields})
    if kind < 0.25:
        return chat(" ".join(asked * rng.randint(1, 4)), **fields)
    return chat(asked[0], **fields)


async def _send(client: httpx.AsyncClient, soak: Soak, rng: random.Random, request: Ask, stay: bool = False) -> None:
    """Sends a request and records its outcome; unless ``stay``, one client in four hangs up before the end."""
    leaves = not stay and rng.random() < 0.25
    leave_after = rng.randint(1, 11) if leaves and request.stream else None
    patience = rng.uniform(0.01, 3) if leaves and not request.stream else 600
    try:
        answer = await asyncio.wait_for(ask(client, request, leave_after), patience)
    except asyncio.TimeoutError:
        soak.outcomes["left"] += 1
        if not leaves:
            soak.faults.append(f"no answer in {patience} s: {request}")
        return
    except httpx.TransportError as error:
        soak.outcomes["broken"] += 1
        soak.faults.append(f"{type(error).__name__} {error}: {request}")
        return
    if leave_after is not None and answer.status == 200:
        soak.outcomes["left"] += 1
        return
    code = (answer.error or {}).get("code", "")
    soak.outcomes[f"{answer.status} {code}".strip()] += 1
    if not answer.ok and not (400 <= answer.status < 500 or (answer.status, code) == (503, "queue_full")):
        soak.faults.append(f"{answer}: {request}")
    if answer.ok:
        _compare(soak, request, str(sorted(answer.texts.items())))


def _compare(soak: Soak, request: Ask, texts: str) -> None:
    """Records a fault if an equal request, streamed or not, was answered differently before."""
    key = str(sorted((name, str(value)) for name, value in request.body.items() if name != "stream"))
    if soak.texts.setdefault(key, texts) != texts:
        soak.faults.append(f"{texts} after {soak.texts[key]}: {request}")
