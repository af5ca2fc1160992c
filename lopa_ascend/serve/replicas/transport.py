"""The replicas of one model as the client of an engine sees them: one engine that can lose requests."""

from __future__ import annotations

import asyncio
import contextlib

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from lopa_ascend.core import Request
from lopa_ascend.engine.commands import Abort
from lopa_ascend.serve.link.messages import (
    FromEngine,
    Left,
    Lost,
    Ready,
    Stepped,
    ToEngine,
    decode_from_engine,
    encode_message,
)
from lopa_ascend.serve.replicas.reports import reported
from lopa_ascend.types import ModelProperties

HEARTBEAT = 1.0
"""Seconds between messages about the replicas."""
SHARED_TOKENS = 256
"""If prompts of a block-causal model share so many first tokens, they are likely to share a system prompt."""


class Replicas:
    """The way to replicas behind the router ``FewestTokens``. Made by ``connect``; ``close`` must follow."""

    def __init__(self, handle: DeploymentHandle, properties: ModelProperties):
        # The prefix cache knows whole prompts, or their beginnings if nothing behind these changes them.
        self._prefix = SHARED_TOKENS if properties.has_blocks else None
        self._generate = handle.generate.options(stream=True)
        self._name = handle.deployment_name
        self._messages: asyncio.Queue[FromEngine] = asyncio.Queue()
        self._choices: dict[str, asyncio.Task[None]] = {}
        self._known: set[str] = set()
        """Replicas that the client knows."""
        self._closed = asyncio.Event()
        self._reporting = asyncio.create_task(self._report())

    @classmethod
    async def connect(cls, handle: DeploymentHandle) -> tuple[Replicas, Ready]:
        """Waits until a replica has loaded the model."""
        ready = decode_from_engine(await handle.describe.remote())
        assert isinstance(ready, Ready), ready
        return cls(handle, ready.limits.properties), ready

    def send(self, message: ToEngine) -> None:
        """Gives a choice to some replica, or ends one."""
        if isinstance(message, Request):
            self._choices[message.request_id] = asyncio.create_task(self._run(message))
        elif isinstance(message, Abort) and (task := self._choices.pop(message.request_id, None)) is not None:
            task.cancel()

    async def _run(self, asked: Request) -> None:
        """Passes on what a replica generates; says so if the replica ends."""
        length, engine = len(asked.prompt), ""
        prefix = asked.prompt[: self._prefix]
        stream = self._generate.remote(
            encode_message(asked),
            tokens=length + asked.params.max_new_tokens,
            prompt=(hash(prefix), len(prefix)),
        )
        try:
            async for data in stream:
                message = decode_from_engine(data)
                assert isinstance(message, Stepped), message
                engine = message.engine
                self._known.add(engine)
                self._messages.put_nowait(message)
        except (RayError, RayServeException) as error:
            reason = type(error).__name__
            self._messages.put_nowait(Lost(asked.request_id, engine, f"the engine of the request has ended ({reason})"))
        finally:
            stream.cancel()
            if self._choices.get(asked.request_id) is asyncio.current_task():
                del self._choices[asked.request_id]

    async def _report(self) -> None:
        """Says once a second which replicas there are, and how they are."""
        while True:
            board = reported.get(self._name, {})
            for name in self._known - board.keys():  # one that ends may still have sent something since
                self._messages.put_nowait(Left(name))
            self._known = set(board)
            for stats in board.values():
                if stats:
                    self._messages.put_nowait(decode_from_engine(stats["stats"]))
            await asyncio.sleep(HEARTBEAT)

    async def receive(self) -> FromEngine:
        return await self._messages.get()

    async def wait(self) -> None:
        await self._closed.wait()

    @property
    def ending(self) -> str | None:
        """Ray starts replicas again, so they end together only when told to."""
        return "it was ended" if self._closed.is_set() else None

    def kill(self) -> None:
        self._closed.set()
        for task in (self._reporting, *self._choices.values()):
            task.cancel()

    async def close(self) -> None:
        self.kill()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reporting
