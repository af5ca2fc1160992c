"""The shapes that decode steps are compiled for.

A graph's shapes never change, so a step runs in the smallest bucket that holds it and fills the rest up with rows that
count nothing. Few buckets compile and capture fast; more of them would fill up less.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

PAGE_STEP = 8
"""From one number of pages to the next: a table that is too wide costs only its upload."""
FEWEST_PAGES = 16


class Bucket(NamedTuple):
    """Shapes of a step: S ``sequences`` with windows of W ``blocks`` and slots of P ``pages``. The rest is the same in
    all buckets of an engine: B ``branches``, of which a rank computes R in its ``slots``, blocks of at most L
    positions (``length``), and windows of at most M blocks (``capacity``), which are one attention entry if ``full``,
    else one a block."""

    sequences: int
    blocks: int
    pages: int
    branches: int
    slots: int
    length: int
    capacity: int
    full: bool = False

    @property
    def entries(self) -> int:
        """Attention entries of a slot."""
        return 1 if self.full else self.blocks

    @property
    def cells(self) -> int:
        """C: positions of a window."""
        return self.blocks * self.length

    @property
    def tokens(self) -> int:
        """Computed by a rank in each step."""
        return self.sequences * self.slots * self.cells

    @property
    def name(self) -> str:
        return f"sequences{self.sequences}_blocks{self.blocks}_pages{self.pages}"


@dataclass(frozen=True)
class Buckets:
    """The declared ones, in the order of their cost."""

    declared: tuple[Bucket, ...]

    def choose(self, sequences: int, blocks: int, pages: int) -> Bucket | None:
        """The cheapest that holds so much; None if there is none."""
        for bucket in self.declared:
            if bucket.sequences >= sequences and bucket.blocks >= blocks and bucket.pages >= pages:
                return bucket
        return None


def declare(shape: Bucket, max_tokens: int) -> Buckets:
    """The buckets of an engine: ``shape`` has the largest number of each, and none but the smallest computes more than
    ``max_tokens`` on a rank."""
    least = min(max(2, -(-shape.branches // shape.length)), shape.capacity)
    buckets = [
        shape._replace(sequences=sequences, blocks=blocks, pages=pages)
        for sequences in _doubled(1, shape.sequences)
        for blocks in _doubled(least, shape.capacity)
        for pages in _up_to(FEWEST_PAGES, shape.pages, PAGE_STEP)
    ]
    smallest = min(bucket.tokens for bucket in buckets)
    held = [bucket for bucket in buckets if bucket.tokens <= max(max_tokens, smallest)]
    return Buckets(tuple(sorted(held, key=lambda bucket: (bucket.tokens, bucket.sequences, bucket.pages))))


def _doubled(first: int, last: int) -> Iterable[int]:
    return _up_to(first, last, 2)


def _up_to(first: int, last: int, factor: int) -> Iterable[int]:
    """``first`` times powers of ``factor``, and at the end ``last``."""
    value = first
    while value < last:
        yield value
        value *= factor
    yield last
