"""The shapes that decode steps are compiled for.

A graph's shapes never change, so a step runs in the cheapest bucket that holds it, and padding rows fill the rest. Few
buckets compile and capture fast; more buckets would need less padding.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from lopa_ascend.config import divided_length

if TYPE_CHECKING:
    from torch import Tensor

SEQUENCES_FACTOR = 4
"""Factor from one number of sequences to the next larger one: steps of few sequences read the weights in most of their
time, so padding costs them little."""
MAX_EOS = 8
"""EOS ids that a request may have in a graph."""


class Bucket(NamedTuple):
    """The shapes of a compiled step. The first two differ between the buckets of an engine."""

    sequences: int
    blocks: int
    """Blocks of a window."""
    pages: int
    """Pages of a slot."""
    branches: int
    """Branches of a sequence on all ranks."""
    slots: int
    """Branches of a sequence on one rank."""
    block_length: int
    """Positions of the longest block."""
    max_blocks: int
    """Blocks of the largest window of any bucket."""
    full_attention: bool = False
    """All queries of a window see the same keys; otherwise those of each block do."""
    max_queries: int | None = None
    """Queries that an attention entry has at most; None for any number."""

    @property
    def spans(self) -> int:
        """Parts of a slot whose queries see the same keys: attention entries, as long as these are not divided."""
        return 1 if self.full_attention else self.blocks

    @property
    def entry_lengths(self) -> tuple[int, ...]:
        """Queries of each attention entry of a span."""
        return divided_length(self.cells // self.spans, self.max_queries)

    @property
    def entries(self) -> int:
        """Attention entries of a slot."""
        return self.spans * len(self.entry_lengths)

    @property
    def cells(self) -> int:
        """Cells of a window: a cell is the place of one generated position."""
        return self.blocks * self.block_length

    @property
    def tokens(self) -> int:
        """Tokens that a rank computes in a step."""
        return self.sequences * self.slots * self.cells

    @property
    def state_sizes(self) -> tuple[int, ...]:
        """Elements of each part of a ``policy.State``."""
        cells, branches = self.sequences * self.cells, self.sequences * self.branches
        return cells, cells, self.sequences * ((1 + MAX_EOS) * self.blocks + 1), branches, branches

    @property
    def name(self) -> str:
        """For messages and for files of compiled graphs."""
        return f"sequences{self.sequences}_blocks{self.blocks}_pages{self.pages}"

    @property
    def dims(self) -> dict[str, int]:
        """The dimensions of a step's tensors, by the letters that ``graph/tensors.py`` uses."""
        return {
            "S": self.sequences,
            "B": self.branches,
            "R": self.slots,
            "W": self.blocks,
            "L": self.block_length,
            "C": self.cells,
            "P": self.pages,
            "M": self.max_blocks,
            "T": self.tokens,
            "A": self.sequences * self.slots * self.entries,
            "K": 1 + MAX_EOS,
            "U": (self.max_blocks - self.blocks) * self.block_length,
            "F": MaskLimits(self.max_blocks).size,
            "Q": self.state_sizes[2],
            "G": sum(self.state_sizes),
            # Tokens and guesses of the largest window; blank [3] and the number of opened blocks; lookahead cells.
            "X": 2 * self.max_blocks * self.block_length + 3 + 1 + self.branches,
            "Y": 3 * self.cells,
            "1": 1,
            "2": 2,
            "3": 3,
        }

    def shape(self, dims: str) -> tuple[int, ...]:
        """Sizes of dimensions given as letters, e.g. "S R C"; "S*C" is one dimension."""
        sizes = self.dims
        return tuple(math.prod(sizes[letter] for letter in dim.split("*")) for dim in dims.split())


class MaskLimits(NamedTuple):
    """Columns of ``RequestParams.mask_limits``: how many masks a block may hold for another block to be opened.

    A branch opens a block if none of its blocks holds more masks than its limit, and none an EOS. Which limit a block
    has depends on the number n of opened blocks, which only the device knows: the host writes a base column, and the
    device adds n. With M = ``max_blocks`` the columns are

        0 to M              blocks that are not opened: no limit
        M + 1 to 2 M        opened blocks, from the last one backwards
        2 M + 1 to 3 M + 1  a sequence that may have more than n blocks: no limit
        3 M + 2             a sequence that may not: -1, which no block meets
        3 M + 3 to 4 M + 4  EOS of a block, by the opened blocks of the window: 0
    """

    max_blocks: int

    @classmethod
    def of_size(cls, size: int) -> MaskLimits:
        """The columns of a ``mask_limits`` tensor that has ``size`` of them: the inverse of the property ``size``."""
        return cls((size - 5) // 4)

    @property
    def size(self) -> int:
        """Number of columns."""
        return 4 * self.max_blocks + 5

    def by_distance(self, distance: int) -> int:
        """Column of the opened block that is the ``distance``-th from the end, 1 for the last one."""
        return self.max_blocks + distance

    @property
    def no_room(self) -> int:
        """Column of a sequence that may have no more blocks."""
        return 3 * self.max_blocks + 2

    def base_by_distance(self, blocks: Tensor) -> Tensor:
        """Base columns for ``blocks``: of n opened blocks, block b is the (n - b)-th from the end."""
        return self.by_distance(0) - blocks

    def base_by_room(self, max_open: Tensor) -> Tensor:
        """Base columns for sequences that may have ``max_open`` blocks: with so many opened ones ``no_room``."""
        return self.no_room - max_open

    def base_of_ends(self, start: Tensor) -> Tensor:
        """Base columns for the EOS of sequences whose windows begin with block ``start``."""
        return self.no_room + 1 - start


@dataclass(frozen=True)
class Buckets:
    """The buckets of an engine."""

    declared: tuple[Bucket, ...]
    """In the order of their cost."""

    def choose(self, sequences: int, blocks: int, pages: int) -> Bucket | None:
        """The cheapest bucket with at least these sizes; None if there is none."""
        for bucket in self.declared:
            if bucket.sequences >= sequences and bucket.blocks >= blocks and bucket.pages >= pages:
                return bucket
        return None


def declare(shape: Bucket, max_tokens: int) -> Buckets:
    """The buckets of an engine.

    All have page tables of the same width, which holds the longest sequence: how many keys attention reads is decided
    by KV lengths, which are inputs of a step, and a page table that is too wide costs its upload alone.

    Args:
        shape: the largest sizes that any bucket needs.
        max_tokens: the most tokens that a rank may compute in a step; the smallest bucket exists even if it has more.
    """
    blocks_for_branches = -(-shape.branches // shape.block_length)  # a window has a cell for each branch at least
    fewest_blocks = min(max(2, blocks_for_branches), shape.max_blocks)
    buckets = [
        shape._replace(sequences=sequences, blocks=blocks)
        for sequences in _up_to(1, shape.sequences, SEQUENCES_FACTOR)
        for blocks in _up_to(fewest_blocks, shape.max_blocks, factor=2)
    ]
    smallest = min(bucket.tokens for bucket in buckets)
    affordable = [bucket for bucket in buckets if bucket.tokens <= max(max_tokens, smallest)]
    return Buckets(tuple(sorted(affordable, key=lambda bucket: (bucket.tokens, bucket.sequences))))


def _up_to(first: int, last: int, factor: int) -> Iterable[int]:
    """``first`` times powers of ``factor``, and at the end ``last``."""
    value = first
    while value < last:
        yield value
        value *= factor
    yield last
