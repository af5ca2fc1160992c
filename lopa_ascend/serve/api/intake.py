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

    def try_grow(self, before: int, after: int) -> bool:
        """Counts a body that grows from ``before`` to ``after`` bytes, if there is room for it.

        Returns:
            Whether there was room.
        """
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


class IncomingBody:
    """The body of one request while it arrives. ``release`` must follow.

    Args:
        memory: counts what all bodies hold.
        max_size: most bytes that are kept.
    """

    def __init__(self, memory: BodyMemory, max_size: int):
        self.size = 0
        """Bytes that have arrived."""
        self.has_room = True
        """Whether all that has arrived is kept."""
        self._memory, self._max_size = memory, max_size
        self._content = bytearray()
        self._num_counted = 0
        """Bytes that ``memory`` counts for this body."""

    def add(self, piece: bytes) -> None:
        """Keeps a piece that has arrived. When a piece finds no room, all pieces are dropped, and later ones only count
        in ``size``."""
        self.size += len(piece)
        if not self.has_room:
            return
        if self.size <= self._max_size and self._memory.try_grow(self._num_counted, self.size):
            self._num_counted = self.size
            self._content += piece
        else:
            self.release()
            self.has_room = False

    def take_content(self) -> bytes:
        """The bytes that were kept. They count until ``release``, because the caller has them."""
        content = bytes(self._content)
        self._content.clear()
        return content

    def release(self) -> None:
        """Forgets the bytes, and gives their room back."""
        self._content.clear()
        self._memory.release(self._num_counted)
        self._num_counted = 0


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
        self.max_body_size = min(max_body_size, max(SMALL_BODY, max_total_body_size))  # larger ones never find room

    async def take(self, request: Request, work: Callable[[bytes], T]) -> T:
        """What ``work`` makes of the body of a request, in a thread, because large bodies take seconds.

        Raises:
            ApiError: 400, the content type is not JSON; 408, the client is too slow; 413, the body is too large; 503
                "queue_full", there is no room for it now.
            ClientDisconnect: the client closed the connection.
            Exception: what ``work`` raises.
        """
        body = IncomingBody(self.memory, self.max_body_size)
        try:
            await self._read(request, body)
            content = body.take_content()
            return await self.workers.run(len(content), lambda: work(content))
        finally:
            body.release()

    async def _read(self, request: Request, body: IncomingBody) -> None:
        """Reads the whole body. Raises as ``take`` does."""
        content_length = request.headers.get("content-length", "0")
        size = int(content_length) if content_length.isdecimal() else 0
        if size > MAX_READ_FACTOR * self.max_body_size:
            raise self._too_large(size)
        await self._read_pieces(request, body)
        if body.size > self.max_body_size:
            raise self._too_large(body.size)
        if not body.has_room:
            self.workers.lane(body.size).num_refused += 1
            message = f"other bodies take the {self.memory.limit} bytes that there are for large ones; try again later"
            raise unavailable(message, "queue_full")
        content_type = request.headers.get("content-type", "")
        if content_type.partition(";")[0].strip().lower() != "application/json":
            message = f"the content type is {content_type!r}; send Content-Type: application/json"
            raise ApiError(HTTPStatus.BAD_REQUEST, message, code="invalid_content_type")

    async def _read_pieces(self, request: Request, body: IncomingBody) -> None:
        """Reads to the end of the body, so that the client looks for the answer, or until it is far too large."""
        pieces = aiter(request.stream())
        now = asyncio.get_running_loop().time
        start = now()
        while body.size <= MAX_READ_FACTOR * self.max_body_size:
            deadline = start + BODY_TIMEOUT + body.size / MIN_RATE
            try:
                body.add(await asyncio.wait_for(anext(pieces), min(PIECE_TIMEOUT, deadline - now())))
            except StopAsyncIteration:
                return
            except asyncio.TimeoutError:
                message = f"the body did not arrive in time; {body.size} bytes did"
                raise ApiError(HTTPStatus.REQUEST_TIMEOUT, message, code="body_timeout", headers=CLOSE) from None

    def _too_large(self, size: int) -> ApiError:
        message = f"the body has {size} bytes or more; this server takes at most {self.max_body_size}"
        headers = CLOSE if size > MAX_READ_FACTOR * self.max_body_size else None
        return ApiError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message, code="request_too_large", headers=headers)
