"""Lays the rows of a step out as one flat batch: tokens, attention entries, and the cache positions that are written.

What branches have in common is computed once: a row computes its blocks from ``compute_from`` on and reuses the tokens
of its share's last row before that. Keys and values go to every slot that needs them (docs/design.md, "Slots").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from lopa_ascend.backend.interface import Entries
from lopa_ascend.kv.pages import PAGE_SIZE, pages_for
from lopa_ascend.types import RowPlan, SequenceStep, Share

Indices = NDArray[np.int64]

BEFORE_WINDOW = -1
"""Stands for the position before the window in place of a token: the batch does not compute that position."""


@dataclass(frozen=True)
class PredictionRows:
    """Which hidden states predict the masked positions of one sequence. The state at position q - 1 predicts q."""

    tokens: Indices
    """Index in the batch of each token whose hidden state is needed, ascending, without repetition;
    ``BEFORE_WINDOW`` comes first if it is needed."""
    positions: Indices
    """The position that each of ``tokens`` predicts."""
    rows: Indices
    """For each of ``tokens`` a row of the share that it predicts the position for."""
    inverse: Indices
    """For every masked position of every row, in their order: the index in ``tokens``."""


@dataclass(frozen=True)
class Part:
    """One sequence in the batch."""

    share: Share
    row_tokens: tuple[Indices, ...]
    """For each row of the share: index in the batch of the token at each of its positions."""
    num_computed: int
    """Tokens of the batch that belong to this sequence."""
    predictions: PredictionRows

    @property
    def last_committing(self) -> Indices:
        """Index in the batch of the last committing position: one for each row where keys and values differ by branch,
        otherwise one for the sequence; none if nothing commits."""
        plan = self.share.plan
        if not plan.num_new:
            return np.empty(0, dtype=np.int64)
        rows = self.row_tokens if plan.winner_commits else self.row_tokens[-1:]
        return np.array([tokens[plan.num_new - 1] for tokens in rows], dtype=np.int64)


@dataclass(frozen=True)
class Layout:
    """The batch of one step: T tokens, W written cache positions."""

    tokens: Indices
    """Token ids [T]."""
    positions: Indices
    """Positions in their sequences [T]."""
    slot_mapping: Indices
    """Flat cache positions that are written [W]."""
    source: Indices
    """For each written position the index in the batch of the token whose keys and values go there [W]."""
    entries: Entries
    parts: tuple[Part, ...]
    """The sequences, in the order of their tokens."""


@dataclass(frozen=True)
class _Span:
    """One attention entry: queries at the positions [begin, end) of a row, which see every key before ``num_keys``."""

    begin: int
    end: int
    num_keys: int
    row: int


@dataclass
class _EntryColumns:
    """The fields of ``Entries``, entry by entry."""

    lengths: list[int] = field(default_factory=list)
    kv_lengths: list[int] = field(default_factory=list)
    page_tables: list[tuple[int, ...]] = field(default_factory=list)
    prefix_groups: list[int] = field(default_factory=list)


def build_layout(items: Sequence[tuple[Share, SequenceStep]]) -> Layout:
    """The batch of some sequences, each of which has at least one row."""
    tokens: list[Indices] = []
    positions: list[Indices] = []
    written: list[Indices] = []
    sources: list[Indices] = []
    parts: list[Part] = []
    columns = _EntryColumns()
    prefixes: list[int] = []
    num_computed = 0
    for index, (share, step) in enumerate(items):
        spans = _spans(share)
        part = _part(share, spans, num_computed)
        num_computed += part.num_computed
        for span in spans:
            row = share.rows[span.row]
            tokens.append(np.array(row.tokens[span.begin - row.start : span.end - row.start], dtype=np.int64))
            positions.append(np.arange(span.begin, span.end))
            _add_entry(columns, span, step.page_tables[share.slots[span.row]], index, share.plan.prefix_length)
        prefixes += [share.plan.start, share.plan.prefix_length]  # of its two prefix groups: see _add_entry
        positions_written, source = _writes(share, step, part.row_tokens)
        written.append(positions_written)
        sources.append(source)
        parts.append(part)
    entries = Entries(
        lengths=tuple(columns.lengths),
        kv_lengths=tuple(columns.kv_lengths),
        page_tables=_page_tables(columns.page_tables, columns.kv_lengths),
        prefix_groups=tuple(columns.prefix_groups),
        prefixes=tuple(prefixes),
    )
    return Layout(
        tokens=np.concatenate(tokens),
        positions=np.concatenate(positions),
        slot_mapping=np.concatenate(written),
        source=np.concatenate(sources),
        entries=entries,
        parts=tuple(parts),
    )


def _add_entry(
    columns: _EntryColumns, span: _Span, page_table: tuple[int, ...], sequence: int, prefix_length: int
) -> None:
    """Appends one entry.

    Each sequence of the batch has two prefix groups: sequence i has group 2 * i for queries inside its prefix, if this
    step computes them, and group 2 * i + 1 for queries after the prefix. So the first block reads a prompt that is
    computed in the same step exactly as it reads a cached prompt.

    Args:
        sequence: the index i of the sequence in the batch.
    """
    follows_prefix = span.begin >= prefix_length
    columns.lengths.append(span.end - span.begin)
    columns.kv_lengths.append(span.num_keys)
    columns.page_tables.append(page_table)
    columns.prefix_groups.append(2 * sequence + 1 if follows_prefix else 2 * sequence)


def _spans(share: Share) -> list[_Span]:
    """The attention entries of a share; entries of equal shape are neighbours."""
    prefix_length = share.plan.prefix_length
    spans: list[_Span] = []
    for index, row in enumerate(share.rows):
        begin = row.start
        for end in row.entry_ends:
            if begin >= row.compute_from:
                # An entry that spans prompt and first block is cut where the prefix ends.
                cuts = [begin, prefix_length, end] if begin < prefix_length < end else [begin, end]
                num_keys = max(end, row.stale_end)
                spans += [_Span(first, last, num_keys, index) for first, last in zip(cuts, cuts[1:], strict=False)]
            begin = end
    return sorted(spans, key=lambda span: (span.num_keys, span.end, span.end - span.begin, span.row))


def _part(share: Share, spans: Sequence[_Span], first_token: int) -> Part:
    """One sequence in the batch: the tokens of ``spans``, one after the other, from index ``first_token`` on."""
    row_tokens = [np.full(len(row.tokens), BEFORE_WINDOW, dtype=np.int64) for row in share.rows]
    next_token = first_token
    for span in spans:
        length, offset = span.end - span.begin, span.begin - share.plan.start
        row_tokens[span.row][offset : offset + length] = np.arange(next_token, next_token + length)
        next_token += length
    for row, tokens in zip(share.rows, row_tokens, strict=True):
        num_taken_over = row.compute_from - row.start
        tokens[:num_taken_over] = row_tokens[-1][:num_taken_over]
    return Part(share, tuple(row_tokens), next_token - first_token, _prediction_rows(share, row_tokens))


def _prediction_rows(share: Share, row_tokens: Sequence[Indices]) -> PredictionRows:
    """The tokens whose hidden states predict the masked positions of all rows. A token that several rows share is
    listed once, with the first of these rows."""
    masked_by_row = [np.array(row.masked, dtype=np.int64) for row in share.rows]
    predicting_by_row = [
        _predicting_tokens(row, tokens, masked)
        for row, tokens, masked in zip(share.rows, row_tokens, masked_by_row, strict=True)
    ]
    positions = np.concatenate(masked_by_row)
    rows = np.repeat(np.arange(len(masked_by_row)), [len(masked) for masked in masked_by_row])
    tokens, first_use, inverse = np.unique(np.concatenate(predicting_by_row), return_index=True, return_inverse=True)
    return PredictionRows(tokens, positions[first_use], rows[first_use], inverse)


def _predicting_tokens(row: RowPlan, tokens: Indices, positions: Indices) -> Indices:
    """The token at position q - 1 for each q of ``positions``."""
    offsets = positions - row.start - 1
    return np.where(offsets < 0, BEFORE_WINDOW, tokens[np.maximum(offsets, 0)])


def _writes(share: Share, step: SequenceStep, row_tokens: Sequence[Indices]) -> tuple[Indices, Indices]:
    """Where the step writes keys and values.

    The slot of a row takes all positions of that row. A slot without a row takes what is the same for all slots: the
    committing positions or, with ``fills_all_slots``, all positions of the only row. With full attention it takes
    nothing, because the winner's keys and values are copied there after the step.

    Returns:
        The flat cache positions; and for each of them the index in the batch of the token that is written there.
    """
    plan = share.plan
    if plan.fills_all_slots:
        num_common = len(row_tokens[-1])
    elif plan.winner_commits:
        num_common = 0
    else:
        num_common = plan.num_new
    common = row_tokens[-1][:num_common]
    tokens_of_slot = dict(zip(share.slots, row_tokens, strict=True))
    written, source = [], []
    for slot in range(share.num_slots):
        tokens = tokens_of_slot.get(slot, common)
        # Slot 0 writes the pages that all slots share.
        begin = plan.start if slot == 0 else max(plan.start, step.num_shared_pages * PAGE_SIZE)
        end = plan.start + len(tokens)
        if begin < end:
            written.append(slot_mapping(step.page_tables[slot], begin, end))
            source.append(tokens[begin - plan.start :])
    return np.concatenate(written), np.concatenate(source)


def slot_mapping(page_table: Sequence[int], begin: int, end: int) -> Indices:
    """Flat cache positions (page * 128 + offset) int64 [end - begin] of the sequence positions [begin, end)."""
    positions = np.arange(begin, end)
    pages = np.asarray(page_table, dtype=np.int64)[positions // PAGE_SIZE]
    return pages * PAGE_SIZE + positions % PAGE_SIZE


def _page_tables(tables: Sequence[Sequence[int]], kv_lengths: Sequence[int]) -> torch.Tensor:
    """int32 [entries, pages]; the columns after an entry's own pages repeat its last page."""
    width = pages_for(max(kv_lengths))
    out = np.empty((len(tables), width), dtype=np.int32)
    for row, table in zip(out, tables, strict=True):
        pages = table[:width]
        row[: len(pages)] = pages
        row[len(pages) :] = pages[-1]
    return torch.from_numpy(out)
