"""Several ranks as one engine: rank 0 hears of requests and tells the others; all of them step together.

A step's message from rank 0 is eight bytes, and what arrived since the last one behind them. While nothing happens the
same message goes out each second, so that no rank waits longer than the time after which it gives another one up.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import partial
from types import TracebackType

import msgspec
import torch
from torch._C._distributed_c10d import TCPStore

from lopa_ascend.config import DecodingParams, EngineConfig
from lopa_ascend.engine.commands import Abort, Command, Generate
from lopa_ascend.engine.engine import Engine
from lopa_ascend.parallel.collectives import Group, RankError
from lopa_ascend.parallel.launch import LOCALHOST, Rendezvous, follower_command, rank_in_environment, share_cores
from lopa_ascend.parallel.mesh import Mesh
from lopa_ascend.types import Update

HEARTBEAT = 1.0
"""Seconds."""


class _Kind(IntEnum):
    """What the others do after they took the commands in: step, go on waiting, or end."""

    STEP = 0
    WAIT = 1
    END = 2


def _send(world: Group, kind: _Kind, commands: Sequence[Command]) -> None:
    body = msgspec.msgpack.encode(commands) if commands else b""
    world.broadcast(torch.tensor([len(body) << 2 | kind]), 0, "control")
    if body:
        world.broadcast(torch.frombuffer(bytearray(body), dtype=torch.uint8), 0, "control")


def _receive(world: Group) -> tuple[_Kind, list[Command]]:
    header = int(world.broadcast(torch.zeros(1, dtype=torch.int64), 0, "control"))
    if not header >> 2:
        return _Kind(header & 3), []
    body = world.broadcast(torch.empty(header >> 2, dtype=torch.uint8), 0, "control")
    return _Kind(header & 3), msgspec.msgpack.decode(body.numpy().tobytes(), type=list[Command])


class LeadingEngine(Engine):
    """Rank 0's engine. Whatever it is asked reaches the others before the next step. ``followers``: the processes of
    the other ranks, if it is to end them.

    ``add``, ``abort`` and ``step`` raise RankError once the ranks cannot go on.
    """

    def __init__(self, config: EngineConfig, mesh: Mesh, followers: Sequence[subprocess.Popen[bytes]] = ()):
        super().__init__(config, mesh)
        self._followers = followers
        self._outbox: list[Command] = []
        self._trouble: str | None = None
        # Reentrant: an abandoned stream may be collected, and so aborted, in the middle of a step.
        self._turn = threading.RLock()
        self._told = time.monotonic()
        self._closed = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._heart.start()
        atexit.register(self.close)  # the others must not take the end of a script for a failure

    def add(self, request_id: str, prompt: Sequence[int], params: DecodingParams, *, trace: bool = False) -> None:
        self._check()
        with self._turn:
            super().add(request_id, prompt, params, trace=trace)
            self._outbox.append(Generate(request_id, list(prompt), params, trace))

    def abort(self, request_id: str) -> bool:
        with self._turn:
            found = super().abort(request_id)
            if found:
                self._outbox.append(Abort(request_id))
        return found

    def step(self) -> list[Update]:
        self._check()
        with self._turn:
            # Whatever ends a step early, Ctrl-C too, leaves the ranks in different places.
            self._trouble = "a step was broken off"
            self._tell(_Kind.STEP)
            updates = super().step()
            self._trouble = None
        return updates

    def close(self, failure: str | None = None) -> None:
        """Ends the other ranks."""
        if self._closed.is_set():
            return
        self._closed.set()
        atexit.unregister(self.close)
        self._heart.join()
        try:
            if self._trouble is None and self.mesh.failure is None:
                self._tell(_Kind.END)
        except RankError:
            pass  # then there is nobody left to end
        super().close(failure)
        end_processes(self._followers)

    def _check(self) -> None:
        trouble = self.mesh.failure or self._trouble
        if trouble is not None:
            raise RankError(f"this engine has ended: {trouble}")

    def _tell(self, kind: _Kind) -> None:
        commands, self._outbox = self._outbox, []
        _send(self.mesh.world, kind, commands)
        self._told = time.monotonic()

    def _beat(self) -> None:
        while not self._closed.wait(HEARTBEAT / 4):
            with self._turn:
                if time.monotonic() - self._told >= HEARTBEAT and self._trouble is None and self.mesh.failure is None:
                    try:
                        self._tell(_Kind.WAIT)
                    except RankError as error:
                        self._trouble = str(error)


def follow(engine: Engine) -> None:
    """Does on another rank what rank 0 does, until it ends.

    Raises:
        RankError: the ranks cannot go on.
    """
    while True:
        kind, commands = _receive(engine.mesh.world)
        for command in commands:
            if isinstance(command, Generate):
                engine.add(command.request_id, command.prompt_token_ids, command.params, trace=command.trace)
            else:
                engine.abort(command.request_id)
        if kind is _Kind.END:
            return
        if kind is _Kind.STEP:
            engine.step()


class _Followers:
    """Processes of the other ranks, ended if the block around them fails."""

    def __init__(self, config: EngineConfig, port: int):
        self.processes: list[subprocess.Popen[bytes]] = []
        command = follower_command(config, with_parent=True)
        for rank in range(1, config.world_size):
            environment = os.environ | Rendezvous.on_this_machine(rank, config.world_size, port).environment()
            # Ctrl-C in a terminal is for this process alone.
            process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, start_new_session=True)
            self.processes.append(process)

    def __enter__(self) -> _Followers:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, _: TracebackType | None) -> None:
        if kind is not None:
            end_processes(self.processes)

    def check(self) -> None:
        """Raises:
        RankError: one has ended.
        """
        for rank, process in enumerate(self.processes, start=1):
            if process.poll() is not None:
                raise RankError(f"rank {rank} ended while it started, with status {process.returncode}")


def end_processes(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ends them at once: they hold nothing that is worth saving."""
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()
        assert process.stdin is not None
        process.stdin.close()


def start_local_ranks(config: EngineConfig) -> Engine:
    """Starts the other ranks as processes of this machine, and leads them.

    Raises:
        What `Engine` does; RankError: a rank ended while it started.
    """
    config = share_cores(config)
    store = TCPStore(LOCALHOST, 0, is_master=True, wait_for_workers=False)
    rendezvous = Rendezvous.on_this_machine(0, config.world_size, store.port)
    with _Followers(config, store.port) as followers:
        mesh = Mesh.join(config, rendezvous, lambda message: None, store, followers.check)
        return _begin(partial(LeadingEngine, followers=followers.processes), config, mesh)


def lead(config: EngineConfig, on_failure: Callable[[str], None]) -> Engine:
    """The engine of this process, which is alone, or rank 0 of ranks that somebody else starts. ``on_failure`` is
    called in a thread when a rank has ended or hangs.

    Raises:
        What `Engine` does; RankError: the others did not come.
    """
    if config.world_size == 1:
        return Engine(config)
    return _begin(LeadingEngine, config, Mesh.join(config, Rendezvous.from_environment(), on_failure))


def start_engine(config: EngineConfig) -> Engine:
    """The engine of this process: alone, one of the ranks that torchrun started, all of which must be asked the same,
    or rank 0 of ranks that are started now.

    Raises:
        What `Engine` does; RankError: a rank ended while it started.
    """
    if config.world_size == 1:
        return Engine(config)
    if rank_in_environment() is None:
        return start_local_ranks(config)
    return _begin(Engine, config, Mesh.join(config, Rendezvous.from_environment(), lambda message: None))


def _begin(kind: Callable[[EngineConfig, Mesh], Engine], config: EngineConfig, mesh: Mesh) -> Engine:
    """The engine, or a mesh that was left for the failure to make it."""
    try:
        return kind(config, mesh)
    except BaseException as error:
        mesh.close(None if mesh.start_refused else f"it could not start ({type(error).__name__})")
        raise
