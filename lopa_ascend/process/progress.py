"""Progress of long work at start-up: a bar in a terminal, else a line in the log now and then."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from tqdm import tqdm

T = TypeVar("T")

logger = logging.getLogger(__name__)

INTERVAL = 10.0
"""Least seconds between two lines in the log."""


def progress(items: Iterable[T], what: str, total: int, unit: str, *, delay: float = 0.0) -> Iterator[T]:
    """Yields the items, and shows how many are done, from ``delay`` seconds on.

    Args:
        what: e.g. "loading".
        unit: the name of an item.
    """
    if sys.stderr is not None and sys.stderr.isatty():  # None: it was closed when Python started
        yield from tqdm(items, what, total, unit=unit, delay=delay)
        return
    start = time.monotonic()
    last_line = start + delay - INTERVAL
    for done, item in enumerate(items):
        now = time.monotonic()
        if now - last_line >= INTERVAL:
            last_line = now
            logger.info("%s: %d of %d %ss after %.0f s", what, done, total, unit, now - start)
        yield item
