"""Threads that take turns at work on the CPU, and give up their turn while they wait for another process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_own = threading.local()


@contextmanager
def turn(turns: threading.Semaphore) -> Iterator[None]:
    """Encloses work that waits for its turn."""
    with turns:
        _own.turns = turns
        try:
            yield
        finally:
            del _own.turns


@contextmanager
def aside() -> Iterator[None]:
    """Encloses a wait; gives up this thread's turn if it has one."""
    turns: threading.Semaphore | None = getattr(_own, "turns", None)
    if turns is None:
        yield
        return
    turns.release()
    try:
        yield
    finally:
        turns.acquire()
