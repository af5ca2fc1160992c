"""A deployment on a cluster of two simulated nodes, its clients, and the faults that tests cause."""

import asyncio
import json
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import ray
from ray import serve
from ray.cluster_utils import Cluster

from lopa_ascend.demo import HELD_OUT
from lopa_ascend.parallel.launch import LOCALHOST, free_port
from lopa_ascend.serve.replicas.app import APP, build
from tests.replicas.processes import ENGINE, RANK, below, kill

CPUS = 4
"""Of each node."""
NODE = {
    "num_cpus": CPUS,
    "node_ip_address": LOCALHOST,
    "object_store_memory": 2**27,
    "dashboard_agent_listen_port": None,  # any: another cluster of this machine may have the usual one
}
CLIENTS = 24
ANSWER_TIME = 120.0
"""Seconds after which a request counts as hanging."""
FAULTS = ("engine", "rank", "actor", "node", "ingress")


class Deployment:
    """A running deployment of the bundled model."""

    def __init__(self, cluster: Cluster, url: str, replicas: int):
        self.cluster, self.url, self.replicas = cluster, url, replicas
        self.worker = next(iter(cluster.worker_nodes))

    def metrics(self, name: str) -> dict[str, float]:
        """The samples of a metric in one scrape, by their labels."""
        text = httpx.get(f"{self.url}/metrics", timeout=30).text
        samples = [line.rpartition(" ") for line in text.splitlines() if line.startswith(name + "{")]
        return {labels.removeprefix(name): float(value) for labels, _, value in samples}

    def engines(self) -> int:
        """How many replicas the ingress has."""
        try:
            return int(sum(self.metrics("lopa:engines").values()))
        except httpx.HTTPError:
            return 0

    def wait_until_whole(self, seconds: float = 180) -> None:
        """Waits until all replicas are there, and none that has ended is counted."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            status = serve.status().applications.get(APP)
            if status is not None and status.status == "RUNNING" and self.engines() == self.replicas:
                return
            time.sleep(1)
        raise AssertionError(f"{self.engines()} of {self.replicas} replicas after {seconds} s: {serve.status()}")

    def cause(self, fault: str, dice: random.Random) -> None:
        """Ends something without warning."""
        if fault == "node":
            self.cluster.remove_node(self.worker, allow_graceful=False)
            self.worker = self.cluster.add_node(**NODE)
            return
        name = {"engine": ENGINE, "rank": RANK, "actor": "ray::ServeReplica:lopa:demo", "ingress": "lopa:Ingress"}[
            fault
        ]
        kill(dice.choice(below(os.getpid(), name)))


@contextmanager
def deployed(replicas: int, **flags: Any) -> Iterator[Deployment]:
    """The bundled model on two nodes, as `serve run` would deploy it."""
    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    try:
        cluster.add_node(**NODE)
        ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
        port = free_port()
        serve.start(proxy_location="HeadOnly", http_options={"host": LOCALHOST, "port": port})
        serve.run(build({"replicas": replicas, **flags}), name=APP)
        deployment = Deployment(cluster, f"http://{LOCALHOST}:{port}", replicas)
        deployment.wait_until_whole()
        yield deployment
    finally:
        ray.shutdown()
        cluster.shutdown()


# ---- clients ---------------------------------------------------------------------------------------------------------


@dataclass
class Outcomes:
    """How requests ended."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    """What no client may see."""
    slowest: float = 0.0
    """Seconds."""


def questions() -> list[str]:
    with HELD_OUT.open(encoding="utf-8") as lines:
        return [json.loads(line)["question"] for line, _ in zip(lines, range(8), strict=False)]


async def ask(http: httpx.AsyncClient, question: str, stream: bool) -> tuple[str, str]:
    """Sends one request of 192 tokens.

    Returns:
        "ok" and the text; or "event" (an error event after a part of the answer), "status" or "broken", and what came.
    """
    body = {
        "messages": [{"role": "user", "content": question}],
        "max_tokens": 192,
        "ignore_eos": True,
        "stream": stream,
    }
    text, events = "", 0
    try:
        async with http.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                return "status", f"{response.status_code} {(await response.aread()).decode()[:300]}"
            if not response.headers.get("x-request-id"):
                return "wrong", "an answer without a request id"
            if not stream:
                return "ok", json.loads(await response.aread())["choices"][0]["message"]["content"]
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    return "ok", text
                event = json.loads(line.removeprefix("data: ")) if line else {"choices": []}
                if "error" in event:
                    code = event["error"]["code"]
                    return ("event" if events and code == "engine_dead" else "wrong"), f"{events} events, then {event}"
                for choice in event["choices"]:
                    text += choice["delta"].get("content") or ""
                    events += bool(choice["delta"].get("content"))
    except httpx.TimeoutException:
        return "wrong", f"no answer in {ANSWER_TIME} s"
    except httpx.HTTPError as error:
        return "broken", repr(error)
    return "broken", "the stream ended without [DONE]"


async def load(url: str, expected: dict[str, str], until: threading.Event, clients: int = CLIENTS) -> Outcomes:
    """Clients that ask one question after another, each until the event. Half of the requests are streamed."""
    outcomes = Outcomes()

    async def client(number: int) -> None:
        dice = random.Random(number)
        while not until.is_set():
            question, began = dice.choice(list(expected)), time.monotonic()
            kind, text = await ask(http, question, stream=dice.random() < 0.5)
            if kind == "ok" and text != expected[question]:
                kind, text = "wrong", f"another answer: {text!r}"
            outcomes.counts[kind] += 1
            outcomes.slowest = max(outcomes.slowest, time.monotonic() - began)
            if kind not in ("ok", "event"):
                outcomes.wrong.append(f"{kind}: {text}")
                await asyncio.sleep(0.2)

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=ANSWER_TIME, limits=limits) as http:
        await asyncio.gather(*(client(number) for number in range(clients)))
    return outcomes


async def answers(url: str) -> dict[str, str]:
    """The answers of a deployment that nothing happens to."""
    async with httpx.AsyncClient(base_url=url, timeout=ANSWER_TIME) as http:
        found = {question: await ask(http, question, stream=False) for question in questions()}
    assert {kind for kind, _ in found.values()} == {"ok"}, found
    return {question: text for question, (_, text) in found.items()}


def survive(deployment: Deployment, fault: str, dice: random.Random, expected: dict[str, str]) -> Outcomes:
    """Causes a fault under load, and waits until the deployment is whole again."""

    until = threading.Event()
    with ThreadPoolExecutor(1) as threads:  # Ray starts nodes in the main thread alone
        clients = threads.submit(lambda: asyncio.run(load(deployment.url, expected, until)))
        try:
            time.sleep(2 + dice.random())
            deployment.cause(fault, dice)
            time.sleep(3)  # until Ray has noticed it
            deployment.wait_until_whole()
        finally:
            until.set()
        outcomes = clients.result()
    if fault == "ingress":  # what it was answering has no other way back to its clients
        outcomes.wrong = [text for text in outcomes.wrong if text.startswith("wrong")]
    return outcomes
