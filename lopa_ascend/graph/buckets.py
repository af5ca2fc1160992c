"""The shapes that decode steps are compiled for.

A graph's shapes never change, so a step runs in the cheapest bucket that holds it, and padding rows fill the rest. Few
buckets compile and capture fast; more buckets would need less padding.

A full bucket computes every block of every slot. A packed one has fewer **block-rows**, a block of one slot each, and
computes what differs (``policy/packed.py``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from lopa_ascend.config import divided_length

FEWEST_SEQUENCES = 4
"""Sequences of the second smallest buckets: steps of up to 4 mostly read weights, so padding costs them little. From
there on numbers double, for arithmetic grows with them, and a 910C sums large messages slowly: some bucket then uses
more than half of any limit of tokens, such as 585 for Dream-7B on 4 ranks (1 MiB a rank)."""
MAX_EOS = 8
"""EOS ids that a request may have in a graph."""


class Bucket(NamedTuple):
    """The shapes of a compiled step. ``sequences`` and ``blocks`` (of a window) differ between the buckets of an
    engine."""

    sequences: int
    blocks: int
    pages: int
    """Of a slot."""
    branches: int
    """Of a sequence, on all ranks."""
    slots: int
    """Branches of a sequence on one rank."""
    block_length: int
    """Positions of the longest block."""
    max_blocks: int
    """Of any bucket's window."""
    full_attention: bool = False
    """All queries of a window see the same keys; otherwise those of each block do."""
    max_queries: int | None = None
    """Most queries of an attention entry; None: no limit."""
    logit_shift: int = 1
    """See ``ModelProperties``."""
    rows: int | None = None
    """Block-rows of a packed bucket, fewer than the blocks of all slots; None: the bucket is full."""

    @property
    def spans(self) -> int:
        """Parts of a slot whose queries see the same keys: attention entries, unless ``max_queries`` divides these."""
        return 1 if self.full_attention else self.blocks

    @property
    def entry_lengths(self) -> tuple[int, ...]:
        """Queries of each attention entry of a span."""
        return divided_length(self.cells // self.spans, self.max_queries)

    @property
    def entries(self) -> int:
        return self.spans * len(self.entry_lengths)

    @property
    def cells(self) -> int:
        """Cells of a window. A cell is the place of one generated position."""
        return self.blocks * self.block_length

    @property
    def tokens(self) -> int:
        """Of a step on one rank."""
        return self.writes if self.rows is None else self.rows * self.block_length

    @property
    def writes(self) -> int:
        return self.sequences * self.slots * self.cells

    @property
    def name(self) -> str:
        rows = "" if self.rows is None else f"_rows{self.rows}"
        return f"sequences{self.sequences}_blocks{self.blocks}{rows}_pages{self.pages}"

    @property
    def all_entries(self) -> int:
        if self.rows is not None:
            return self.rows * len(self.entry_lengths)
        return self.sequences * self.slots * self.entries

    @property
    def all_slots(self) -> int:
        return self.sequences * self.slots

    @property
    def tables(self) -> int:
        """Page tables that the host writes: one for each attention entry, or in a packed bucket for each slot."""
        return self.all_entries if self.rows is None else self.all_slots

    @property
    def max_cells(self) -> int:
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
        """Sizes of named dimensions, e.g. "sequences cells"."""
        return tuple(getattr(self, name) for name in dims.split())


@dataclass(frozen=True)
class Buckets:
    declared: tuple[Bucket, ...]
    """Cheapest first."""

    def choose(self, sequences: int, blocks: int, pages: int, rows: int | None = None) -> Bucket | None:
        """The cheapest bucket with at least these sizes; None if there is none. ``rows``: block-rows that the step may
        need; None: it needs a full bucket."""
        for bucket in self.declared:
            if bucket.sequences >= sequences and bucket.blocks >= blocks and bucket.pages >= pages:
                if bucket.rows is None or (rows is not None and bucket.rows >= rows):
                    return bucket
        return None


def declare(shape: Bucket, max_tokens: int, *, packs: bool = False) -> Buckets:
    """The buckets of an engine.

    All have page tables of the same width, which holds the longest sequence: KV lengths, which are inputs of a step,
    decide how many keys attention reads, and a page table that is too wide costs its upload alone.

    Args:
        shape: the largest sizes that any bucket needs.
        max_tokens: most tokens of a step on a rank; the smallest bucket exists even if it has more.
        packs: beside each full bucket there is a packed one of 3/4 of its block-rows, and beside that of the smallest
            window another one of half of them. So block-rows grow by half or by a third from one bucket to the next.
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
    if packs and not shape.full_attention and shape.block_length > 1:
        affordable += [packed for bucket in affordable for packed in _packed(bucket, bucket.blocks == fewest_blocks)]
    return Buckets(tuple(sorted(affordable, key=lambda bucket: (bucket.tokens, bucket.writes, bucket.sequences))))


def _packed(full: Bucket, is_smallest: bool) -> list[Bucket]:
    count = full.all_slots * full.blocks
    rows = {-(-3 * count // 4), *([-(-count // 2)] if is_smallest else [])} - {count}
    return [full._replace(rows=number) for number in rows]


def ladder(most: int) -> list[int]:
    """The numbers of sequences, or of rows, that buckets are declared for."""
    return sorted({1, *_doubled(min(FEWEST_SEQUENCES, most), most)})


def _doubled(first: int, last: int) -> Iterable[int]:
    value = first
    while value < last:
        yield value
        value *= 2
    yield last
