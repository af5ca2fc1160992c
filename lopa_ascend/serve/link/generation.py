"""One HTTP request in the engine, as the HTTP process sees it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from http import HTTPStatus

import msgspec

from lopa_ascend.core import Request
from lopa_ascend.serve.http.api_error import ApiError
from lopa_ascend.types import Progress, Update

MAX_UNREAD = 1024
"""Updates that the reader of a ``trace`` may leave unread; other updates are merged."""
SLOW_READER = f"the stream was ended: its reader left {MAX_UNREAD} events unread"


class Generation:
    """The running choices of one HTTP request. Updates that a slow reader has not read yet are merged.

    Args:
        trace: each forward pass stays an update of its own; too many unread ones end the generation.
        take_out: takes the choices out of the engine when the generation fails.
        streams: the reader passes each update on, so nothing of it can be taken back.
    """

    def __init__(
        self,
        request_id: str,
        choices: Sequence[Request],
        trace: bool,
        take_out: Callable[[Generation], object],
        streams: bool = False,
    ):
        self.request_id, self.trace, self.streams = request_id, trace, streams
        self.choices = [
            msgspec.structs.replace(choice, request_id=f"{request_id}-{index}", trace=trace)
            for index, choice in enumerate(choices)
        ]
        self.ended = False
        self.engines = [""] * len(choices)
        """Which of several engines has a choice, once an update has come."""
        self._take_out = take_out
        self._unread: dict[tuple[int, int], tuple[Update, Progress]] = {}
        """By index of the choice and, with ``trace``, number of the forward pass."""
        self._error: Exception | None = None
        self._news = asyncio.Event()
        """Something is unread, or an error has occurred."""
        self._unfinished = len(choices)

    async def updates(self) -> AsyncIterator[tuple[int, Update, Progress]]:
        """Index of a choice, what a step did to it, and what of its text is final, until each has its
        ``Progress.output``.

        Raises what was given to ``fail``. An ApiError is "engine_error" (500), "engine_dead" or "service_unavailable"
        (503), or "timeout" (504).
        """
        remaining = len(self.choices)
        while remaining:
            await self._news.wait()
            self._news.clear()
            while self._unread:
                key = next(iter(self._unread))
                update, progress = self._unread.pop(key)
                if progress.output is not None:
                    remaining -= 1
                yield key[0], update, progress
            if self._error is not None and remaining:
                raise self._error

    def fail(self, error: Exception) -> None:
        """The reader gets the unread updates, and then this exception."""
        if not self.ended:
            self.ended, self._error = True, error
            self._take_out(self)
            self._news.set()

    def post(self, index: int, update: Update, progress: Progress) -> None:
        if self.trace and len(self._unread) >= MAX_UNREAD:
            self.fail(ApiError(HTTPStatus.SERVICE_UNAVAILABLE, SLOW_READER, code="slow_reader"))
            return
        key = (index, update.num_forwards if self.trace else 0)
        if key in self._unread:
            before, _ = self._unread.pop(key)
            update = replace(update, tokens=before.tokens + update.tokens, record=update.record or before.record)
        self._unread[key] = update, progress
        if progress.output is not None:
            self._unfinished -= 1
        self.ended = self.ended or self._unfinished == 0
        self._news.set()
