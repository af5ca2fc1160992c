"""A replica: one engine, whose ranks are actors in a placement group."""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import ray
from ray import serve
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

import lopa_ascend
from lopa_ascend.backend import find_device
from lopa_ascend.config import EngineConfig, ParameterError
from lopa_ascend.core import Request
from lopa_ascend.engine.commands import Abort
from lopa_ascend.hub import on_this_machine
from lopa_ascend.parallel.launch import LOCALHOST, RankProcess, Rendezvous, follower_command, free_port
from lopa_ascend.serve.config import ServeConfig
from lopa_ascend.serve.link.messages import Stepped, decode_to_engine, encode_message
from lopa_ascend.serve.link.spawn import ChildProcess, EngineFailed, EngineProcess
from lopa_ascend.serve.replicas.placement import ReplicaPlacement, actor_options
from lopa_ascend.types import EngineStats, Update

FIRST_HCCL_PORT, HCCL_PORTS = 60000, 32
"""Ports that HCCL takes on the host for each engine."""


def versions() -> dict[str, str]:
    """The same on all ranks of an engine."""
    return {"lopa_ascend": lopa_ascend.__version__, "torch": importlib.metadata.version("torch")}


def _own_dies(config: EngineConfig) -> list[str]:
    """The dies or GPUs that Ray has given to this actor."""
    by_kind = ray.get_runtime_context().get_accelerator_ids()
    return [str(die) for die in by_kind.get(find_device(config.device).resource, [])]


def _rank_environment(
    rank: int, config: EngineConfig, placement: ReplicaPlacement, host: str, port: int
) -> dict[str, str]:
    """Ray shows each actor its own die alone, which is number 0 there."""
    environment = Rendezvous(rank, config.world_size, host, port, placement.nodes == 1).environment()
    local_size = config.world_size // placement.nodes
    return environment | {
        "LOCAL_RANK": "0" if _own_dies(config) else str(rank % local_size),
        "LOCAL_WORLD_SIZE": str(local_size),
    }


class Rank:
    """The actor of a rank other than 0. Its process ends with it."""

    async def versions(self) -> dict[str, str]:
        return versions()

    async def run(self, rank: int, config: EngineConfig, placement: ReplicaPlacement, host: str, port: int) -> int:
        """Returns the rank's exit status."""
        config = await asyncio.to_thread(on_this_machine, config)
        environment = os.environ | _rank_environment(rank, config, placement, host, port)
        process = ChildProcess(RankProcess(follower_command(config, ends_with_stdin=True), environment))
        await process.ended.wait()
        return process.wait()


class _Running:
    def __init__(self, tokens: int):
        self.tokens = tokens
        """Of its prompt and, at most, of its answer."""
        self.updates: list[Update] = []
        self.news = asyncio.Event()


class Replica:
    """The deployment of a model: each replica is one engine, and its own actor has rank 0. Raises EngineFailed if the
    engine cannot serve the model, or ranks have different versions."""

    async def __init__(self, config: ServeConfig, placement: ReplicaPlacement):  # type: ignore[misc]  # Serve awaits it
        self._watchdog_timeout = config.watchdog_timeout
        self._name = serve.get_replica_context().replica_id.unique_id
        self._choices: dict[str, _Running] = {}
        self._ranks = await _start_ranks(config.engine, placement) if config.engine.world_size > 1 else []
        try:
            engine = await asyncio.to_thread(on_this_machine, config.engine)
        except ParameterError as error:
            raise EngineFailed(str(error)) from error
        self._engine, ready = await EngineProcess.start(engine)
        self._ready = encode_message(ready)
        self._stats = EngineStats(0, 0, 0, 0, ready.limits.num_pages)
        self._last_message = time.monotonic()
        self._report: dict[str, Any] = {"report": 0}
        self._tasks = [asyncio.create_task(self._pump()), asyncio.create_task(self._end_with_engine())]

    async def _pump(self) -> None:
        while True:
            message = await self._engine.receive()
            assert isinstance(message, Stepped), message
            self._last_message, self._stats = time.monotonic(), message.stats
            for update in message.updates:
                if (choice := self._choices.get(update.request_id)) is not None:
                    choice.updates.append(update)
                    choice.news.set()

    async def _end_with_engine(self) -> None:
        """Ray then fails the calls to this actor at once, and starts another replica."""
        await asyncio.wait([self._tasks[0], asyncio.create_task(self._engine.wait())], return_when="FIRST_COMPLETED")
        sys.stderr.write(f"replica {self._name} ends: its engine has ended ({self._engine.ending})\n")
        sys.stderr.flush()
        self._engine.kill()
        os._exit(1)

    async def describe(self) -> bytes:
        """``Ready``, as a message."""
        return self._ready

    async def generate(self, message: bytes, tokens: int, prompt: tuple[int, int]) -> AsyncIterator[bytes]:
        """Generates a choice; ends it if the caller goes away. Yields ``Stepped`` messages.

        The router reads ``tokens``, of the prompt and at most of the answer, and ``prompt``: a number that prompts with
        common cached tokens share, and how many these are.
        """
        asked = decode_to_engine(message)
        assert isinstance(asked, Request), asked
        name = asked.request_id
        if name in self._choices:  # a caller that has lost this replica for a moment begins again
            self._engine.send(Abort(name))
        choice = self._choices[name] = _Running(tokens)
        self._engine.send(asked)
        is_finished = False
        try:
            while not is_finished:
                await choice.news.wait()
                choice.news.clear()
                updates, choice.updates = choice.updates, []
                is_finished = any(update.finish_reason is not None for update in updates)
                yield encode_message(Stepped(updates, self._stats, self._name))
        finally:
            if self._choices.get(name) is choice:
                del self._choices[name]
                if not is_finished:
                    self._engine.send(Abort(name))

    def record_routing_stats(self) -> dict[str, Any]:
        """For the routers, about once a second: the tokens that wait and run, and the engine's stats as a message."""
        tokens = sum(choice.tokens for choice in self._choices.values())
        now = {"tokens": tokens, "stats": encode_message(Stepped([], self._stats, self._name))}
        if now != {name: self._report.get(name) for name in now}:
            self._report = {"report": self._report["report"] + 1, **now}
        return self._report

    def check_health(self) -> None:
        """Called by Ray about once a second; raises if the engine is silent."""
        silence = time.monotonic() - self._last_message
        if silence > self._watchdog_timeout:
            raise EngineFailed(
                f"the engine has been silent for {silence:.0f} s (watchdog timeout: {self._watchdog_timeout:g} s)"
            )


async def _start_ranks(config: EngineConfig, placement: ReplicaPlacement) -> list[Any]:
    """Starts the actors of the other ranks, which end with what is returned, and makes this process rank 0. Raises
    EngineFailed if one has other versions."""
    host, port = LOCALHOST if placement.nodes == 1 else ray.util.get_node_ip_address(), free_port()
    if dies := _own_dies(config):
        os.environ["HCCL_IF_BASE_PORT"] = str(FIRST_HCCL_PORT + HCCL_PORTS * min(map(int, dies)))
    group, actors = ray.util.get_current_placement_group(), []
    for rank in range(1, config.world_size):
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank // placement.per_node)
        environment = {name: os.environ[name] for name in ("HCCL_IF_BASE_PORT",) if name in os.environ}
        options = actor_options(config) | {"scheduling_strategy": strategy, "runtime_env": {"env_vars": environment}}
        actors.append(ray.remote(Rank).options(**options).remote())
    own = versions()
    for rank, found in enumerate(await asyncio.gather(*(actor.versions.remote() for actor in actors)), start=1):
        for package in own:
            if found[package] != own[package]:
                raise EngineFailed(
                    f"rank {rank} has {package} {found[package]}, and rank 0 has {package} {own[package]}; install the "
                    "same version on every node"
                )
    os.environ.update(_rank_environment(0, config, placement, host, port))
    return [
        (actor, actor.run.remote(rank, config, placement, host, port)) for rank, actor in enumerate(actors, start=1)
    ]
