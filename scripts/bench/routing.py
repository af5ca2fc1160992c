"""Compares routers of replicas on Ray Serve, under short and long requests with shared and repeated prompts.

    bench routing                                     2 replicas of the bundled model on this machine
    bench routing --replicas 4 --clients 32           RAY_ADDRESS names a cluster

Each router gets the same requests, from as many clients at a time, in turns. Prints a row of a Markdown table for each
router: seconds until the end of an answer (median and 99th percentile), tokens/s of all clients, and the share of
prompt tokens that prefix caches had.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import statistics
from collections.abc import Iterator
from typing import Any

import httpx

from scripts.arguments import add_numbers
from scripts.bench.machine import describe_machine
from scripts.bench.prompts import questions
from scripts.bench.serve import Level, Server, measure, percentile
from scripts.bench.tables import table

LONG, REPEATED = 0.3, 0.4
"""Shares of requests that have a long prompt and a long answer, and that repeat an earlier prompt."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_numbers(
        parser,
        ("--replicas", 2, 1, "replicas"),
        ("--clients", 16, 1, "requests at the same time"),
        ("--requests", 160, 1, "requests of each turn"),
        ("--turns", 3, 1, "turns of each router"),
    )


def mixed_bodies(count: int, dice: random.Random) -> list[dict[str, Any]]:
    """Chat requests: short and long ones, under two system prompts, some of which come again."""
    problems = itertools.cycle(questions())
    bodies: list[dict[str, Any]] = []
    systems = [" ".join(itertools.islice(problems, 4)) for _ in range(2)]
    for _ in range(count):
        if bodies and dice.random() < REPEATED:
            bodies.append(dice.choice(bodies))
            continue
        is_long = dice.random() < LONG
        question = " ".join(itertools.islice(problems, 6 if is_long else 1))
        messages = [{"role": "system", "content": dice.choice(systems)}, {"role": "user", "content": question}]
        length = {"max_tokens": 192 if is_long else 24, "ignore_eos": True}
        bodies.append({"messages": messages, "stream": True, "stream_options": {"include_usage": True}, **length})
    return bodies


def _cells(name: str, levels: list[Level], hits: float) -> list[str]:
    def middle(values: Iterator[float]) -> str:
        found = [*values]
        return f"{statistics.median(found):.2f} ({min(found):.2f} to {max(found):.2f})"

    times = [[answer.seconds for answer in level.answers] for level in levels]
    tokens = [sum(answer.tokens for answer in level.answers) / level.seconds for level in levels]
    p50, p99 = (middle(percentile(seconds, share) for seconds in times) for share in (0.5, 0.99))
    return [name, p50, p99, f"{statistics.median(tokens):.0f}", f"{100 * hits:.0f} %"]


def run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    try:
        from scripts.bench.routers import ROUTERS, deployed  # Ray takes long to import
    except ModuleNotFoundError as error:
        parser.error(f"{error}; pip install 'ray[serve]'")
    levels: dict[str, list[Level]] = {name: [] for name in ROUTERS}
    hits = dict.fromkeys(ROUTERS, 0.0)
    for turn in range(args.turns):
        bodies = mixed_bodies(args.requests, random.Random(turn))
        for name, router in ROUTERS.items():
            with deployed(args.replicas, router) as url:
                levels[name].append(asyncio.run(measure(Server(url), bodies, args.clients)))
                hits[name] += _prefix_hits(url) / args.turns
    print(describe_machine())
    columns = ("router", "answer p50, s", "answer p99, s", "tokens/s", "prefix hits")
    print(table(columns, (_cells(name, levels[name], hits[name]) for name in ROUTERS)))
    return 0


def _prefix_hits(url: str) -> float:
    """The share of prompt tokens that were found in prefix caches."""
    lines = httpx.get(f"{url}/metrics").text.splitlines()

    def total(name: str) -> float:
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name + "_total{"))

    return total("vllm:prefix_cache_hits") / max(1.0, total("vllm:prefix_cache_queries"))
