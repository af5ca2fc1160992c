"""What rank 0 tells the other ranks, so that all step together.

Before each step rank 0 broadcasts eight bytes, followed by the commands since the last message. While there is nothing
to do it sends such a message every second: a rank that waited longer in a collective would take rank 0 for dead.
"""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from enum import IntEnum

import msgspec
import torch

from lopa_ascend.engine.commands import Command
from lopa_ascend.parallel.collectives import Group, RankError
from lopa_ascend.parallel.launch import kill_running
from lopa_ascend.process.scratch import remove_abandoned

HEARTBEAT = 1.0
"""Seconds between messages of an idle rank 0."""


class Order(IntEnum):
    """What to do after the message's commands."""

    STEP = 0
    WAIT = 1
    END = 2


def send_message(world: Group, kind: Order, commands: Sequence[Command]) -> None:
    """Broadcasts an int64 header, (bytes of the commands) * len(Order) + kind, and the commands, if any, as msgpack."""
    body = msgspec.msgpack.encode(commands) if commands else b""
    world.broadcast(torch.tensor([len(body) * len(Order) + kind]), 0, "control")
    if body:
        world.broadcast(torch.frombuffer(bytearray(body), dtype=torch.uint8), 0, "control")


def receive_message(world: Group) -> tuple[Order, list[Command]]:
    """Takes part in the broadcast of ``send_message``."""
    header = int(world.broadcast(torch.zeros(1, dtype=torch.int64), 0, "control"))
    num_bytes, kind = divmod(header, len(Order))
    if not num_bytes:
        return Order(kind), []
    body = world.broadcast(torch.empty(num_bytes, dtype=torch.uint8), 0, "control")
    return Order(kind), msgspec.msgpack.decode(body.numpy().tobytes(), type=list[Command])


class Leader:
    """Rank 0's line to the other ranks: they are asked, before the next step, what its engine is asked.

    Attributes:
        lock: the engine holds it during each call, so no heartbeat is sent in the middle of one. Reentrant: garbage
            collection may abort an abandoned stream in the middle of another call.
        outbox: commands not yet sent.
        failure: why a heartbeat could not be sent.
        followers: processes of the other ranks that ``close`` must end; empty if another process started them.
    """

    def __init__(
        self,
        world: Group,
        engine_failure: Callable[[], str | None],
        followers: Sequence[subprocess.Popen[bytes]] = (),
    ) -> None:
        self.lock = threading.RLock()
        self.outbox: list[Command] = []
        self.failure: str | None = None
        self.followers = followers
        self._world, self._engine_failure = world, engine_failure
        self._last_message = time.monotonic()
        self._closed = threading.Event()
        self._heartbeat = threading.Thread(target=self._send_heartbeats, name="heartbeat", daemon=True)
        self._heartbeat.start()

    @property
    def has_ended(self) -> bool:
        return self._closed.is_set()

    def send(self, kind: Order) -> None:
        commands, self.outbox = self.outbox, []
        send_message(self._world, kind, commands)
        self._last_message = time.monotonic()

    def end(self) -> None:
        """Tells the other ranks to end; nothing can be sent afterwards."""
        self._closed.set()
        self._heartbeat.join()
        try:
            with self.lock:  # another thread may be making a step, in which the other ranks expect no message
                if self._engine_failure() is None:
                    self.send(Order.END)
                    self.failure = "it was closed"
        except RankError:
            pass  # the other ranks have ended already

    def _send_heartbeats(self) -> None:
        while not self._closed.wait(HEARTBEAT / 4):
            # Not without end: a step holds the lock, and a signal handler may call ``end`` in the middle of it, which
            # waits for this thread.
            if not self.lock.acquire(timeout=HEARTBEAT / 4):
                continue
            try:
                if time.monotonic() - self._last_message >= HEARTBEAT and self._engine_failure() is None:
                    self.send(Order.WAIT)
            except RankError as error:
                self.failure = str(error)
            finally:
                self.lock.release()


def end_processes(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Kills processes, waits until they are gone, and removes what they leave."""
    kill_running(processes)
    for process in processes:
        process.wait()
        assert process.stdin is not None
        process.stdin.close()
    remove_abandoned()
