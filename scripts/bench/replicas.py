"""Applications on Ray Serve to compare the server's own with: `serve run` builds them.

Stand-ins for engines answer at an engine's pace and compute nothing: how much can the rest of a server do? Only the
engine's end of each link is another one. The other application has the server's engines, and a router that takes each
in its turn.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import zmq
import zmq.asyncio
from ray import serve
from ray.serve.request_router import PendingRequest, RunningReplica

from lopa_ascend.admission import Limits
from lopa_ascend.config import EngineConfig
from lopa_ascend.core import Request
from lopa_ascend.demo import DEMO_MODEL
from lopa_ascend.engine.commands import Abort
from lopa_ascend.serve.cli import config_of
from lopa_ascend.serve.config import ServeConfig
from lopa_ascend.serve.link.messages import FromEngine, Ready, Stepped, ToEngine
from lopa_ascend.serve.link.spawn import EngineProcess
from lopa_ascend.serve.replicas import app, replica
from lopa_ascend.serve.replicas.placement import ReplicaPlacement
from lopa_ascend.serve.replicas.replica import Replica
from lopa_ascend.serve.replicas.router import FewestTokens
from lopa_ascend.types import EngineStats, TokenRun, Update

STEP, TOKENS = 0.036, 10
"""Seconds of a step, and what each request gets in it. An answer of 40 tokens then takes as long, and comes in as many
pieces, as one client has measured with the bundled model (docs/results.md, Server)."""
HEARTBEAT = 1.0
"""Seconds between messages while there is nothing to do."""
TOKEN = 70
"""The token that every answer repeats."""


@dataclass
class _Running:
    left: int
    """Tokens that are still to come."""
    passes: int = 0


class PacedEngine(EngineProcess):
    """Has the interface of an engine process, and no process.

    Args:
        config: of the engine that it stands for.
    """

    def __init__(self, config: EngineConfig):
        super().__init__(zmq.asyncio.Context.instance().socket(zmq.PAIR))
        self._max_num_seqs = config.max_num_seqs
        self._requests: dict[str, _Running] = {}
        """In the order in which they came: the first ``max_num_seqs`` run."""
        self._news = asyncio.Event()

    @classmethod
    async def start(cls, config: EngineConfig) -> tuple[EngineProcess, Ready]:
        model = json.loads((DEMO_MODEL / "config.json").read_text("utf-8"))
        limits = Limits(
            vocab_size=model["vocab_size"],
            mask_token_id=model["mask_token_id"],
            max_model_len=model["max_position_embeddings"],
            num_pages=4096,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens or 8192,
            max_num_branches=config.max_num_branches,
        )
        return cls(config), Ready(limits, "demo", "float32", "cpu", kv_cache_memory=0, seed=0, ranks=())

    def send(self, message: ToEngine) -> None:
        if isinstance(message, Request):
            self._requests[message.request_id] = _Running(message.params.max_new_tokens)
        elif isinstance(message, Abort):
            self._requests.pop(message.request_id, None)
        self._news.set()

    async def receive(self) -> FromEngine:
        if not self._requests:
            self._news.clear()
            try:
                await asyncio.wait_for(self._news.wait(), HEARTBEAT)
            except asyncio.TimeoutError:
                return Stepped([], self._stats())
        await asyncio.sleep(STEP)
        return Stepped([self._advance(name) for name in list(self._requests)[: self._max_num_seqs]], self._stats())

    def _advance(self, name: str) -> Update:
        request = self._requests[name]
        new, request.passes = min(TOKENS, request.left), request.passes + 1
        request.left -= new
        if request.left == 0:
            del self._requests[name]
        return Update(
            name,
            TokenRun((TOKEN,) * new, (1.0,) * new),
            num_forwards=request.passes,
            num_positions=request.passes * TOKENS,
            model_tokens=request.passes * TOKENS,
            winner=0,
            cached_tokens=0,
            finish_reason=None if request.left else "length",
        )

    def _stats(self) -> EngineStats:
        running = min(len(self._requests), self._max_num_seqs)
        return EngineStats(running, len(self._requests) - running, 0, 0, 4096)

    async def wait(self) -> None:
        await asyncio.Event().wait()


class StandIn(Replica):
    """A replica with such an engine."""

    async def __init__(self, config: ServeConfig, placement: ReplicaPlacement):  # type: ignore[misc]  # Serve awaits it
        with patch.object(replica, "EngineProcess", PacedEngine):
            await super().__init__(config, placement)


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


def round_robin(args: Mapping[str, Any]) -> serve.Application:
    """The application of ``app.build`` with this router."""
    return app.application([config_of(dict(args), "bench")], RoundRobin)


def stand_ins(args: Mapping[str, Any]) -> serve.Application:
    """The application of ``app.build`` with stand-ins for its replicas."""
    with patch.object(app, "Replica", StandIn):
        return app.build(args)
