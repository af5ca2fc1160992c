"""Measures throughput, latency and streaming of a server for several numbers of clients.

    bench serve                                       the bundled model, on a server that is started here; minutes
    bench serve --url http://host:8000                a running server; its prefix cache may know the prompts
    bench serve --clients 1 -- --max-num-seqs 1       flags of the server that is started come after --
    bench serve --fields block_size=16 num_branches=7 fields of the requests
    bench serve --mixed -- --replicas 2 --enable-prefix-caching       engines behind Ray Serve, under a mixed load
    bench serve --mixed --round-robin 2               the same with a router that takes each engine in its turn
    bench serve --stand-ins 16 --ingresses 2          16 stand-ins for them, which compute nothing: what the rest can do

For every number of clients the same streamed chat requests are sent; each client sends its next request as soon as it
has an answer. A mixed load has short and long requests, of which four in ten repeat an earlier prompt. Prints a row of
a Markdown table for each number of clients, or with --json one line for all:

  requests/s, tokens/s   of all clients together; tokens are those of the answers
  TPF                    tokens divided by forward passes, of all answers
  first p50, p99         milliseconds until the first text of an answer: median and 99th percentile
  answer p50, p99        milliseconds until the end of an answer
  pieces                 events with text in an answer, on average
  hits                   share of the prompts' tokens that prefix caches had
  CPU, ms                of the processes of a server that is started here, and of the clients, for each request
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import os
import random
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from lopa_ascend.parallel.launch import LOCALHOST, free_port
from scripts.arguments import add_numbers
from scripts.bench.machine import describe_machine
from scripts.bench.processes import Used, seconds_between, used_by
from scripts.bench.prompts import chat, questions
from scripts.bench.tables import row, table

ROOT = Path(__file__).resolve().parents[2]
READY = "serving   "
"""What the server's line with its address begins with."""
TIMEOUT = 600
"""Seconds for an answer."""
START_SECONDS = 600
"""For a server that is started."""
LONG, REPEATED = 0.3, 0.4
"""Shares of a mixed load that have a long prompt and a long answer, and that repeat an earlier prompt."""


@dataclass
class Answer:
    """What came back for one request."""

    tokens: int = 0
    forwards: int = 0
    """Forward passes, by the server's own count; 0 if it does not tell."""
    pieces: int = 0
    """Events that had text."""
    first: float = 0.0
    """Seconds from the request to the first text."""
    seconds: float = 0.0
    """Seconds from the request to the end."""


@dataclass(frozen=True)
class Level:
    """The measurements for one number of clients."""

    clients: int
    answers: Sequence[Answer]
    seconds: float
    """Of all requests by the clock."""
    cpu: Mapping[str, float]
    """CPU seconds of all requests, by part of the server."""
    hits: float | None = None
    """Share of the prompts' tokens that were found in prefix caches; None: the server does not tell."""

    def as_json(self) -> dict[str, Any]:
        """The figures by name."""
        tokens, forwards = (sum(getattr(answer, name) for answer in self.answers) for name in ("tokens", "forwards"))
        times = {"first": [answer.first for answer in self.answers], "answer": [a.seconds for a in self.answers]}
        return {
            "clients": self.clients,
            "requests_per_second": round(len(self.answers) / self.seconds, 3),
            "tokens_per_second": round(tokens / self.seconds, 1),
            "tpf": round(tokens / forwards, 2) if forwards else None,
            **{
                f"{name}_p{100 * share:.0f}_ms": round(1000 * percentile(values, share), 1)
                for name, values in times.items()
                for share in (0.5, 0.99)
            },
            "pieces": round(statistics.mean(answer.pieces for answer in self.answers), 1),
            "hits": None if self.hits is None else round(self.hits, 2),
            "cpu_ms": {part: round(1000 * used / len(self.answers), 2) for part, used in self.cpu.items()},
        }


HEADINGS = (
    *("clients", "requests/s", "tokens/s", "TPF", "first p50, ms", "first p99", "answer p50", "answer p99", "pieces"),
    *("hits", "CPU, ms"),
)
"""Of the figures of a level, in their order."""


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of the values, such as 0.99, do not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def make_bodies(count: int, max_tokens: int, fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Streamed chat requests with the held-out problems, which come again if there are fewer than ``count``."""
    common = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": max_tokens, **fields}
    asked = itertools.islice(itertools.cycle(questions()), count)
    return [{"messages": chat(question), **common} for question in asked]


def mixed_bodies(count: int, fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Streamed chat requests, short and long, under two system prompts; some come again."""
    dice, problems, bodies = random.Random(0), itertools.cycle(questions()), list[dict[str, Any]]()
    systems = [" ".join(itertools.islice(problems, 4)) for _ in range(2)]
    while len(bodies) < count:
        if bodies and dice.random() < REPEATED:
            bodies.append(dice.choice(bodies))
            continue
        num_problems, max_tokens = (6, 192) if dice.random() < LONG else (1, 24)
        messages = chat(" ".join(itertools.islice(problems, num_problems)))
        messages.insert(0, {"role": "system", "content": dice.choice(systems)})
        common = {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
        bodies.append({"messages": messages, "max_tokens": max_tokens, **common, **fields})
    return bodies


async def measure(server: Server, bodies: Sequence[Mapping[str, Any]], clients: int) -> Level:
    """Sends requests from several clients, after a first one that does not count.

    Raises:
        RuntimeError: a request failed.
    """
    answers: list[Answer] = []
    waiting = iter(bodies)
    limits = httpx.Limits(max_connections=clients)
    async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT, limits=limits) as http:
        await ask(http, bodies[0])

        async def client() -> None:
            for body in waiting:
                answers.append(await ask(http, body))

        cached, before, start = await _prefix_cache(http), server.used(), time.perf_counter()
        await asyncio.gather(*(client() for _ in range(clients)))
        seconds, cpu = time.perf_counter() - start, seconds_between(before, server.used())
        hits, queries = (now - then for now, then in zip(await _prefix_cache(http), cached, strict=True))
        return Level(clients, answers, seconds, cpu, hits / queries if queries else None)


async def _prefix_cache(http: httpx.AsyncClient) -> tuple[float, float]:
    """Tokens of prompts that prefix caches had, and all that were looked up, until now."""
    text = (await http.get("/metrics")).text
    names = ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total")
    hits, queries = (sum(map(float, re.findall(rf"^{name}{{.*}} (\S+)$", text, re.MULTILINE))) for name in names)
    return hits, queries


async def ask(http: httpx.AsyncClient, body: Mapping[str, Any]) -> Answer:
    """Sends a request and reads the stream.

    Raises:
        RuntimeError: the server refused it, or the stream has an error or is cut off.
    """
    answer, start, is_whole = Answer(), time.perf_counter(), False
    async with http.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != httpx.codes.OK:
            raise RuntimeError(f"status {response.status_code}: {(await response.aread()).decode(errors='replace')}")
        async for line in _lines(response):
            if line == b"data: [DONE]":
                is_whole = True
            elif line and not line.startswith(b":"):  # a comment
                _take(answer, json.loads(line.removeprefix(b"data: ")), time.perf_counter() - start)
    if not is_whole:
        raise RuntimeError("the stream was cut off")
    answer.seconds = time.perf_counter() - start
    return answer


async def _lines(response: httpx.Response) -> AsyncIterator[bytes]:
    """The lines of a stream. ``aiter_lines`` would also end a line at U+2028, which JSON may hold."""
    unread = b""
    async for piece in response.aiter_bytes():
        *lines, unread = (unread + piece).split(b"\n")
        for line in lines:
            yield line


def _take(answer: Answer, event: Mapping[str, Any], seconds: float) -> None:
    """Adds an event to an answer, which arrived so many seconds after the request."""
    if "error" in event:
        raise RuntimeError(f"the stream has an error: {event['error']}")
    if any(choice["delta"].get("content") for choice in event["choices"]):
        answer.pieces += 1
        answer.first = answer.first or seconds
    if event.get("usage"):
        answer.tokens = event["usage"]["completion_tokens"]
        answer.forwards = (event.get("lopa") or {}).get("num_forwards", 0)


# ---- servers ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Server:
    """A running server."""

    url: str
    process: int | None = None
    """Its id, if the server was started here."""

    def used(self) -> Used:
        """What the server's processes have used, and the clients, which are this process."""
        own = resource.getrusage(resource.RUSAGE_SELF)
        clients = {os.getpid(): ("clients", own.ru_utime + own.ru_stime)}
        return clients if self.process is None else used_by(self.process) | clients


@contextmanager
def serving(command: Sequence[str], environment: Mapping[str, str], url: str | None = None) -> Iterator[Server]:
    """A server that is started, and ended after the ``with`` block. This process's own variables win over
    ``environment``; without ``url`` the log has the address.

    Raises:
        RuntimeError: the server did not start.
    """
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        with log.open("w") as output:
            variables = {**environment, **os.environ}
            process = subprocess.Popen(command, cwd=ROOT, env=variables, stdout=output, stderr=subprocess.STDOUT)
        try:
            yield Server(_await_address(process, log, url), process.pid)
        finally:
            process.terminate()
            process.wait()


def _await_address(process: subprocess.Popen[bytes], log: Path, url: str | None) -> str:
    """Waits until a server serves, and returns its address, which its log has if ``url`` is None."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        is_over = process.poll() is not None or time.monotonic() > deadline
        text = log.read_text(errors="replace")
        for line in text.splitlines(keepends=True):
            if line.startswith(READY) and line.endswith("\n"):
                return line.split()[1]
        if url is not None and _is_ready(url):
            return url
        if is_over:
            raise RuntimeError(f"the server did not start:\n{text}")
        time.sleep(0.1)


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready").is_success
    except httpx.TransportError:
        return False


def one_server(flags: Sequence[str]) -> AbstractContextManager[Server]:
    """A server without prefix cache. One thread: OpenMP's default would compete with the clients for the cores."""
    command = [sys.executable, "-m", "lopa_ascend.serve", "--port", "0", "--no-enable-prefix-caching", *flags]
    return serving(command, {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"})


@contextmanager
def on_ray(application: str, replicas: int, ingresses: int = 1) -> Iterator[Server]:
    """An application of scripts/bench/replicas.py, by its function, on a cluster of this machine; its replicas have all
    reported. ``ingresses`` are processes that answer HTTP."""
    http = {"host": LOCALHOST, "port": free_port()}
    built = {
        "name": "lopa",
        "route_prefix": "/",
        "import_path": f"scripts.bench.replicas:{application}",
        "args": {"replicas": replicas},
        "deployments": [{"name": "Ingress", "num_replicas": ingresses}],
    }
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump({"proxy_location": "HeadOnly", "http_options": http, "applications": [built]}, file)
        file.flush()
        command = [sys.executable, "-m", "ray.serve.scripts", "run", "--app-dir", str(ROOT), file.name]
        environment = {"RAY_ADDRESS": "local", "RAY_OVERRIDE_RESOURCES": json.dumps({"CPU": replicas})}
        with serving(command, environment, f"http://{LOCALHOST}:{http['port']}") as server:
            deadline = time.monotonic() + START_SECONDS
            while f"}} {replicas}.0" not in httpx.get(f"{server.url}/metrics", timeout=60).text:
                if time.monotonic() > deadline:
                    raise RuntimeError("not all replicas have reported")
                time.sleep(0.5)
            yield server


# ---- the command -----------------------------------------------------------------------------------------------------


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", help="a running server (default: one is started here, without prefix cache)")
    parser.add_argument("flags", nargs="*", metavar="-- FLAGS", help="flags of a server that is started")
    add_numbers(
        parser,
        ("--stand-ins", None, 1, "start N stand-ins for engines on Ray Serve"),
        ("--round-robin", None, 1, "start N engines on Ray Serve, which get requests in turn"),
        ("--ingresses", None, 1, "of the stand-ins: processes that answer HTTP (default: 1)"),
        ("--clients", [1, 2, 4, 8, 16, 32], 1, "numbers of clients"),
        ("--requests", 96, 1, "requests for each number of clients"),
        ("--max-tokens", 192, 1, "tokens of an answer, at most"),
    )
    parser.add_argument(
        "--fields", nargs="+", default=[], metavar="NAME=VALUE", help="fields of the requests, such as num_branches=3"
    )
    parser.add_argument("--mixed", action="store_true", help="short and long requests, and repeated prompts")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")


def parse_field(text: str) -> tuple[str, Any]:
    """The name and the value of a field, which is JSON, or a text without quotes."""
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Measures and prints each number of clients."""
    if sum(map(bool, (args.url, args.flags, args.stand_ins, args.round_robin))) > 1:
        parser.error("--url, --stand-ins, --round-robin and flags after -- name different servers; give one of them")
    if args.ingresses and not args.stand_ins:
        parser.error("--ingresses goes with --stand-ins alone")
    if args.stand_ins:
        server: AbstractContextManager[Server] = on_ray("stand_ins", args.stand_ins, args.ingresses or 1)
    elif args.round_robin:
        server = on_ray("round_robin", args.round_robin)
    else:
        server = nullcontext(Server(args.url)) if args.url else one_server(args.flags)
    fields = dict(map(parse_field, args.fields))
    bodies = mixed_bodies(args.requests, fields) if args.mixed else make_bodies(args.requests, args.max_tokens, fields)
    levels = []
    with server as running:
        if not args.json:
            print(table(HEADINGS), flush=True)
        for clients in args.clients:
            levels.append(asyncio.run(measure(running, bodies, clients)).as_json())
            if not args.json:
                print(row(levels[-1].values()), flush=True)
    if args.json:
        print(json.dumps({"machine": describe_machine(), "levels": levels}))
    return 0
