"""Takes in the bodies of requests: reads them within a limit of time and memory, and has threads work on them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from typing import TypeVar

from starlette.requests import Request

from lopa_ascend.serve.api.errors import CLOSE, ApiError, unavailable
from lopa_ascend.serve.api.workers import SMALL_BODY, Workers

T = TypeVar("T")

PIECE_TIMEOUT = 10.0
"""Most seconds between two pieces of a body."""
BODY_TIMEOUT = 20.0
"""Most seconds for a small body."""
MIN_RATE = 64 * 2**10
"""Bytes a second that a client must send in the mean after ``BODY_TIMEOUT``."""
MAX_READ_FACTOR = 8
"""A body that is too large is read and thrown away up to this many times the limit, because clients look for the answer
only after they have sent everything. Beyond that the connection is closed."""


class BodyMemory:
    """Counts the bytes that large bodies hold, from their first piece until their request is planned. Small bodies
    are not counted, so that they are read while large ones take all the room.

    Args:
        limit: most bytes of all large bodies together.
    """

    def __init__(self, limit: int):
        self.limit, self.used = limit, 0

    def has_taken(self, before: int, after: int) -> bool:
        """Whether a body that has grown from ``before`` to ``after`` bytes finds room; if not, nothing has changed."""
        more = _counted(after) - _counted(before)
        if self.used + more > self.limit:
            return False
        self.used += more
        return True

    def release(self, size: int) -> None:
        """Forgets a body of ``size`` bytes."""
        self.used -= _counted(size)


def _counted(size: int) -> int:
    return size if size > SMALL_BODY else 0


class Intake:
    """Takes in the bodies of all requests.

    Args:
        max_body_size: most bytes of a body.
        max_total_body_size: most bytes of all large bodies together.
        workers: the threads that work on bodies.
    """

    def __init__(self, max_body_size: int, max_total_body_size: int, workers: Workers):
        self.workers = workers
        self.memory = BodyMemory(max_total_body_size)
        self.max_body_size = max_body_size

    async def take(self, request: Request, work: Callable[[bytes], T]) -> T:
        """What ``work`` makes of the body of a request, in a thread, because large bodies take seconds.

        Raises:
            ApiError: 400, the content type is not JSON; 408, the client is too slow; 413, the body is too large; 503
                "queue_full", there is no room for it now.
            ClientDisconnect: the client closed the connection.
            Exception: what ``work`` raises.
        """
        body = await self._read(request)
        try:
            return await self.workers.run(len(body), lambda: work(body))
        finally:
            self.memory.release(len(body))

    async def _read(self, request: Request) -> bytes:
        """The whole body, which has its room in ``memory``. Raises as ``take`` does."""
        content_type = request.headers.get("content-type", "")
        content_length = request.headers.get("content-length", "0")
        size = int(content_length) if content_length.isdecimal() else 0
        if size > MAX_READ_FACTOR * self.max_body_size:
            raise self._too_large(size)
        body = await self._read_pieces(request)
        if content_type.partition(";")[0].strip().lower() != "application/json":
            self.memory.release(len(body))
            message = f"the content type is {content_type!r}; send Content-Type: application/json"
            raise ApiError(HTTPStatus.BAD_REQUEST, message, code="invalid_content_type")
        return body

    async def _read_pieces(self, request: Request) -> bytes:
        body, size, refused = bytearray(), 0, False
        pieces = aiter(request.stream())
        now = asyncio.get_running_loop().time
        start, kept = now(), False
        try:
            while True:
                deadline = start + BODY_TIMEOUT + size / MIN_RATE
                try:
                    piece = await asyncio.wait_for(anext(pieces), min(PIECE_TIMEOUT, deadline - now()))
                except StopAsyncIteration:
                    break
                except asyncio.TimeoutError:
                    message = f"the body did not arrive in time; {size} bytes did"
                    raise ApiError(HTTPStatus.REQUEST_TIMEOUT, message, code="body_timeout", headers=CLOSE) from None
                size += len(piece)
                if size > MAX_READ_FACTOR * self.max_body_size:
                    break
                if not refused and size <= self.max_body_size and self.memory.has_taken(len(body), size):
                    body += piece
                else:  # read on, for the sake of the answer
                    refused = True
                    self.memory.release(len(body))
                    body.clear()
            if size > self.max_body_size:
                raise self._too_large(size)
            if refused:
                message = f"the bodies of other requests take the {self.memory.limit} bytes that there are for them"
                raise unavailable(message, "queue_full")
            kept = True
            return bytes(body)
        finally:
            if not kept:
                self.memory.release(len(body))

    def _too_large(self, size: int) -> ApiError:
        message = f"the body has {size} bytes or more; this server takes at most {self.max_body_size}"
        headers = CLOSE if size > MAX_READ_FACTOR * self.max_body_size else None
        return ApiError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message, code="request_too_large", headers=headers)
