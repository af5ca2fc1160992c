"""The engine process: `python -m lopa_ascend.serve.engine.engine_process ENDPOINT`, started by the HTTP process alone.

It steps while it has work, and takes messages between steps. It ends when its stdin does, which is when the HTTP
process ends, in whatever way that comes about; signals that are sent to both are for the HTTP process.
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
from lopa_ascend.serve.engine.messages import Failed, FromEngine, Ready, Start, Stepped, ToEngine
from lopa_ascend.types import Update

if TYPE_CHECKING:
    from lopa_ascend.engine.engine import Engine

logger = logging.getLogger(__name__)

HEARTBEAT = 1.0
"""Seconds between messages while there is nothing to do."""
FLUSH = 1000
"""Milliseconds in which the last message must be out."""


class _Peer:
    """Typed messages over the socket."""

    def __init__(self, socket: zmq.Socket[bytes]):
        self._socket = socket
        self._encoder, self._decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(ToEngine)

    def send(self, message: FromEngine) -> None:
        self._socket.send(self._encoder.encode(message))

    def receive(self) -> ToEngine:
        message: ToEngine = self._decoder.decode(self._socket.recv())
        return message

    def waits(self, seconds: float) -> bool:
        """Whether a message is there, or comes within ``seconds``."""
        return bool(self._socket.poll(round(1000 * seconds)))


def _load(peer: _Peer) -> Engine | None:
    """Starts the engine and says how that went; None if its configuration cannot be served."""
    start = peer.receive()
    assert isinstance(start, Start), start
    from lopa_ascend.engine.ranks import lead  # brings torch, which takes seconds

    try:
        engine = lead(start.config, exit_rank)
    except (ValueError, OSError) as error:
        peer.send(Failed(str(error)))
        return None
    memory = engine.kv_cache_memory
    peer.send(Ready(engine.limits, engine.model_name, engine.dtype, engine.device, memory, engine.ranks))
    return engine


def _take(engine: Engine, message: ToEngine) -> Update | None:
    """Acts on a message. Returns the last update of a request that the engine refuses."""
    if isinstance(message, Generate):
        try:
            engine.add(message.request_id, message.prompt_token_ids, message.params, trace=message.trace)
        except ParameterError as error:
            return Update(message.request_id, (), (), 0, 0, 0, None, 0, finish_reason="error", error=str(error))
    else:
        assert isinstance(message, Abort), message
        engine.abort(message.request_id)
    return None


def _serve(engine: Engine, peer: _Peer) -> None:
    while True:
        patience = 0.0 if engine.has_work() else HEARTBEAT
        updates = []
        while peer.waits(patience):
            patience = 0.0
            refused = _take(engine, peer.receive())
            updates += [] if refused is None else [refused]
        if engine.has_work():
            updates += engine.step()
        peer.send(Stepped(updates, engine.stats()))


def run(endpoint: str) -> int:
    """Serves until the process ends; returns the exit status if the engine cannot start."""
    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    for option in (zmq.SNDHWM, zmq.RCVHWM):
        socket.setsockopt(option, 0)
    socket.connect(endpoint)
    peer = _Peer(socket)
    try:
        if (engine := _load(peer)) is not None:
            _serve(engine, peer)
        return 1
    finally:
        socket.close(linger=FLUSH)
        context.term()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    exit_when_stdin_closes()
    status = 1
    try:
        status = run(sys.argv[1])
    except Exception:
        logger.exception("the engine process ends")
    finally:
        sys.stderr.flush()
        os._exit(status)  # taking torch down takes seconds on a busy machine


if __name__ == "__main__":
    main()
