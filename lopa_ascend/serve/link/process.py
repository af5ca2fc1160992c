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

import zmq

from lopa_ascend.config import ParameterError
from lopa_ascend.core import Request
from lopa_ascend.engine.commands import Abort, ProfileError, StartProfile, StopProfile
from lopa_ascend.parallel.launch import exit_rank, exit_when_stdin_closes, exit_with_parent
from lopa_ascend.process.standard_streams import write_as_possible
from lopa_ascend.serve.link.messages import (
    Failed,
    Profiled,
    Ready,
    Start,
    Stepped,
    ToEngine,
    decode_to_engine,
    encode_message,
)
from lopa_ascend.types import Update

if TYPE_CHECKING:
    from lopa_ascend.engine.engine import Engine

logger = logging.getLogger(__name__)

HEARTBEAT = 1000
"""Milliseconds between messages of an idle engine."""
LAST_MESSAGE_TIMEOUT = 1000
"""Most milliseconds that the last message may take to be sent."""


def _load(socket: zmq.Socket[bytes]) -> Engine | None:
    """Starts the engine and reports the result; None if its configuration cannot be served."""
    start = decode_to_engine(socket.recv())
    assert isinstance(start, Start), start
    from lopa_ascend.engine.ranks import lead  # not at the top, because importing torch takes seconds
    from lopa_ascend.parallel.collectives import RankError

    try:
        engine = lead(start.config, exit_rank)
    except (ValueError, OSError, RankError) as error:
        socket.send(encode_message(Failed(str(error))))
        return None
    ready = Ready(
        limits=engine.limits,
        model_name=engine.model_name,
        dtype=engine.dtype,
        device=engine.device,
        kv_cache_memory=engine.kv_cache_memory,
        seed=engine.seed,
        ranks=engine.ranks,
    )
    socket.send(encode_message(ready))
    return engine


def _handle(engine: Engine, message: ToEngine) -> list[Update]:
    """Returns an update only if the engine refuses a request."""
    if isinstance(message, Request):
        try:
            engine.add(message)
        except ParameterError as error:
            return [Update.without_step(message.request_id, "error", str(error))]
    else:
        assert isinstance(message, Abort), message
        engine.abort(message.request_id)
    return []


def _profile(engine: Engine, message: StartProfile | StopProfile) -> Profiled:
    try:
        if isinstance(message, StartProfile):
            engine.start_profile(message)
            return Profiled()
        found = engine.stop_profile()
    except ProfileError as error:
        return Profiled(refusal=str(error))
    failures = [traces.failure for traces in found if traces.failure is not None]
    return Profiled([file for traces in found for file in traces.files], failures=failures)


def _serve(engine: Engine, socket: zmq.Socket[bytes]) -> None:
    while True:
        timeout = 0 if engine.has_work() else HEARTBEAT
        updates: list[Update] = []
        while socket.poll(timeout):
            timeout = 0
            message = decode_to_engine(socket.recv())
            if isinstance(message, StartProfile | StopProfile):
                socket.send(encode_message(_profile(engine, message)))
            else:
                updates += _handle(engine, message)
        if engine.has_work():
            updates += engine.step()
        socket.send(encode_message(Stepped(updates, engine.stats())))


def run(endpoint: str) -> int:
    """Serves at zmq's ``endpoint`` until the process ends. Returns an exit status only if the engine cannot start."""
    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    for option in (zmq.SNDHWM, zmq.RCVHWM):
        socket.setsockopt(option, 0)
    socket.connect(endpoint)
    try:
        if (engine := _load(socket)) is not None:
            from lopa_ascend.parallel.collectives import RankError  # torch is loaded by now

            try:
                _serve(engine, socket)
            except RankError as error:
                exit_rank(str(error))  # it names the rank that has failed; a traceback of this one would say no more
        return 1
    finally:
        socket.close(linger=LAST_MESSAGE_TIMEOUT)
        context.term()


def main() -> None:
    write_as_possible()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    exit_with_parent()
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
