"""The shapes that decode steps are compiled for.

A graph's shapes never change, so a step runs in the cheapest bucket that holds it, and padding rows fill the rest. Few
buckets compile and capture fast; more buckets would need less padding.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from lopa_ascend.config import divided_length

FEWEST_SEQUENCES = 4
"""Sequences of the second smallest buckets: steps of up to 4 read the weights in most of their time, so padding costs
them little. From there on numbers double, for arithmetic grows with them, and a 910C sums large messages slowly: of any
limit of tokens, such as 585 of Dream-7B on 4 ranks (1 MiB a rank), some bucket then uses more than half."""
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
    logit_shift: int = 1
    """See ``ModelProperties``."""

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
    def writes(self) -> int:
        """Cache positions that it may write."""
        return self.tokens

    @property
    def name(self) -> str:
        """For messages and for files of compiled graphs."""
        return f"sequences{self.sequences}_blocks{self.blocks}_pages{self.pages}"

    @property
    def all_entries(self) -> int:
        """Attention entries of a step on one rank."""
        return self.sequences * self.slots * self.entries

    @property
    def max_cells(self) -> int:
        """Cells of the largest window of any bucket."""
        return self.max_blocks * self.block_length

    @property
    def max_ends(self) -> int:
        return MAX_EOS

    @property
    def one(self) -> int:
        return 1

    @property
    def state_size(self) -> int:
        """Columns of a packed ``policy.State``: tokens, guesses, numbers of opened blocks, lookahead cells."""
        return 2 * self.max_cells + 2 * self.branches

    def shape(self, dims: str) -> tuple[int, ...]:
        """Sizes of dimensions that are given by the names of fields and properties, e.g. "sequences cells"."""
        return tuple(getattr(self, name) for name in dims.split())


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
        for sequences in ladder(shape.sequences)
        for blocks in _doubled(fewest_blocks, shape.max_blocks)
    ]
    smallest = min(bucket.tokens for bucket in buckets)
    affordable = [bucket for bucket in buckets if bucket.tokens <= max(max_tokens, smallest)]
    return Buckets(tuple(sorted(affordable, key=lambda bucket: (bucket.tokens, bucket.sequences))))


def ladder(most: int) -> list[int]:
    """The numbers of sequences, or of rows, that buckets are declared for."""
    return sorted({1, *_doubled(min(FEWEST_SEQUENCES, most), most)})


def _doubled(first: int, last: int) -> Iterable[int]:
    """``first`` times powers of 2, and at the end ``last``."""
    value = first
    while value < last:
        yield value
        value *= 2
    yield last
