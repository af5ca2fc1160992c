"""Tells every rank when another rank's process has ended (within a second) or hangs (after a timeout).

Collectives notice either late, and a rank that computes notices nothing. So a thread of every rank keeps one TCP
connection to rank 0. Rank 0 watches all other ranks and passes on what it sees; the others watch rank 0. Only the
process is watched: while its main thread is stuck, the watch's thread goes on sending beats, as long as the main thread
releases the GIL.

Both directions send lines of text; only the first line of a connection differs:

    TOKEN RANK      the first line, sent by a rank other than 0; rank 0 drops connections that begin with something else
    (empty line)    a beat, sent each second
    failed MESSAGE  the sender has seen a failure or was told of one; rank 0 passes it on to all
    bye             the sender closes; its end is no failure

A rank whose connection ends without a goodbye has ended. A silent rank hangs: its process is stopped, its machine or
network is gone, or a forked child has outlived it and holds the connection open. Silence is counted in the listener's
own beats, so that time in which the listener was suspended is not held against others.
"""

from __future__ import annotations

import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from lopa_ascend.parallel.launch import listen

BEAT_INTERVAL = 1.0
"""Seconds."""
GREETING_TIMEOUT = 5.0
"""Seconds that a new connection has to send the token and its rank."""
MAX_LINE = 1024
"""Bytes."""
MAX_FAILURE = 250
"""Characters of a failure that ``close`` sends: they fit into a line, at four bytes each."""

_BEAT, _BYE, _FAILED = b"", b"bye", b"failed "


@dataclass(eq=False)
class _Connection:
    socket: socket.socket
    rank: int | None
    """The other rank; None until it has sent the token."""
    silent_beats: int = 0
    unread: bytes = b""

    def __post_init__(self) -> None:
        self.socket.setblocking(False)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, line: bytes) -> None:
        """Sends a line; drops it if the connection has ended or the other side does not read."""
        # An end is noticed by reading, and a peer that has let its buffer fill up must not keep the others waiting.
        with suppress(OSError):
            self.socket.send(line + b"\n")

    def receive(self) -> bool:
        """Takes in what has arrived; False if the connection has ended, or sends a line that is too long."""
        try:
            data = self.socket.recv(MAX_LINE)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self.unread += data
        return bool(data) and (b"\n" in self.unread or len(self.unread) <= MAX_LINE)

    def next_line(self) -> bytes | None:
        """The next whole line; None if none is there yet."""
        line, end, rest = self.unread.partition(b"\n")
        if not end:
            return None
        self.unread = rest
        return line


def _do_nothing() -> None:
    """Final callback of a watch that no failure ends."""


class ProcessWatch:
    """One rank's part of the watch: made by ``listen`` on rank 0, by ``connect`` on the others.

    Args:
        port: TCP port on which rank 0 listens.
        token: what a rank must send to be accepted.
        timeout: seconds of silence after which a rank counts as hanging.
        on_failure: called at most once, last of all by the watch's thread, with a message that names the rank.
        parent: id of the process that must not end before this one; None if it may.
    """

    def __init__(
        self,
        port: int,
        token: str,
        timeout: float,
        on_failure: Callable[[str], object],
        parent: int | None = None,
    ):
        assert timeout >= 2 * BEAT_INTERVAL, timeout  # with less, one late beat would be a failure
        self.port, self.token = port, token
        self._timeout, self._on_failure = timeout, on_failure
        self._parent = parent
        self._connections: list[_Connection] = []
        self._listener: socket.socket | None = None
        """On rank 0, until all ranks have joined."""
        self._missing_ranks: set[int] = set()
        self._next_beat = time.monotonic() + BEAT_INTERVAL
        self._last_words = _BYE
        self._final_callback: Callable[[], object] | None = None
        # Closing one end of this pair wakes the thread, which selects on the other one.
        self._closing, self._close = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._closing, selectors.EVENT_READ, self._say_last_words)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    @classmethod
    def listen(
        cls, size: int, timeout: float, on_failure: Callable[[str], object], host: str, parent: int | None = None
    ) -> ProcessWatch:
        """Starts the watch of rank 0 without waiting for the others: a rank is watched once it has joined.

        Until all have joined it listens on a free port of ``host`` alone; they need ``port`` and ``token`` to join.
        OSError if this machine does not have the address.
        """
        listener = listen(host, 0)
        listener.setblocking(False)
        watch = cls(listener.getsockname()[1], secrets.token_hex(16), timeout, on_failure, parent=parent)
        watch._listener, watch._missing_ranks = listener, set(range(1, size))
        watch._selector.register(listener, selectors.EVENT_READ, partial(watch._accept, listener))
        watch._thread.start()
        return watch

    @classmethod
    def connect(
        cls,
        host: str,
        port: int,
        token: str,
        rank: int,
        timeout: float,
        on_failure: Callable[[str], object],
        parent: int | None = None,
    ) -> ProcessWatch:
        """Starts another rank's watch and joins that of rank 0. OSError if nothing listens there."""
        connection = socket.create_connection((host, port), timeout)
        watch = cls(port, token, timeout, on_failure, parent)
        leader = _Connection(connection, 0)
        leader.send(f"{token} {rank}".encode())
        watch._add(leader)
        watch._thread.start()
        return watch

    def close(self, failure: str | None = None) -> None:
        """Ends the watch; repeated calls do nothing. A failure seen before is still reported. ``failure`` says why this
        rank leaves, so that the others end too (they hear ``MAX_FAILURE`` characters of it, in one line); None for a
        goodbye."""
        if failure is not None:
            one_line = " ".join(failure.split())
            self._last_words = _FAILED + one_line[:MAX_FAILURE].encode()
        self._close.close()
        self._ended.wait(BEAT_INTERVAL)  # in a forked child there is no thread to wait for

    # ---- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while self._final_callback is None:
            self._handle_events()
            if self._final_callback is None and time.monotonic() >= self._next_beat:
                self._next_beat = time.monotonic() + BEAT_INTERVAL
                self._beat()
        for connection in self._connections:
            connection.socket.close()
        if self._listener is not None:
            self._listener.close()
        self._closing.close()
        self._close.close()
        self._selector.close()
        self._ended.set()  # before the callback, which may wait for a thread that waits in close()
        self._final_callback()

    def _handle_events(self) -> None:
        for key, _ in self._selector.select(max(0.0, self._next_beat - time.monotonic())):
            if self._final_callback is None:
                key.data()

    def _beat(self) -> None:
        """Sends a beat to every rank. Reports a rank that was silent for too long, or a parent that has ended."""
        if self._parent is not None and os.getppid() != self._parent:
            self._fail(f"the process that started the ranks on {socket.gethostname()} has ended")
            return
        for connection in self._connections.copy():
            connection.silent_beats += 1
            silence = connection.silent_beats * BEAT_INTERVAL
            if connection.rank is None:
                if silence > GREETING_TIMEOUT:
                    self._drop(connection)
            elif silence > self._timeout:
                self._fail(f"rank {connection.rank} has not answered for {self._timeout:g} s")
                return
            else:
                connection.send(_BEAT)

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):  # gone again, or the last rank has joined in this very round
            self._add(_Connection(listener.accept()[0], None))

    def _accept_waiting(self, listener: socket.socket) -> None:
        """Accepts connections that still wait, so that ``_fail`` can send them its message."""
        with suppress(OSError):  # none waits, or all ranks have joined and the listener is closed
            while True:
                connection = _Connection(listener.accept()[0], None)
                self._add(connection)
                connection.receive()  # closing with unread bytes would reset the connection

    def _read(self, connection: _Connection) -> None:
        if not connection.receive():
            self._drop(connection)
            if connection.rank is not None:
                self._fail(f"rank {connection.rank} has ended")
            return
        while connection in self._connections and self._final_callback is None:
            line = connection.next_line()
            if line is None:
                return
            if connection.rank is None:
                self._handle_greeting(connection, line)
            else:
                self._handle_line(connection, connection.rank, line)

    def _handle_greeting(self, connection: _Connection, line: bytes) -> None:
        """On rank 0: accepts the connection as a missing rank, or drops it."""
        assert self._listener is not None
        token, _, rank = line.partition(b" ")
        knows_token = secrets.compare_digest(token, self.token.encode())
        if not knows_token or not rank.isdigit() or int(rank) not in self._missing_ranks:
            self._drop(connection)
            return
        connection.rank, connection.silent_beats = int(rank), 0
        self._missing_ranks.remove(connection.rank)
        if not self._missing_ranks:
            self._selector.unregister(self._listener)
            self._listener.close()

    def _handle_line(self, connection: _Connection, rank: int, line: bytes) -> None:
        connection.silent_beats = 0
        if line == _BYE:
            self._drop(connection)
            if rank == 0:
                self._final_callback = _do_nothing
        elif line.startswith(_FAILED):
            self._fail(line.removeprefix(_FAILED).decode())
        elif line != _BEAT:
            self._fail(f"rank {rank} has sent {line!r}, which is no message")

    def _fail(self, message: str) -> None:
        """Tells every rank of a failure, also one that is still connecting, and ends the watch."""
        if self._listener is not None:
            self._accept_waiting(self._listener)
        # The one that failed is told as well: it may have been suspended, and then it learns why the others have ended.
        for connection in self._connections:
            connection.send(_FAILED + message.encode())
        self._final_callback = partial(self._on_failure, message)

    def _say_last_words(self) -> None:
        for connection in self._connections:
            connection.send(self._last_words)
        self._final_callback = _do_nothing

    def _add(self, connection: _Connection) -> None:
        self._connections.append(connection)
        self._selector.register(connection.socket, selectors.EVENT_READ, partial(self._read, connection))

    def _drop(self, connection: _Connection) -> None:
        self._connections.remove(connection)
        self._selector.unregister(connection.socket)
        connection.socket.close()
