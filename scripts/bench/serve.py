"""Measures throughput, latency and streaming of a server for several numbers of clients.

    bench serve                                       the bundled model, on a server that is started here; minutes
    bench serve --url http://host:8000                a running server; its prefix cache may know the prompts
    bench serve --clients 1 -- --max-num-seqs 1       flags of the server that is started come after --
    bench serve --fields block_size=16 num_branches=7 fields of the requests
    bench serve -- --replicas 2                       engines behind Ray Serve: what its ingress and proxy cost

For every number of clients the same streamed chat requests are sent; each client sends its next request as soon as it
has an answer. Prints a row of a Markdown table for each number of clients:

  requests/s, tokens/s   of all clients together; tokens are those of the answers
  TPF                    tokens divided by forward passes, of all answers
  first p50, p99         milliseconds until the first text of an answer: median and 99th percentile
  answer p50, p99        milliseconds until the end of an answer
  pieces                 events with text in an answer, on average
  CPU, ms                of the processes of a server that is started here, and of the clients, for each request
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from scripts.arguments import InputError, add_numbers, named_value
from scripts.bench.processes import Used, seconds_between, used_by
from scripts.bench.prompts import chat, questions
from scripts.bench.tables import records, row

ROOT = Path(__file__).resolve().parents[2]
SERVING = re.compile(r"^serving   (\S+).*\n", re.MULTILINE)
"""The server's line with its address."""
TIMEOUT = 600
"""Seconds for an answer, and for the start of a server."""


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


def figures(clients: int, answers: Sequence[Answer], seconds: float, cpu: Mapping[str, float]) -> dict[str, Any]:
    """What is printed for a number of clients, by the headings of the table; ``seconds`` of all requests are by the
    clock, those of ``cpu`` by part of the server."""
    tokens, forwards = (sum(getattr(answer, name) for answer in answers) for name in ("tokens", "forwards"))
    times = {"first": [answer.first for answer in answers], "answer": [answer.seconds for answer in answers]}
    return {
        "clients": clients,
        "requests/s": round(len(answers) / seconds, 3),
        "tokens/s": round(tokens / seconds, 1),
        "TPF": round(tokens / forwards, 2) if forwards else None,
        **{
            f"{name} p{100 * share:.0f}, ms": round(1000 * float(np.quantile(values, share, method="inverted_cdf")), 1)
            for name, values in times.items()
            for share in (0.5, 0.99)
        },
        "pieces": round(statistics.mean(answer.pieces for answer in answers), 1),
        "CPU, ms": {part: round(1000 * used / len(answers), 2) for part, used in cpu.items()},
    }


def make_bodies(count: int, max_tokens: int, fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Streamed chat requests with the held-out problems, which come again if there are fewer than ``count``."""
    common = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": max_tokens, **fields}
    return [{"messages": chat(question), **common} for question in questions(count)]


async def measure(url: str, process: int | None, bodies: Sequence[Mapping[str, Any]], clients: int) -> dict[str, Any]:
    """Sends requests from several clients, after a first one that does not count. ``process``: of the server, if it was
    started here."""
    answers: list[Answer] = []
    waiting = iter(bodies)
    limits = httpx.Limits(max_connections=clients)
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT, limits=limits) as http:
        await ask(http, bodies[0])

        async def client() -> None:
            for body in waiting:
                answers.append(await ask(http, body))

        before, start = used(process), time.perf_counter()
        await asyncio.gather(*(client() for _ in range(clients)))
        seconds = time.perf_counter() - start
        return figures(clients, answers, seconds, seconds_between(before, used(process)))


async def ask(http: httpx.AsyncClient, body: Mapping[str, Any]) -> Answer:
    """Sends a request and reads the stream. RuntimeError if the server refuses it, or the stream has an error or is cut
    off."""
    answer, start, is_whole = Answer(), time.perf_counter(), False
    async with http.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != httpx.codes.OK:
            raise RuntimeError(f"status {response.status_code}: {(await response.aread()).decode(errors='replace')}")
        async for line in _lines(response):
            is_whole |= line == b"data: [DONE]"
            if not line.startswith(b"data: {"):  # an empty line, or a comment
                continue
            event = json.loads(line.removeprefix(b"data: "))
            if "error" in event:
                raise RuntimeError(f"the stream has an error: {event['error']}")
            if any(choice["delta"].get("content") for choice in event["choices"]):
                answer.pieces += 1
                answer.first = answer.first or time.perf_counter() - start
            if event.get("usage"):
                answer.tokens = event["usage"]["completion_tokens"]
                answer.forwards = (event.get("lopa") or {}).get("num_forwards", 0)
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


# ---- servers ---------------------------------------------------------------------------------------------------------


def used(process: int | None) -> Used:
    """What a server's processes have used, and the clients, which are this process."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    return ({} if process is None else used_by(process)) | {os.getpid(): ("clients", own.ru_utime + own.ru_stime)}


@contextmanager
def one_server(flags: Sequence[str]) -> Iterator[tuple[str, int]]:
    """A server without prefix cache, which ends after the ``with`` block: its address and its process. It has one
    thread: OpenMP's default would compete with the clients for the cores. RuntimeError if it does not start."""
    command = [sys.executable, "-m", "lopa_ascend.serve", "--port", "0", "--no-enable-prefix-caching", *flags]
    variables = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", **os.environ}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        with log.open("w") as output:
            process = subprocess.Popen(command, cwd=ROOT, env=variables, stdout=output, stderr=subprocess.STDOUT)
        try:
            yield _await_address(process, log), process.pid
        finally:
            process.terminate()
            process.wait()


def _await_address(process: subprocess.Popen[bytes], log: Path) -> str:
    """Waits until a server serves; its log has the address."""
    deadline = time.monotonic() + TIMEOUT
    while not (found := SERVING.search(log.read_text(errors="replace"))):
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the server did not start:\n{log.read_text(errors='replace')}")
        time.sleep(0.1)
    return found[1]


# ---- the command -----------------------------------------------------------------------------------------------------


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", help="a running server (default: one is started here, without prefix cache)")
    parser.add_argument("flags", nargs="*", metavar="-- FLAGS", help="flags of a server that is started")
    add_numbers(
        parser,
        ("--clients", [1, 2, 4, 8, 16, 32], 1, "numbers of clients"),
        ("--requests", 96, 1, "requests for each number of clients"),
        ("--max-tokens", 192, 1, "tokens of an answer, at most"),
    )
    fields = "fields of the requests, such as num_branches=3"
    parser.add_argument("--fields", nargs="+", type=named_value, default=[], metavar="NAME=VALUE", help=fields)


def run(args: argparse.Namespace) -> int:
    """Measures and prints each number of clients."""
    if args.url and args.flags:
        raise InputError("--url, and flags after --, name different servers; give one of them")
    server = nullcontext((args.url, None)) if args.url else one_server(args.flags)
    bodies = make_bodies(args.requests, args.max_tokens, dict(args.fields))
    with server as (url, process):
        for number, clients in enumerate(args.clients):
            level = asyncio.run(measure(url, process, bodies, clients))
            print(row(level.values()) if number else records([level]), flush=True)
    return 0
