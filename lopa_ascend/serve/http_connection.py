"""A connection of the HTTP server whose client must send the head of a request within a time."""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_TIMEOUT = 10.0
"""Most seconds for the head of a request, from the connection or from the first byte after the answer before."""
LATE = b"the head of the request did not arrive in time"


class HttpConnection(H11Protocol):
    """uvicorn's connection with a time limit for heads. Answers are limited elsewhere, idle connections by uvicorn.

    It always uses the parser h11, whatever is installed: parsers differ in how they treat malformed requests.
    """

    _head_timer: asyncio.TimerHandle | None = None
    """Runs while the head of a request is awaited."""

    # uvicorn narrows the transport's type, as no other kind reaches it.
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch_head()

    def handle_events(self) -> None:
        super().handle_events()
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def _watch_head(self) -> None:
        """Starts the timer if a head is awaited, and stops it if not. After an answer uvicorn's own timer runs."""
        if self.conn.their_state is not h11.IDLE or self.timeout_keep_alive_task is not None:
            self._stop_timer()
        elif self._head_timer is None and not self.transport.is_closing():
            self._head_timer = self.loop.call_later(HEAD_TIMEOUT, self._on_timeout)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _on_timeout(self) -> None:
        self._head_timer = None
        if self.transport.is_closing():
            return
        if self.conn.trailing_data[0]:  # a client that has sent nothing expects no answer
            headers = [("Content-Type", "text/plain"), ("Content-Length", str(len(LATE))), ("Connection", "close")]
            parts = (h11.Response(status_code=408, headers=headers), h11.Data(data=LATE), h11.EndOfMessage())
            self.transport.write(b"".join(self.conn.send(part) or b"" for part in parts))
        self.transport.close()
