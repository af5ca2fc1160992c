"""Takes in the bodies of requests: reads them within a limit of size and time, and has threads work on them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from typing import TypeVar

from starlette.requests import Request

from lopa_ascend.serve.api.errors import CLOSE, ApiError

T = TypeVar("T")

BODY_TIMEOUT = 60.0
"""Most seconds in which a body must arrive."""
MAX_READ_FACTOR = 8
"""A body that is too large is read and thrown away up to this many times the limit, because clients look for the answer
only after they have sent everything. Beyond that the connection is closed."""
THREADS = 4
"""Bodies that are parsed and tokenized at the same time."""


class Intake:
    """Takes in the bodies of all requests. They hold at most ``max_body_size`` bytes for each connection.

    Args:
        max_body_size: most bytes of a body.
    """

    def __init__(self, max_body_size: int):
        self._max_body_size = max_body_size
        self._threads = ThreadPoolExecutor(THREADS, "bodies")

    async def take(self, request: Request, work: Callable[[bytes], T]) -> T:
        """What ``work`` makes of the body of a request, in a thread, so that the event loop goes on.

        Raises:
            ApiError: 400, the content type is not JSON; 408, the client is too slow; 413, the body is too large.
            ClientDisconnect: the client closed the connection.
            Exception: what ``work`` raises.
        """
        content_length = request.headers.get("content-length", "0")
        size = int(content_length) if content_length.isdecimal() else 0
        if size > MAX_READ_FACTOR * self._max_body_size:
            raise self._too_large(size)
        body = bytearray()
        try:
            size = await asyncio.wait_for(self._read(request, body), BODY_TIMEOUT)
        except asyncio.TimeoutError:
            message = f"the body did not arrive within {BODY_TIMEOUT:g} s"
            raise ApiError(HTTPStatus.REQUEST_TIMEOUT, message, code="body_timeout", headers=CLOSE) from None
        if size > self._max_body_size:
            raise self._too_large(size)
        content_type = request.headers.get("content-type", "")
        if content_type.partition(";")[0].strip().lower() != "application/json":
            message = f"the content type is {content_type!r}; send Content-Type: application/json"
            raise ApiError(HTTPStatus.BAD_REQUEST, message, code="invalid_content_type")
        content = bytes(body)
        body.clear()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, content)

    async def _read(self, request: Request, body: bytearray) -> int:
        """Appends what arrives to ``body``, which stays empty if it is too large, and returns how many bytes have
        arrived: at the end, or when they are far too many."""
        size = 0
        async for piece in request.stream():
            size += len(piece)
            if size <= self._max_body_size:
                body += piece
            else:
                body.clear()
            if size > MAX_READ_FACTOR * self._max_body_size:
                break
        return size

    def _too_large(self, size: int) -> ApiError:
        message = f"the body has {size} bytes or more; this server takes at most {self._max_body_size}"
        headers = CLOSE if size > MAX_READ_FACTOR * self._max_body_size else None
        return ApiError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message, code="request_too_large", headers=headers)

    async def close(self) -> None:
        """Drops bodies that wait, and returns when none is worked on any more."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self._threads.shutdown)
