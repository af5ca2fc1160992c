"""The engine process, which the HTTP process starts: `python -m lopa_ascend.serve.link.process ENDPOINT`.

It makes steps while it has work, and handles messages between steps. It ends when its stdin is closed, which happens
whenever and however the HTTP process ends. It ignores SIGINT and SIGTERM, which are for the HTTP process.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from typing import TYPE_CHECKING

import msgspec
import zmq

from lopa_ascend.config import ParameterError
from lopa_ascend.engine.commands import Abort, Generate
from lopa_ascend.parallel.launch import exit_rank, exit_when_stdin_closes
from lopa_ascend.serve.link.messages import (
    Failed,
    FromEngine,
    Ready,
    Start,
    Stepped,
    ToEngine,
)
from lopa_ascend.types import Update

if TYPE_CHECKING:
    from lopa_ascend.engine.engine import Engine

logger = logging.getLogger(__name__)

HEARTBEAT = 1.0
"""Seconds between messages while there is nothing to do."""
LAST_MESSAGE_TIMEOUT = 1000
"""Most milliseconds that the last message may take to be sent."""


class _Connection:
    """Sends and receives typed messages over a socket."""

    def __init__(self, socket: zmq.Socket[bytes]):
        self._socket = socket
        self._encoder, self._decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(ToEngine)

    def send(self, message: FromEngine) -> None:
        self._socket.send(self._encoder.encode(message))

    def receive(self) -> ToEngine:
        message: ToEngine = self._decoder.decode(self._socket.recv())
        return message

    def has_message(self, timeout: float) -> bool:
        """Whether a message is there, or comes within ``timeout`` seconds."""
        return bool(self._socket.poll(round(1000 * timeout)))


def _load(connection: _Connection) -> Engine | None:
    """Starts the engine and reports the result; None if its configuration cannot be served."""
    start = connection.receive()
    assert isinstance(start, Start), start
    from lopa_ascend.engine.ranks import lead  # not at the top, because importing torch takes seconds

    try:
        engine = lead(start.config, exit_rank)
    except (ValueError, OSError) as error:
        connection.send(Failed(str(error)))
        return None
    connection.send(
        Ready(
            limits=engine.limits,
            model_name=engine.model_name,
            dtype=engine.dtype,
            device=engine.device,
            kv_cache_memory=engine.kv_cache_memory,
            seed=engine.seed,
            ranks=engine.ranks,
        )
    )
    return engine


def _handle(engine: Engine, message: ToEngine) -> Update | None:
    """Does what a message asks for. Returns an update only if the engine refuses a request."""
    if isinstance(message, Generate):
        try:
            engine.add(message.request_id, message.prompt_token_ids, message.params, trace=message.trace)
        except ParameterError as error:
            return Update.without_step(message.request_id, "error", str(error))
    else:
        assert isinstance(message, Abort), message
        engine.abort(message.request_id)
    return None


def _serve(engine: Engine, connection: _Connection) -> None:
    """Handles messages and makes steps until the process ends."""
    while True:
        timeout = 0.0 if engine.has_work() else HEARTBEAT
        updates: list[Update] = []
        while connection.has_message(timeout):
            timeout = 0.0
            refused = _handle(engine, connection.receive())
            if refused is not None:
                updates.append(refused)
        if engine.has_work():
            updates += engine.step()
        connection.send(Stepped(updates, engine.stats()))


def run(endpoint: str) -> int:
    """Serves until the process ends. Returns only if the engine cannot start: the exit status.

    Args:
        endpoint: zmq endpoint of the HTTP process.
    """
    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    for option in (zmq.SNDHWM, zmq.RCVHWM):
        socket.setsockopt(option, 0)
    socket.connect(endpoint)
    connection = _Connection(socket)
    try:
        if (engine := _load(connection)) is not None:
            from lopa_ascend.parallel.collectives import RankError  # torch is loaded by now

            try:
                _serve(engine, connection)
            except RankError as error:
                exit_rank(str(error))  # it names the rank that has failed; a traceback of this one would say no more
        return 1
    finally:
        socket.close(linger=LAST_MESSAGE_TIMEOUT)
        context.term()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    exit_when_stdin_closes()
    logging.basicConfig(format="%(message)s")
    logging.getLogger("lopa_ascend").setLevel(logging.INFO)
    status = 1
    try:
        status = run(sys.argv[1])
    except Exception:
        logger.exception("the engine process ends")
    finally:
        sys.stderr.flush()
        os._exit(status)  # an orderly exit of torch takes seconds on a busy machine


if __name__ == "__main__":
    main()
