"""Threads in which bodies are parsed, chat templates rendered and texts tokenized, so that the event loop goes on."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from lopa_ascend.serve.api.errors import unavailable

T = TypeVar("T")

SMALL_BODY = 64 * 2**10
"""Bytes of the largest body that counts as small."""
SMALL_THREADS = 4
MAX_QUEUED_SMALL = 1024
"""Small bodies that may wait."""


class Lane:
    """Worker threads for one kind of bodies, with a queue of limited length.

    Args:
        kind: "small" or "large", for messages and metrics.
        threads: bodies that are worked on at the same time.
        max_queued: further bodies that may wait.
    """

    def __init__(self, kind: str, threads: int, max_queued: int):
        self.kind = kind
        self.num_running = 0
        """Bodies that are worked on."""
        self.num_begun = 0
        """Bodies whose work has begun."""
        self.num_refused = 0
        """Bodies for which there was no room, in memory or in the queue."""
        self.seconds_waited = 0.0
        """Time between arrival and begin, summed over ``num_begun`` bodies."""
        self._threads, self._max_queued = threads, max_queued
        self._executor = ThreadPoolExecutor(threads, f"{kind}-bodies")
        self._lock = threading.Lock()
        self._waiting: dict[object, float] = {}
        """When each waiting body arrived, in seconds of ``time.monotonic``, the oldest first."""

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def longest_wait(self) -> float:
        """Seconds for which the oldest waiting body has waited; 0 if none waits."""
        with self._lock:
            oldest = next(iter(self._waiting.values()), None)
        return 0.0 if oldest is None else time.monotonic() - oldest

    async def run(self, work: Callable[[], T]) -> T:
        """What ``work`` returns or raises.

        Raises:
            ApiError: 503 "queue_full", too many bodies wait.
        """
        if self.num_running + self.num_waiting >= self._threads + self._max_queued:
            self.num_refused += 1
            found = f"all threads for {self.kind} bodies are busy, and no more than {self._max_queued} bodies may wait"
            raise unavailable(f"{found}; try again later", "queue_full")
        body, arrived = object(), time.monotonic()
        with self._lock:
            self._waiting[body] = arrived

        def begin() -> T:
            with self._lock:
                self._waiting.pop(body, None)  # no longer there if the task has just been cancelled
                self.num_running += 1
                self.num_begun += 1
                self.seconds_waited += time.monotonic() - arrived
            try:
                return work()
            finally:
                with self._lock:
                    self.num_running -= 1

        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, begin)
        finally:
            with self._lock:  # still there if the task was cancelled before its turn
                self._waiting.pop(body, None)

    async def close(self) -> None:
        """Drops bodies that wait, and returns when none is worked on any more."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self._executor.shutdown)


class Workers:
    """A lane for small bodies and one for large ones: no small body waits for a large one.

    Args:
        max_queued_large: large bodies that may wait.
    """

    def __init__(self, max_queued_large: int):
        # Parsing holds the interpreter's lock for long, so more threads for large bodies would only slow the others.
        large_threads = max(1, (os.cpu_count() or 1) // 8)
        self.lanes = (
            Lane("small", SMALL_THREADS, MAX_QUEUED_SMALL),
            Lane("large", large_threads, max_queued_large),
        )

    def lane(self, size: int) -> Lane:
        """The lane for a body of ``size`` bytes."""
        small, large = self.lanes
        return large if size > SMALL_BODY else small

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """What ``work`` on a body of ``size`` bytes returns or raises. Raises as ``Lane.run`` does."""
        return await self.lane(size).run(work)

    def problem(self, timeout: float) -> str | None:
        """What is wrong if a small body has waited for longer than ``timeout`` seconds; None if none has."""
        wait = self.lanes[0].longest_wait()
        if wait <= timeout:
            return None
        return f"a request has waited for {wait:.0f} s for a thread that reads it (watchdog timeout: {timeout:g} s)"

    async def close(self) -> None:
        """Drops bodies that wait, and returns when none is worked on any more."""
        await asyncio.gather(*(lane.close() for lane in self.lanes))
