"""Every rank knows within a second that the process of another has ended, and within a timeout that one hangs.

Collectives notice neither for long, and a rank that computes notices nothing. So every rank keeps one TCP connection to
rank 0 beside them, served by a thread of its own. Rank 0 watches all others and passes on what it sees; the others
watch rank 0. What is watched is the process: a stuck main thread goes on beating as long as it lets go of the GIL.

The protocol is lines of text, and the same in both directions but for the first:

    TOKEN RANK      the first line that a rank sends; whoever begins otherwise is no rank and is dropped
    (empty)         a beat, each second
    failed MESSAGE  the sender has seen a failure, or was told of one; rank 0 passes it on to all
    bye             the sender closes, and its end is no failure

A rank whose connection ends without a goodbye has ended. Silence tells where no end can come: the process is stopped,
its machine or network is gone, or a forked child outlives it and holds the connection open. Silence is counted in the
listener's own beats, so that time for which the listener itself was suspended is not held against others.
"""

from __future__ import annotations

import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

BEAT = 1.0
"""Seconds between two beats."""
HELLO = 5.0
"""Seconds in which a new connection must have said the token and its rank."""
LINE = 1024
"""Bytes of a line: no rank sends more."""

_BEAT, _BYE, _FAILED = b"", b"bye", b"failed "


@dataclass(eq=False)
class _Peer:
    """The other end of a connection; ``rank`` is None until it has said the token."""

    socket: socket.socket
    rank: int | None
    silent: int = 0
    """Beats of ours since the last one from there."""
    unread: bytes = b""

    def __post_init__(self) -> None:
        self.socket.setblocking(False)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, line: bytes) -> None:
        # An end is noticed by reading, and a peer that has let its buffer fill up must not keep the others waiting.
        with suppress(OSError):
            self.socket.send(line + b"\n")

    def receive(self) -> bool:
        """Takes in what has come; False if the connection has ended, or brings what no rank sends."""
        try:
            data = self.socket.recv(LINE)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self.unread += data
        return bool(data) and (b"\n" in self.unread or len(self.unread) <= LINE)

    def line(self) -> bytes | None:
        """The next whole line; None if there is none yet."""
        line, end, rest = self.unread.partition(b"\n")
        if not end:
            return None
        self.unread = rest
        return line


def _nothing() -> None:
    """What follows when this rank itself has closed."""


class Watch:
    """One rank's end of the watch, made by `lead` or `follow`.

    The callbacks run in the thread of the watch, as the last thing that it does: at most one of them, once.
    """

    def __init__(
        self,
        port: int,
        token: str,
        timeout: float,
        on_failure: Callable[[str], object],
        on_close: Callable[[], object] = _nothing,
    ):
        assert timeout >= 2 * BEAT, timeout  # with less, one late beat would be a failure
        self.port, self.token = port, token
        self._timeout, self._on_failure, self._on_close = timeout, on_failure, on_close
        self._peers: list[_Peer] = []
        self._listener: socket.socket | None = None
        self._missing: set[int] = set()
        self._closing, self._close = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._closing, selectors.EVENT_READ, self._say_last_words)
        self._next_beat = time.monotonic() + BEAT
        self._end: Callable[[], object] | None = None
        self._last_words = _BYE
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    @classmethod
    def lead(cls, size: int, timeout: float, on_failure: Callable[[str], object], host: str = "") -> Watch:
        """Rank 0 begins to watch ranks 1 to ``size - 1``, and waits for none: a rank is missed once it has joined.

        Listens on a free ``port`` of ``host`` ("": all interfaces) until all have joined; they must know ``token``.
        ``on_failure`` is called with a message that names the rank that has ended, or that has been silent for
        ``timeout`` seconds, to within a beat.
        """
        listener = socket.create_server((host, 0))
        listener.setblocking(False)
        watch = cls(listener.getsockname()[1], secrets.token_hex(16), timeout, on_failure)
        watch._listener, watch._missing = listener, set(range(1, size))
        watch._selector.register(listener, selectors.EVENT_READ, partial(watch._accept, listener))
        watch._thread.start()
        return watch

    @classmethod
    def follow(
        cls,
        host: str,
        port: int,
        token: str,
        rank: int,
        timeout: float,
        on_failure: Callable[[str], object],
        on_close: Callable[[], object] = _nothing,
    ) -> Watch:
        """Joins rank 0's watch at ``host`` and ``port`` as ``rank``; raises OSError if nobody listens there.

        ``on_failure`` is called with the message that rank 0 passes on, or with one that names rank 0; ``on_close``
        when rank 0 says goodbye.
        """
        connection = socket.create_connection((host, port), timeout)
        watch = cls(port, token, timeout, on_failure, on_close)
        leader = _Peer(connection, 0)
        leader.send(f"{token} {rank}".encode())
        watch._add(leader)
        watch._thread.start()
        return watch

    def close(self, failure: str | None = None) -> None:
        """Ends the watch with a goodbye, or with the ``failure`` for which this rank leaves the others; does nothing
        the second time. A failure seen before is still reported."""
        if failure is not None:
            self._last_words = _FAILED + failure.encode()
        self._close.close()  # the other end of the pair wakes the thread
        self._ended.wait(BEAT)  # in a forked child there is no thread to wait for

    def _run(self) -> None:
        while self._end is None:
            self._round()
        for peer in self._peers:
            peer.socket.close()
        if self._listener is not None:
            self._listener.close()
        self._closing.close()
        self._close.close()
        self._selector.close()
        self._ended.set()  # before the callback, which may wait for a thread that waits in close()
        self._end()

    def _round(self) -> None:
        for key, _ in self._selector.select(max(0.0, self._next_beat - time.monotonic())):
            if self._end is None:
                key.data()
        if self._end is None and time.monotonic() >= self._next_beat:
            self._next_beat = time.monotonic() + BEAT
            self._beat()

    def _beat(self) -> None:
        for peer in self._peers.copy():
            peer.silent += 1
            if peer.rank is None:
                if peer.silent * BEAT > HELLO:
                    self._drop(peer)
            elif peer.silent * BEAT > self._timeout:
                self._fail(f"rank {peer.rank} has not answered for {self._timeout:g} s")
                return
            else:
                peer.send(_BEAT)

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):  # gone again, or the last rank has joined in this very round
            self._add(_Peer(listener.accept()[0], None))

    def _read(self, peer: _Peer) -> None:
        if not peer.receive():
            self._drop(peer)
            if peer.rank is not None:
                self._fail(f"rank {peer.rank} has ended")
            return
        while peer in self._peers and self._end is None and (line := peer.line()) is not None:
            if peer.rank is None:
                self._greet(peer, line)
            else:
                self._hear(peer, line)

    def _greet(self, peer: _Peer, line: bytes) -> None:
        assert self._listener is not None
        token, _, rank = line.partition(b" ")
        known = secrets.compare_digest(token, self.token.encode())
        if not known or not rank.isdigit() or int(rank) not in self._missing:
            self._drop(peer)
            return
        peer.rank, peer.silent = int(rank), 0
        self._missing.remove(peer.rank)
        if not self._missing:
            self._selector.unregister(self._listener)
            self._listener.close()

    def _hear(self, peer: _Peer, line: bytes) -> None:
        assert peer.rank is not None
        peer.silent = 0
        if line == _BYE:
            self._drop(peer)
            if peer.rank == 0:
                self._end = self._on_close
        elif line.startswith(_FAILED):
            self._fail(line.removeprefix(_FAILED).decode())
        elif line != _BEAT:
            self._fail(f"rank {peer.rank} has sent {line!r}, which is no message")

    def _fail(self, message: str) -> None:
        # The one that failed is told as well: it may have been suspended, and then it learns why the others have ended.
        for peer in self._peers:
            peer.send(_FAILED + message.encode())
        self._end = partial(self._on_failure, message)

    def _say_last_words(self) -> None:
        for peer in self._peers:
            peer.send(self._last_words)
        self._end = _nothing

    def _add(self, peer: _Peer) -> None:
        self._peers.append(peer)
        self._selector.register(peer.socket, selectors.EVENT_READ, partial(self._read, peer))

    def _drop(self, peer: _Peer) -> None:
        self._peers.remove(peer)
        self._selector.unregister(peer.socket)
        peer.socket.close()
