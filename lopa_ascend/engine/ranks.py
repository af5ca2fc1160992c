"""Starts the engine of a rank: alone, as rank 0 which leads the others, or as a follower."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from types import TracebackType

from lopa_ascend.config import EngineConfig
from lopa_ascend.core import Request
from lopa_ascend.engine.answers import check_answers
from lopa_ascend.engine.commands import Abort, Admit, Command, StartProfile, StopProfile
from lopa_ascend.engine.engine import Engine
from lopa_ascend.engine.leader import Order, end_processes, receive_message
from lopa_ascend.parallel.collectives import RankError
from lopa_ascend.parallel.launch import (
    LOCALHOST,
    Rendezvous,
    StopWatch,
    explain_exit,
    kill_running,
    local_rank_processes,
    rank_in_environment,
    share_cores,
)
from lopa_ascend.parallel.mesh import Mesh
from lopa_ascend.parallel.store import serve_store


def follow(engine: Engine) -> None:
    """Repeats on another rank what rank 0 does, until rank 0 ends the engine. RankError if the ranks cannot go on."""
    engine.follows = True
    while True:
        kind, commands = receive_message(engine.mesh.world)
        for command in commands:
            _obey(engine, command)
        if kind is Order.END:
            return
        if kind is Order.STEP:
            engine.step()


def _obey(engine: Engine, command: Command) -> None:
    match command:
        case Request():
            engine.add(command)
        case Admit():
            engine.admit(command.request_id)
        case Abort():
            engine.abort(command.request_id)
        case StartProfile():
            engine.start_profile(command)
        case StopProfile():
            engine.stop_profile()


# ---- starting an engine ----------------------------------------------------------------------------------------------


def start_engine(config: EngineConfig) -> Engine:
    """The engine for `LLM`. Raises what `Engine` raises, or RankError if a rank ended while it started.

    An engine of one rank runs in this process. Under torchrun this process is one of several ranks, which must all make
    the same calls. Otherwise the other ranks are started here, and this process is rank 0.
    """
    if config.world_size == 1:
        return _checked(Engine(config))
    if rank_in_environment() is None:
        return start_local_ranks(config)
    return _checked(make_engine(config, Mesh.join(config, Rendezvous.from_environment(), _ignore_failure)))


def lead(config: EngineConfig, on_failure: Callable[[str], None]) -> Engine:
    """The engine for the server: alone, or rank 0 of ranks that another process starts. ``on_failure`` is called in a
    thread, with a message, when a rank has ended or hangs. Raises what `Engine` raises, or RankError if the others did
    not join."""
    if config.world_size == 1:
        return _checked(Engine(config))
    engine = make_engine(config, Mesh.join(config, Rendezvous.from_environment(), on_failure))
    engine.lead()
    return _checked(engine)


def start_local_ranks(config: EngineConfig) -> Engine:
    """Starts the other ranks as processes on this machine, and makes this one rank 0. Raises like ``start_engine``."""
    config = share_cores(config)
    store = serve_store(LOCALHOST, 0)
    rendezvous = Rendezvous.on_this_machine(0, config.world_size, store.port)
    with _Followers(config, store.port) as followers:
        mesh = Mesh.join(config, rendezvous, followers.kill, store, followers.check)
        engine = make_engine(config, mesh)
        engine.lead(list(followers.processes.values()))
        return _checked(engine)


def _checked(engine: Engine) -> Engine:
    """The engine, once it has repeated the configured answers; it is closed if it does not."""
    try:
        check_answers(engine)
    except BaseException:
        engine.close()
        raise
    return engine


def _ignore_failure(message: str) -> None:
    """For `LLM`: the mesh keeps the message, and the next call raises it as RankError."""


def make_engine(config: EngineConfig, mesh: Mesh) -> Engine:
    """Makes a rank's engine; if that fails, leaves the mesh first, so that the other ranks hear of it."""
    try:
        return Engine(config, mesh)
    except BaseException as error:
        mesh.close(None if mesh.start_refused else f"it could not start ({type(error).__name__})")
        raise


class _Followers:
    """The other ranks' processes while they start; ended if the ``with`` block fails."""

    def __init__(self, config: EngineConfig, port: int):
        self._starts = local_rank_processes(config, port)
        self._stops = StopWatch(config.distributed_timeout_seconds)
        self.processes: dict[int, subprocess.Popen[bytes]] = {}

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

    def kill(self, _: str) -> None:
        """Ends the processes after a failure, so that this rank does not wait in a collective for one that hangs. The
        mesh keeps the message."""
        kill_running(self.processes.values())

    def _end(self) -> None:
        end_processes(list(self.processes.values()))

    def check(self) -> None:
        """Raises RankError if a process has ended, or was stopped for too long."""
        ending = explain_exit({rank: process.poll() for rank, process in self.processes.items()})
        if ending is not None:
            raise RankError(f"a rank ended while it started ({ending})")
        if (stop := self._stops.check({rank: process.pid for rank, process in self.processes.items()})) is not None:
            raise RankError(stop)
