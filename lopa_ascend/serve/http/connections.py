"""The connections of the HTTP server: how many there may be, and how long their clients may do nothing."""

from __future__ import annotations

import asyncio
import logging
import re
import resource
import time
from http import HTTPStatus

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from lopa_ascend.serve.http.api_error import ApiError
from lopa_ascend.serve.http.encoding import encode

HEAD_TIMEOUT = 10.0
"""Most seconds in which a client must send the head of a request, or what is left of a body after its answer."""
STALL_TIMEOUT = 60.0
"""Most seconds for which a part of an answer, of 64 KiB at most, waits for a client that does not read."""
MAX_HEAD = 2**16
"""Most bytes of a head, of the fields after a body, or of what extends one chunk."""
LONG_HEAD = "The head of the request is too long."
HEADER_FRAMING = len(": \r\n")
"""Bytes of a field of a head beside its name and value."""
UPGRADE = re.compile(rb"\r\nupgrade:[^\r\n]*", re.IGNORECASE)
SPARE_CONNECTIONS = 1024
"""Connections beside those of the requests that may wait."""
MAX_WARNINGS = 1000
WARNING_INTERVAL = 60.0
"""Least seconds between equal log lines."""

NO_FILE_LEFT = "socket.accept() out of system resource"
"""The beginning of what asyncio logs, with a traceback, if no file is left for a connection."""

REFUSAL = "HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"


class Connection(HttpToolsProtocol):
    """Ends if no request comes, its head is too long, or nobody reads the answer.

    Beyond ``limit_concurrency`` connections uvicorn answers 503; beyond twice as many they are closed at once.
    """

    _is_in_message = False
    """The head of a request has come, and not yet all of its body."""
    _head_size = 0
    """Bytes since the last head, or since some of a body came."""
    _head_timer: asyncio.TimerHandle | None = None
    """Runs while the client must send something."""
    _stall_timer: asyncio.TimerHandle | None = None
    """Runs while a part of an answer waits for the client."""

    # uvicorn narrows the transport's type, as no other kind reaches it.
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._pieces: list[bytes] = []
        """What the parser has found of a body."""
        # So pause_writing is called whenever anything has to wait. With 0 asyncio's TLS pauses when nothing waits, too.
        transport.set_write_buffer_limits(high=1)
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT, transport.abort)
        if self.limit_concurrency is not None and len(self.connections) > 2 * self.limit_concurrency:
            self.logger.warning("Too many connections.")
            transport.abort()

    def data_received(self, data: bytes) -> None:
        if not self._is_in_message:
            # The parser takes what follows an Upgrade for another protocol, and so it would lose the body.
            head, end, rest = data.partition(b"\r\n\r\n")
            data = UPGRADE.sub(b"", head) + end + rest
        self._head_size += len(data)
        super().data_received(data)
        self._pass_on()
        if self._head_size > MAX_HEAD:
            self.send_400_response(LONG_HEAD)
        if self.cycle is not None and not self.cycle.response_complete:
            _stop(self._head_timer)
            self._head_timer = None
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_TIMEOUT, self.transport.abort)

    def send_400_response(self, msg: str) -> None:
        """Answers what is not HTTP, unless it follows an answer: the rest of a body that was answered early."""
        if self.transport.is_closing():
            return
        status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE if msg is LONG_HEAD else HTTPStatus.BAD_REQUEST
        if not (self._is_in_message and self.cycle.response_started):
            body = encode(ApiError(status, msg, code="invalid_headers").body())
            self.transport.write((REFUSAL % (status, status.phrase, len(body))).encode() + body)
        self.transport.close()

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._is_in_message:  # what follows the body, nobody reads
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if len(self.url) + sum(len(name) + len(value) + HEADER_FRAMING for name, value in self.headers) > MAX_HEAD:
            self.send_400_response(LONG_HEAD)
            raise ValueError(LONG_HEAD)  # it came in one piece, so the parser must stop
        self._is_in_message, self._head_size = True, 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)

    def _pass_on(self) -> None:
        """uvicorn copies all of a body that waits for each piece, and 256 KiB can come in 40,000 chunks at once."""
        if self._pieces:
            super().on_body(b"".join(self._pieces))
            self._pieces.clear()
            self._head_size = 0

    def on_message_complete(self) -> None:
        self._pass_on()
        self._is_in_message = False
        _stop(self._head_timer)  # of the rest of a body after its answer
        self._head_timer = None
        super().on_message_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        _stop(self._head_timer)
        _stop(self._stall_timer)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall_timer = self.loop.call_later(STALL_TIMEOUT, self.transport.abort)

    def resume_writing(self) -> None:
        _stop(self._stall_timer)
        super().resume_writing()


def _stop(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


def connection_limit(max_waiting: int) -> int:
    """Most connections that are answered. Raises the limit of open files as far as the system allows."""
    _, num_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    if num_files != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (num_files, num_files))
        return min(num_files // 4, max_waiting + SPARE_CONNECTIONS)  # twice as many are open before any is closed
    return max_waiting + SPARE_CONNECTIONS


class RareWarnings(logging.Filter):
    """Lets the same warning through once a minute: clients can cause thousands."""

    def __init__(self) -> None:
        super().__init__()
        self._last: dict[str, float] = {}
        """By text: when a warning was last logged."""

    def filter(self, record: logging.LogRecord) -> bool:
        text, now = record.getMessage().partition("\n")[0], time.monotonic()
        if text.startswith(NO_FILE_LEFT):
            record.exc_info = None
        elif record.levelno != logging.WARNING:
            return True
        is_due = now - self._last.get(text, -WARNING_INTERVAL) >= WARNING_INTERVAL
        if is_due:
            if len(self._last) == MAX_WARNINGS:  # clients' words can be in them
                self._last.clear()
            self._last[text] = now
        return is_due
