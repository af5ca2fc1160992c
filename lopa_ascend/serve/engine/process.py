"""Starts the engine: its process, or those of all its ranks on this machine, and knows how they end."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from asyncio.subprocess import PIPE, Process

import msgspec
import zmq
import zmq.asyncio

from lopa_ascend.config import EngineConfig
from lopa_ascend.parallel.launch import (
    OTHER_RANK_FAILED,
    Rendezvous,
    follower_command,
    free_port,
    rank_in_environment,
    share_cores,
)
from lopa_ascend.serve.engine.messages import Failed, FromEngine, Ready, Start, ToEngine


class EngineFailed(Exception):
    """The engine cannot start; the message is for the operator."""


class EngineProcess:
    """The engine process, the socket to it, and the processes of the other ranks that were started here. ``start``
    makes one; ``close`` must follow. When one process has ended, the engine has."""

    def __init__(self, socket: zmq.asyncio.Socket):
        self._processes: list[Process] = []
        self._socket = socket
        self._encoder, self._decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(FromEngine)

    @classmethod
    async def start(cls, config: EngineConfig) -> tuple[EngineProcess, Ready]:
        """Returns once the model is loaded.

        Raises:
            EngineFailed: this cannot be served, or the process ended while it loaded, or TMPDIR takes no socket.
            OSError: no process can be started.
        """
        if rank_in_environment() is None:
            config = share_cores(config)
        with tempfile.TemporaryDirectory(prefix="lopa-") as folder:  # only its owner may enter it
            endpoint = f"ipc://{folder}/engine"
            socket = zmq.asyncio.Context.instance().socket(zmq.PAIR)
            for option, value in ((zmq.LINGER, 0), (zmq.SNDHWM, 0), (zmq.RCVHWM, 0)):
                socket.setsockopt(option, value)
            engine = cls(socket)
            try:
                _bind(socket, endpoint)
                await engine._start_processes(config, endpoint)
                engine.send(Start(config))
                return engine, await engine._await_ready()
            except BaseException:
                await engine.close()
                raise

    async def _start_processes(self, config: EngineConfig, endpoint: str) -> None:
        """The engine process, and the other ranks unless torchrun has started them."""
        environments: list[dict[str, str]] = [{}]
        if config.world_size > 1 and rank_in_environment() is None:
            port, size = free_port(), config.world_size
            environments = [Rendezvous.on_this_machine(rank, size, port).environment() for rank in range(size)]
        command: tuple[str, ...] = (sys.executable, "-m", "lopa_ascend.serve.engine.engine_process", endpoint)
        for environment in environments:
            # Signals of the terminal are not for the engine; it ends when the pipe to its stdin does.
            process = await asyncio.create_subprocess_exec(
                *command, stdin=PIPE, start_new_session=True, env=os.environ | environment
            )
            self._processes.append(process)
            command = follower_command(config, with_parent=True)

    async def _await_ready(self) -> Ready:
        receive = asyncio.create_task(self.receive())
        death = asyncio.create_task(self.wait())
        try:
            await asyncio.wait({receive, death}, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait({receive}, timeout=1)  # its last word may still be on the way
            if not receive.done():
                raise EngineFailed(f"the engine ended while it loaded the model ({self.ending})")
            message = receive.result()
        finally:
            receive.cancel()
            death.cancel()
        if isinstance(message, Failed):
            raise EngineFailed(message.message)
        assert isinstance(message, Ready), message
        return message

    def send(self, message: ToEngine) -> None:
        # Without a high-water mark it is queued at once, so nobody needs to wait for the future.
        self._socket.send(self._encoder.encode(message))

    async def receive(self) -> FromEngine:
        message: FromEngine = self._decoder.decode(await self._socket.recv())
        return message

    async def wait(self) -> None:
        """Returns when a process has ended."""
        waiting = [asyncio.create_task(process.wait()) for process in self._processes]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()

    @property
    def ending(self) -> str | None:
        """How a process has ended; None while all run."""
        codes = {rank: process.returncode for rank, process in enumerate(self._processes)}
        ended = {rank: code for rank, code in codes.items() if code is not None}
        if not ended:
            return None
        rank = min(ended, key=lambda rank: ended[rank] == OTHER_RANK_FAILED)  # of the others the reason is another rank
        how = _how(ended[rank])
        return how if len(self._processes) == 1 else f"rank {rank}: {how}"

    def kill(self) -> None:
        """Ends the processes at once; they hold nothing that is worth saving."""
        for process in self._processes:
            if process.returncode is None:
                process.kill()

    async def close(self) -> None:
        """Ends the processes, and returns when they are gone."""
        self.kill()
        for process in self._processes:
            await process.wait()
        self._socket.close()


def _how(code: int) -> str:
    if code == OTHER_RANK_FAILED:
        return "gave up another rank, which the log names"
    return signal.Signals(-code).name if code < 0 else f"exit status {code}"


def _bind(socket: zmq.asyncio.Socket, endpoint: str) -> None:
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:  # e.g. a path longer than sockets take
        raise EngineFailed(str(error)) from error
