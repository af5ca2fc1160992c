"""The routers that `bench routing` compares, and deployments with them."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import ray
from ray import serve
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from lopa_ascend.parallel.launch import LOCALHOST, free_port
from lopa_ascend.serve.cli import config_of
from lopa_ascend.serve.replicas.app import APP, application
from lopa_ascend.serve.replicas.router import FewestTokens


class RoundRobin(FewestTokens):
    """Each replica in its turn. What replicas report comes through the router all the same."""

    def initialize_state(self, prefixes: bool = False) -> None:
        super().initialize_state(prefixes)
        self._turns = itertools.count()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if not candidate_replicas:
            return []
        first = next(self._turns) % len(candidate_replicas)
        return [[replica] for replica in candidate_replicas[first:] + candidate_replicas[:first]]


PORT = free_port()
ROUTERS = {"round robin": RoundRobin, "fewest tokens": FewestTokens}


@contextmanager
def deployed(replicas: int, router: type[RequestRouter]) -> Iterator[str]:
    """The address of new replicas of the bundled model behind this router, all of which have reported."""
    if not ray.is_initialized():
        address = os.environ.get("RAY_ADDRESS", "local")
        cluster = {} if "RAY_ADDRESS" in os.environ else {"include_dashboard": False}
        ray.init(address, log_to_driver=False, logging_level="error", **cluster)
        serve.start(proxy_location="HeadOnly", http_options={"host": LOCALHOST, "port": PORT})
    serve.run(application([config_of({"replicas": replicas}, "bench")], router), name=APP)
    url = f"http://{LOCALHOST}:{PORT}"
    while f'lopa:engines{{model_name="demo"}} {replicas}.0' not in httpx.get(f"{url}/metrics", timeout=60).text:
        time.sleep(0.5)
    yield url
    serve.delete(APP)
