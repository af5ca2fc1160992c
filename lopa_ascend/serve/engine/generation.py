"""One HTTP request in the engine, from the side of who answers it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace

from lopa_ascend.config import DecodingParams
from lopa_ascend.types import Progress, Update


@dataclass(frozen=True)
class Choice:
    """One generation of an HTTP request; a request has one for each of its prompts times ``n``. The choices of
    one prompt share its list."""

    prompt_token_ids: list[int]
    params: DecodingParams


class Generation:
    """The choices of one HTTP request under way. A slow reader gets several updates of a choice as one, except in a
    trace. ``end`` is called when it is aborted, to take its choices out of the engine."""

    def __init__(self, request_id: str, choices: Sequence[Choice], trace: bool, end: Callable[[Generation], object]):
        self.request_id, self.choices, self.trace = request_id, choices, trace
        self.ended = False
        """Nothing more will come but what is unread."""
        self._end = end
        self._unread: dict[tuple[int, int], tuple[Update, Progress]] = {}
        self._error: Exception | None = None
        self._arrived = asyncio.Event()
        self._unfinished = len(choices)

    @property
    def choice_ids(self) -> list[str]:
        """The engine's request ids."""
        return [f"{self.request_id}-{index}" for index in range(len(self.choices))]

    async def progress(self) -> AsyncIterator[tuple[int, Update, Progress]]:
        """Yields (index of the choice, what a step made of it, what of it is final now) until every choice has its
        ``Progress.output``. A choice that ``EngineClient.abort`` ended has the finish reason "abort".

        Raises:
            ApiError: 500 "engine_error", the request failed in the engine; 503 "engine_dead" or "service_unavailable",
                the engine died or the server stops; 504 "timeout", it took longer than the server allows.
            Exception: what was given to ``abort``.
        """
        remaining = len(self.choices)
        while remaining:
            await self._arrived.wait()
            self._arrived.clear()
            while self._unread:
                index, _ = key = next(iter(self._unread))
                update, progress = self._unread.pop(key)
                remaining -= progress.output is not None
                yield index, update, progress
            if self._error is not None and remaining:
                raise self._error

    def abort(self, error: Exception) -> None:
        """Ends it within one step; whoever reads its progress gets ``error`` after what is final already."""
        if not self.ended:
            self.ended, self._error = True, error
            self._end(self)
            self._arrived.set()

    def post(self, index: int, update: Update, progress: Progress) -> None:
        """Gives the reader what a step made of a choice."""
        key = (index, update.num_forwards if self.trace else 0)
        if key in self._unread:
            before = self._unread.pop(key)[0]
            token_ids, max_probs = before.token_ids + update.token_ids, before.max_probs + update.max_probs
            record = update.record or before.record
            update = replace(update, token_ids=token_ids, max_probs=max_probs, record=record)
        self._unread[key] = update, progress
        self._unfinished -= progress.output is not None
        self.ended = self.ended or self._unfinished == 0
        self._arrived.set()
