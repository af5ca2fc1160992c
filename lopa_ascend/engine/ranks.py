"""Runs several ranks as one engine: rank 0 receives the requests and tells the other ranks; all step together.

Before each step rank 0 broadcasts eight bytes, followed by the commands that have arrived since the last message.
While there is nothing to do it sends such a message every second: a rank that waited longer in a collective would take
rank 0 for dead.
"""

from __future__ import annotations

import atexit
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import partial
from types import TracebackType

import msgspec
import torch

from lopa_ascend.config import DecodingParams, EngineConfig
from lopa_ascend.engine.commands import Abort, Command, Generate
from lopa_ascend.engine.engine import Engine
from lopa_ascend.parallel.collectives import Group, RankError
from lopa_ascend.parallel.launch import (
    LOCALHOST,
    Rendezvous,
    explain_exit,
    kill_running,
    local_rank_processes,
    rank_in_environment,
    share_cores,
)
from lopa_ascend.parallel.mesh import Mesh
from lopa_ascend.parallel.store import serve_store
from lopa_ascend.types import Update

HEARTBEAT = 1.0
"""Seconds between two messages of rank 0 while there is nothing to do."""


# ---- messages of rank 0 ----------------------------------------------------------------------------------------------


class _Kind(IntEnum):
    """What the other ranks do once they have applied the message's commands."""

    STEP = 0
    """Make a step."""
    WAIT = 1
    """Wait for the next message."""
    END = 2
    """End."""


def _send_message(world: Group, kind: _Kind, commands: Sequence[Command]) -> None:
    """Broadcasts a message: an int64 header, and if there are commands, these as msgpack.

    The header is (bytes of the commands) * len(_Kind) + kind.
    """
    body = msgspec.msgpack.encode(commands) if commands else b""
    world.broadcast(torch.tensor([len(body) * len(_Kind) + kind]), 0, "control")
    if body:
        world.broadcast(torch.frombuffer(bytearray(body), dtype=torch.uint8), 0, "control")


def _receive_message(world: Group) -> tuple[_Kind, list[Command]]:
    """Takes part in the broadcast of ``_send_message``; returns what rank 0 has sent."""
    header = int(world.broadcast(torch.zeros(1, dtype=torch.int64), 0, "control"))
    num_bytes, kind = divmod(header, len(_Kind))
    if not num_bytes:
        return _Kind(kind), []
    body = world.broadcast(torch.empty(num_bytes, dtype=torch.uint8), 0, "control")
    return _Kind(kind), msgspec.msgpack.decode(body.numpy().tobytes(), type=list[Command])


# ---- rank 0 and the others -------------------------------------------------------------------------------------------


class LeadingEngine(Engine):
    """The engine of rank 0: sends each request and abort to the other ranks before the next step.

    ``add`` and ``step`` raise RankError once the ranks cannot go on, or the engine was closed.

    Args:
        config: the engine's configuration.
        mesh: the ranks.
        followers: the processes of the other ranks that ``close`` must end; empty if another process started them.
    """

    def __init__(self, config: EngineConfig, mesh: Mesh, followers: Sequence[subprocess.Popen[bytes]] = ()):
        super().__init__(config, mesh)
        self._followers = followers
        self._outbox: list[Command] = []
        """Commands that the other ranks have not received yet."""
        # Reentrant: an abandoned stream may be collected, and so aborted, in the middle of another call.
        self._lock = threading.RLock()
        self._last_message = time.monotonic()
        self._closed = threading.Event()
        self._heartbeat = threading.Thread(target=self._send_heartbeats, name="heartbeat", daemon=True)
        self._heartbeat.start()
        atexit.register(self.close)  # the others must not take the end of a script for a failure

    def add(self, request_id: str, prompt: Sequence[int], params: DecodingParams, *, trace: bool = False) -> None:
        """Queues a request on every rank, as ``Engine.add`` does on one."""
        with self._lock:
            super().add(request_id, prompt, params, trace=trace)
            drawn = self.scheduler.waiting[request_id].params  # with the seed that this rank may have drawn
            self._outbox.append(Generate(request_id, list(prompt), drawn, trace))

    def abort(self, request_id: str) -> bool:
        """Ends a request on every rank, as ``Engine.abort`` does on one."""
        with self._lock:
            found = super().abort(request_id)
            if found:
                self._outbox.append(Abort(request_id))
        return found

    def step(self) -> list[Update]:
        """Makes a step on every rank, as ``Engine.step`` does on one."""
        with self._lock:
            return super().step()

    def _make_step(self) -> list[Update]:
        try:
            self._send(_Kind.STEP)
            return super()._make_step()
        except RankError as error:
            self._failure = str(error)
            raise

    def close(self, failure: str | None = None) -> None:
        """Ends the engine on every rank, and the processes of the other ranks if this one has started them.

        Args:
            failure: why the engine ends; None for an ordinary end.
        """
        if self._closed.is_set():
            return
        self._closed.set()
        atexit.unregister(self.close)
        self._heartbeat.join()
        try:
            with self._lock:  # another thread may be making a step, in which the other ranks expect no message
                if self._can_send():
                    self._send(_Kind.END)
                    self._failure = "it was closed"
        except RankError:
            pass  # the other ranks have ended already
        super().close(failure)
        _end_processes(self._followers)

    def _check(self) -> None:
        """Raises RankError if the ranks cannot go on."""
        failure = self.mesh.failure or self._failure
        if failure is not None:
            raise RankError(f"this engine has ended: {failure}")

    def _can_send(self) -> bool:
        """Whether the other ranks would take part in a broadcast, as far as is known."""
        return self._failure is None and self.mesh.failure is None

    def _send(self, kind: _Kind) -> None:
        commands, self._outbox = self._outbox, []
        _send_message(self.mesh.world, kind, commands)
        self._last_message = time.monotonic()

    def _send_heartbeats(self) -> None:
        while not self._closed.wait(HEARTBEAT / 4):
            # Not without end: a step holds the lock, and a signal handler may call ``close`` in the middle of it, which
            # waits for this thread.
            if not self._lock.acquire(timeout=HEARTBEAT / 4):
                continue
            try:
                if time.monotonic() - self._last_message >= HEARTBEAT and self._can_send():
                    self._send(_Kind.WAIT)
            except RankError as error:
                self._failure = str(error)
            finally:
                self._lock.release()


def follow(engine: Engine) -> None:
    """Repeats on another rank what rank 0 does, and returns when rank 0 ends the engine.

    Raises:
        RankError: the ranks cannot go on.
    """
    while True:
        kind, commands = _receive_message(engine.mesh.world)
        for command in commands:
            if isinstance(command, Generate):
                engine.add(command.request_id, command.prompt_token_ids, command.params, trace=command.trace)
            else:
                engine.abort(command.request_id)
        if kind is _Kind.END:
            return
        if kind is _Kind.STEP:
            engine.step()


# ---- starting an engine ----------------------------------------------------------------------------------------------


def start_engine(config: EngineConfig) -> Engine:
    """The engine for `LLM`.

    An engine of one rank runs in this process. Under torchrun this process is one of several ranks, which must all make
    the same calls. Otherwise the other ranks are started here, and this process is rank 0.

    Raises:
        RankError: a rank ended while it started.
        Exception: whatever `Engine` raises.
    """
    if config.world_size == 1:
        return Engine(config)
    if rank_in_environment() is None:
        return start_local_ranks(config)
    return make_engine(Engine, config, Mesh.join(config, Rendezvous.from_environment(), _ignore_failure))


def lead(config: EngineConfig, on_failure: Callable[[str], None]) -> Engine:
    """The engine for the server: of one rank, or rank 0 of ranks whose processes are started elsewhere.

    Args:
        config: the engine's configuration.
        on_failure: called in a thread, with a message, when a rank has ended or hangs.

    Raises:
        RankError: the other ranks did not join.
        Exception: whatever `Engine` raises.
    """
    if config.world_size == 1:
        return Engine(config)
    return make_engine(LeadingEngine, config, Mesh.join(config, Rendezvous.from_environment(), on_failure))


def start_local_ranks(config: EngineConfig) -> Engine:
    """Starts the other ranks as processes on this machine, and makes this process rank 0.

    Raises:
        RankError: a rank ended while it started.
        Exception: whatever `Engine` raises.
    """
    config = share_cores(config)
    store = serve_store(LOCALHOST, 0)
    rendezvous = Rendezvous.on_this_machine(0, config.world_size, store.port)
    with _Followers(config, store.port) as followers:
        mesh = Mesh.join(config, rendezvous, _ignore_failure, store, followers.check)
        return make_engine(partial(LeadingEngine, followers=list(followers.processes.values())), config, mesh)


def _ignore_failure(message: str) -> None:
    """For `LLM`: the next call raises RankError with the message, which the mesh keeps."""


def make_engine(kind: Callable[[EngineConfig, Mesh], Engine], config: EngineConfig, mesh: Mesh) -> Engine:
    """Makes the engine of a rank; if that fails, leaves the mesh first, so that the other ranks hear of it."""
    try:
        return kind(config, mesh)
    except BaseException as error:
        mesh.close(None if mesh.start_refused else f"it could not start ({type(error).__name__})")
        raise


class _Followers:
    """The processes of the other ranks while they start; ends them if the ``with`` block fails."""

    def __init__(self, config: EngineConfig, port: int):
        self._starts = local_rank_processes(config, port)
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        """By rank."""

    def __enter__(self) -> _Followers:
        try:
            for rank, start in self._starts.items():
                self.processes[rank] = subprocess.Popen(
                    start.command, stdin=subprocess.PIPE, env=start.environment, start_new_session=True
                )
        except BaseException:  # one cannot be started, or Ctrl-C
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, _: TracebackType | None) -> None:
        if kind is not None:
            self._end()

    def _end(self) -> None:
        _end_processes(list(self.processes.values()))

    def check(self) -> None:
        """Looks whether all processes still run.

        Raises:
            RankError: one of them has ended.
        """
        ending = explain_exit({rank: process.poll() for rank, process in self.processes.items()})
        if ending is not None:
            raise RankError(f"a rank ended while it started ({ending})")


def _end_processes(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ends processes at once, and waits until they are gone."""
    kill_running(processes)
    for process in processes:
        process.wait()
        assert process.stdin is not None
        process.stdin.close()
