"""Threads that take turns at work for processors, and leave their turn to others while they wait for a process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_own = threading.local()


@contextmanager
def turn(turns: threading.Semaphore) -> Iterator[None]:
    """Encloses work of this thread, which waits until ``turns`` has room for it."""
    with turns:
        _own.turns = turns
        try:
            yield
        finally:
            del _own.turns


@contextmanager
def aside() -> Iterator[None]:
    """Encloses a wait in such work, or in any other."""
    turns: threading.Semaphore | None = getattr(_own, "turns", None)
    if turns is None:
        yield
        return
    turns.release()
    try:
        yield
    finally:
        turns.acquire()
