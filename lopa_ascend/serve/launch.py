"""Starts the engine process, and knows how it ends."""

from __future__ import annotations

import asyncio
import signal
import sys
import tempfile
from asyncio.subprocess import PIPE, Process

import msgspec
import zmq
import zmq.asyncio

from lopa_ascend.config import EngineConfig
from lopa_ascend.serve.messages import Failed, FromEngine, Ready, Start, ToEngine


class EngineFailed(Exception):
    """The engine cannot start; the message is for the operator."""


class EngineProcess:
    """The engine process and the socket to it. ``start`` makes one; ``close`` must follow."""

    def __init__(self, process: Process, socket: zmq.asyncio.Socket):
        self._process, self._socket = process, socket
        self._encoder, self._decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(FromEngine)

    @classmethod
    async def start(cls, config: EngineConfig) -> tuple[EngineProcess, Ready]:
        """Returns once the model is loaded.

        Raises:
            EngineFailed: this cannot be served, or the process ended while it loaded, or TMPDIR takes no socket.
            OSError: no process can be started.
        """
        with tempfile.TemporaryDirectory(prefix="lopa-") as folder:  # only its owner may enter it
            endpoint = f"ipc://{folder}/engine"
            socket = zmq.asyncio.Context.instance().socket(zmq.PAIR)
            for option, value in ((zmq.LINGER, 0), (zmq.SNDHWM, 0), (zmq.RCVHWM, 0)):
                socket.setsockopt(option, value)
            try:
                _bind(socket, endpoint)
                command = (sys.executable, "-m", "lopa_ascend.serve.engine_process", endpoint)
                # Signals of the terminal are not for the engine; it ends when the pipe to its stdin does.
                process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, start_new_session=True)
            except BaseException:
                socket.close()
                raise
            engine = cls(process, socket)
            try:
                engine.send(Start(config))
                return engine, await engine._await_ready()
            except BaseException:
                await engine.close()
                raise

    async def _await_ready(self) -> Ready:
        receive = asyncio.create_task(self.receive())
        death = asyncio.create_task(self._process.wait())
        try:
            await asyncio.wait({receive, death}, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait({receive}, timeout=1)  # its last word may still be on the way
            if not receive.done():
                raise EngineFailed(f"the engine process ended while it loaded the model ({self.ending})")
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
        """Returns when the process has ended."""
        await self._process.wait()

    @property
    def ending(self) -> str | None:
        """How the process has ended; None while it runs."""
        code = self._process.returncode
        if code is None:
            return None
        return signal.Signals(-code).name if code < 0 else f"exit status {code}"

    def kill(self) -> None:
        """Ends the process at once; it holds nothing that is worth saving."""
        if self._process.returncode is None:
            self._process.kill()

    async def close(self) -> None:
        """Ends the process, and returns when it is gone."""
        self.kill()
        await self._process.wait()
        self._socket.close()


def _bind(socket: zmq.asyncio.Socket, endpoint: str) -> None:
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:  # e.g. a path longer than sockets take
        raise EngineFailed(str(error)) from error
