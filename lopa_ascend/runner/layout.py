"""Lays the rows of a step's sequences out as one flat batch of tokens, attention entries and cache positions.

Positions that branches share by construction are computed once: a row computes the blocks from its lookahead position
on, takes what lies before from the last row of its share, and keys and values are written to every slot that needs them
(DESIGN's slot rules).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from lopa_ascend.backend import Entries
from lopa_ascend.kv.pages import PAGE_SIZE, slot_mapping
from lopa_ascend.types import RowPlan, SequenceStep, Share

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Predictions:
    """``tokens``: those of the step whose hidden states predict something for this sequence, ascending and once each,
    -1 (the row before the window) first; ``positions`` that each predicts; ``inverse``: for every masked position of
    every row its index among them."""

    tokens: Indices
    positions: Indices
    inverse: Indices


@dataclass(frozen=True)
class Part:
    """One sequence in the layout: ``flat[r][i]`` is the token that holds position start + i of the share's row r."""

    share: Share
    flat: tuple[Indices, ...]
    num_computed: int
    predictions: Predictions

    @property
    def commits(self) -> Indices:
        """The tokens of the last committing position: one by row where values differ by branch, else the last row's."""
        plan = self.share.plan
        if not plan.num_new:
            return np.empty(0, dtype=np.int64)
        rows = self.flat if plan.winner_commits else self.flat[-1:]
        return np.array([where[plan.num_new - 1] for where in rows], dtype=np.int64)


@dataclass(frozen=True)
class Layout:
    """``tokens`` and ``positions`` [T]; cache position ``slot_mapping[i]`` takes token ``source[i]``."""

    tokens: Indices
    positions: Indices
    slot_mapping: Indices
    source: Indices
    entries: Entries
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class _Span:
    """One entry: the positions [begin, end) of a row, which see every key before ``keys``."""

    begin: int
    end: int
    keys: int
    row: int


def build_layout(items: Sequence[tuple[Share, SequenceStep]]) -> Layout:
    """Cuts rows into entries; a sequence's tokens stand together, entries of equal shape side by side. Every share has
    a row at least."""
    parts, tokens, positions, slots, source = [], [], [], [], []
    lengths: list[int] = []
    kv_lengths: list[int] = []
    tables: list[tuple[int, ...]] = []
    sequences: list[int] = []
    count = 0
    for index, (share, pages) in enumerate(items):
        spans = _spans(share)
        part = _part(share, spans, count)
        for span in spans:
            row = share.rows[span.row]
            tokens.append(np.array(row.tokens[span.begin - row.start : span.end - row.start], dtype=np.int64))
            positions.append(np.arange(span.begin, span.end))
            lengths.append(span.end - span.begin)
            kv_lengths.append(span.keys)
            tables.append(pages.page_tables[share.slots[span.row]])
            sequences.append(2 * index + (span.begin >= share.plan.prefix_length))
        at, what = _writes(share, pages, part.flat)
        slots.append(at)
        source.append(what)
        parts.append(part)
        count += part.num_computed
    entries = Entries(
        lengths=tuple(lengths),
        kv_lengths=tuple(kv_lengths),
        page_tables=_page_tables(tables, kv_lengths),
        sequences=tuple(sequences),
        # A prompt that is computed now counts as a sequence of its own: its first block reads it like a cached one.
        prefixes=tuple(prefix for share, _ in items for prefix in (share.plan.start, share.plan.prefix_length)),
    )
    return Layout(
        np.concatenate(tokens),
        np.concatenate(positions),
        np.concatenate(slots),
        np.concatenate(source),
        entries,
        tuple(parts),
    )


def _spans(share: Share) -> list[_Span]:
    prefix, spans = share.plan.prefix_length, []
    for index, row in enumerate(share.rows):
        begin = row.start
        for edge in row.entry_ends:
            if begin >= row.compute_from:
                cuts = [begin, prefix, edge] if begin < prefix < edge else [begin, edge]
                spans += [_Span(first, last, edge, index) for first, last in zip(cuts, cuts[1:], strict=False)]
            begin = edge
    return sorted(spans, key=lambda span: (span.keys, span.end, span.end - span.begin, span.row))


def _part(share: Share, spans: Sequence[_Span], first: int) -> Part:
    flat = [np.full(len(row.tokens), -1, dtype=np.int64) for row in share.rows]
    count = first
    for span in spans:
        length = span.end - span.begin
        offset = span.begin - share.plan.start
        flat[span.row][offset : offset + length] = np.arange(count, count + length)
        count += length
    for row, where in zip(share.rows, flat, strict=True):
        shared = row.compute_from - row.start
        where[:shared] = flat[-1][:shared]
    return Part(share, tuple(flat), count - first, _predictions(share, flat))


def _predictions(share: Share, flat: Sequence[Indices]) -> Predictions:
    predicted = [np.array(row.masked, dtype=np.int64) for row in share.rows]
    before = [_before(row, where, at) for row, where, at in zip(share.rows, flat, predicted, strict=True)]
    tokens, first, inverse = np.unique(np.concatenate(before), return_index=True, return_inverse=True)
    return Predictions(tokens, np.concatenate(predicted)[first], inverse)


def _before(row: RowPlan, where: Indices, positions: Indices) -> Indices:
    """The token at position q - 1 for each q (the logits are shifted by one), -1 where it lies before the row."""
    offsets = positions - row.start - 1
    return np.where(offsets < 0, -1, where[np.maximum(offsets, 0)])


def _writes(share: Share, pages: SequenceStep, flat: Sequence[Indices]) -> tuple[Indices, Indices]:
    """(cache positions, the tokens they take). A slot without a row takes the committing positions."""
    plan = share.plan
    committing = flat[-1][: 0 if plan.winner_commits else plan.num_new]
    rows = dict(zip(share.slots, flat, strict=True))
    slots, source = [], []
    for slot in range(share.num_slots):
        where = rows.get(slot, committing)
        end = plan.start + len(where)
        begin = plan.start if slot == 0 else max(plan.start, pages.num_shared * PAGE_SIZE)
        if begin < end:
            slots.append(slot_mapping(pages.page_tables[slot], begin, end))
            source.append(where[begin - plan.start :])
    return np.concatenate(slots), np.concatenate(source)


def _page_tables(tables: Sequence[Sequence[int]], kv_lengths: Sequence[int]) -> torch.Tensor:
    """int32 [entries, pages]; columns behind an entry's own pages repeat its last one."""
    width = -(-max(kv_lengths) // PAGE_SIZE)
    out = np.empty((len(tables), width), dtype=np.int32)
    for row, table in zip(out, tables, strict=True):
        pages = table[:width]
        row[: len(pages)] = pages
        row[len(pages) :] = pages[-1]
    return torch.from_numpy(out)
