"""A connection of the HTTP server, which ends if its client keeps the server waiting for too long."""

from __future__ import annotations

import array
import asyncio
import contextlib
import fcntl
import termios

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_TIMEOUT = 10.0
"""Most seconds in which a client must send the head of a request, or the rest of a body if the answer went out before
all of the body had come. The time of a connection's first head begins with the connection, otherwise with the first
byte that the client sends after an answer."""
STALL_TIMEOUT = 60.0
"""Most seconds in which a client may read nothing while a part of an answer waits to be sent to it."""
LATE = b"the head of the request did not arrive in time"


class HttpConnection(H11Protocol):
    """uvicorn's connection with three time limits for what the client has to do:

    - send the head of a request;
    - send the rest of a body after the answer, if the request was answered before all of its body had come;
    - read its answers.

    ``serve/api/intake.py`` limits the time for all other bodies, and uvicorn that of idle connections.

    It always uses the parser h11, whatever is installed: parsers differ in how they treat malformed requests.
    """

    _timer: asyncio.TimerHandle | None = None
    """Runs while the client must send something."""
    _timed_state: object = None
    """State of the client in which the timer was started."""
    _stall_timer: asyncio.TimerHandle | None = None
    """Runs while a part of an answer waits for the client."""
    _num_unread = 0
    """``_count_unread`` when the stall timer was started."""

    # uvicorn narrows the transport's type, as no other kind reaches it.
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # So pause_writing is called whenever anything has to wait. With 0 asyncio's TLS pauses when nothing waits, too.
        transport.set_write_buffer_limits(high=1)
        self._watch_client()

    def handle_events(self) -> None:
        super().handle_events()
        self._watch_client()

    def send_400_response(self, msg: str) -> None:
        """Answers what is not HTTP, unless it follows an answer: the rest of a body that was answered early."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._stop_stall_timer()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        self._stop_stall_timer()
        super().resume_writing()

    def _watch_reader(self) -> None:
        self._num_unread = self._count_unread()
        self._stall_timer = self.loop.call_later(STALL_TIMEOUT, self._check_reader)

    def _count_unread(self) -> int:
        """Bytes that wait for the client, here and in the kernel. The kernel takes more only once it has sent much of
        what it holds, so the bytes here alone do not show that a slow client goes on."""
        in_kernel = array.array("i", [0])
        with contextlib.suppress(OSError):  # not all systems count them
            fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, in_kernel)
        return self.transport.get_write_buffer_size() + in_kernel[0]

    def _check_reader(self) -> None:
        """Ends the connection if nothing was read since the last look. A slow reader may go on."""
        if self._count_unread() < self._num_unread:
            self._watch_reader()
        else:
            self.transport.abort()

    def _stop_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _watch_client(self) -> None:
        """Starts the timer if a head is awaited, or the rest of a body that has its answer, and stops it if not.
        Directly after an answer uvicorn's own timer runs, until the client sends something."""
        state = self.conn.their_state
        is_awaited = state is h11.IDLE or (state is h11.SEND_BODY and self.conn.our_state is h11.DONE)
        must_send = is_awaited and self.timeout_keep_alive_task is None
        if not must_send or state is not self._timed_state:
            self._stop_timer()
        if must_send and self._timer is None and not self.transport.is_closing():
            self._timer, self._timed_state = self.loop.call_later(HEAD_TIMEOUT, self._on_timeout), state

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timeout(self) -> None:
        self._timer = None
        if self.transport.is_closing():
            return
        # A client that has sent nothing expects no answer, and one that goes on with a body has had it.
        if self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            headers = [("Content-Type", "text/plain"), ("Content-Length", str(len(LATE))), ("Connection", "close")]
            parts = (h11.Response(status_code=408, headers=headers), h11.Data(data=LATE), h11.EndOfMessage())
            self.transport.write(b"".join(self.conn.send(part) or b"" for part in parts))
        self.transport.close()
