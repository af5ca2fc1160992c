"""Starts the engine process and those of its other ranks on this machine, and notices when one of them ends."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from contextlib import suppress

import zmq
import zmq.asyncio

from lopa_ascend.config import EngineConfig
from lopa_ascend.parallel.launch import (
    RankProcess,
    StopWatch,
    explain_exit,
    free_port,
    kill_running,
    local_rank_processes,
    rank_in_environment,
    share_cores,
)
from lopa_ascend.process.scratch import ScratchFolder, remove_abandoned
from lopa_ascend.serve.link.messages import (
    Failed,
    FromEngine,
    Ready,
    Start,
    ToEngine,
    decode_from_engine,
    encode_message,
)

STOP_INTERVAL = 0.5
"""Seconds between two looks whether a process is stopped."""
LAST_MESSAGE_TIMEOUT = 1.0
"""Seconds to wait for the engine's last message after its process has ended."""


class EngineFailed(Exception):
    """The message is for the operator."""


class ChildProcess(subprocess.Popen[bytes]):
    """A rank's process that the event loop can wait for.

    Popen alone reaps it, under its lock. asyncio's own are reaped by a watcher and also by ``kill``, which looks
    whether they run; who comes second says "Unknown child process" on stderr and reports status 255.
    """

    def __init__(self, start: RankProcess):
        super().__init__(start.command, stdin=subprocess.PIPE, start_new_session=True, env=start.environment)
        self.ended = asyncio.Event()
        """``returncode`` says how."""
        threading.Thread(target=self._watch, args=(asyncio.get_running_loop(),), name="child", daemon=True).start()

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        self.wait()
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(self.ended.set)


class EngineProcess:
    """The engine's process, other ranks started here, and the socket. It ends as soon as one of these processes does.

    ``start`` makes one, and ``close`` must follow.
    """

    def __init__(self, socket: zmq.asyncio.Socket):
        self._processes: list[ChildProcess] = []
        self._socket = socket

    @classmethod
    async def start(cls, config: EngineConfig) -> tuple[EngineProcess, Ready]:
        """Starts the engine and waits until it has loaded the model.

        Raises:
            EngineFailed: it refuses its configuration, a process has ended, or the socket's path is too long.
            OSError: no process can be started.
        """
        if rank_in_environment() is None:
            config = share_cores(config)
        remove_abandoned()
        folder = ScratchFolder()
        endpoint = f"ipc://{folder.path}/engine"
        socket = zmq.asyncio.Context.instance().socket(zmq.PAIR)
        for option in (zmq.LINGER, zmq.SNDHWM, zmq.RCVHWM):
            socket.setsockopt(option, 0)
        engine = cls(socket)
        try:
            try:
                socket.bind(endpoint)
            except zmq.ZMQError as error:  # the path is longer than that of a socket may be
                raise EngineFailed(str(error)) from error
            engine._start_processes(config, endpoint)
            engine.send(Start(config))
            return engine, await engine._await_ready(config.distributed_timeout_seconds)
        except BaseException:
            await engine.close()
            raise
        finally:
            folder.close()

    def _start_processes(self, config: EngineConfig, endpoint: str) -> None:
        """Starts the other ranks too, unless torchrun has."""
        command = (sys.executable, "-m", "lopa_ascend.serve.link.process", endpoint)
        if config.world_size == 1 or rank_in_environment() is not None:
            starts = {0: RankProcess(command, dict(os.environ))}
        else:
            starts = local_rank_processes(config, free_port(), command)
        for start in starts.values():
            self._processes.append(ChildProcess(start))

    async def _await_ready(self, timeout: float) -> Ready:
        """A process may be stopped for ``timeout`` seconds."""
        receive = asyncio.create_task(self.receive())
        death = asyncio.create_task(self.wait())
        stop = asyncio.create_task(self._await_stop(timeout))
        try:
            await asyncio.wait({receive, death, stop}, return_when=asyncio.FIRST_COMPLETED)
            if stop.done():
                raise EngineFailed(stop.result())
            await asyncio.wait({receive}, timeout=LAST_MESSAGE_TIMEOUT)  # the last message may say why it ended
            if not receive.done():
                raise EngineFailed(f"the engine ended while it loaded the model ({self.ending})")
            message = receive.result()
        finally:
            receive.cancel()
            death.cancel()
            stop.cancel()
        if isinstance(message, Failed):
            raise EngineFailed(message.message)
        assert isinstance(message, Ready), message
        return message

    async def _await_stop(self, timeout: float) -> str:
        """Returns which process has been stopped for ``timeout`` seconds."""
        stops, pids = StopWatch(timeout), {rank: process.pid for rank, process in enumerate(self._processes)}
        while (found := stops.check(pids)) is None:
            await asyncio.sleep(STOP_INTERVAL)
        return found

    def send(self, message: ToEngine) -> None:
        """Queues a message; the socket has no high-water mark."""
        self._socket.send(encode_message(message))

    async def receive(self) -> FromEngine:
        return decode_from_engine(await self._socket.recv())

    async def wait(self) -> None:
        waiting = [asyncio.create_task(process.ended.wait()) for process in self._processes]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()

    @property
    def ending(self) -> str | None:
        """Which process has ended, and how; None while all run."""
        return explain_exit({rank: process.returncode for rank, process in enumerate(self._processes)})

    def kill(self) -> None:
        kill_running(self._processes)

    async def close(self) -> None:
        self.kill()
        for process in self._processes:
            await process.ended.wait()
        self._socket.close()
        remove_abandoned()  # what the processes could not remove
