"""Lays the rows of a step out as one flat batch: tokens, attention entries, and the cache positions that are written.
What branches share is computed once: a row computes its blocks from ``compute_from`` on and reuses its share's last row
before that. Keys and values go to every slot that needs them (docs/design.md, "Slots")."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lopa_ascend.backend.interface import Entries
from lopa_ascend.kv.pages import PAGE_SIZE, PageTables, pages_for
from lopa_ascend.model.base import ForwardInputs
from lopa_ascend.parallel.placement import Share
from lopa_ascend.types import RowPlan

Indices = NDArray[np.int64]
NOTHING: Indices = np.empty(0, dtype=np.int64)
BEFORE_WINDOW = -1
"""In place of a token: the position before the window, which the batch does not compute."""


class Span(NamedTuple):
    """One attention entry. Its queries are at the positions [end - length, end) of a row."""

    num_keys: int
    """The queries see every key before this position."""
    end: int
    length: int
    row: int
    """Index in the share."""
    is_causal: bool = False
    """See ``Entries.causal``."""


Placed = tuple[Span, int]
"""With the batch index of its first token."""


class Part(NamedTuple):
    """Where one sequence lies in a batch; the defaults are those of a share without a row."""

    share: Share
    num_computed: int = 0
    """Its tokens in the batch."""
    starts_before: bool = False
    """The position before the window, which the batch does not compute, predicts the first of ``positions``."""
    predicting: Indices = NOTHING
    """Batch index of each token that predicts one of the other ``positions``, ascending."""
    positions: Indices = NOTHING
    """The predicted ones. Rows that share a hidden state share its prediction."""
    predicted_rows: Indices = NOTHING
    """By predicted position, a row of the share that it is for."""
    order: Indices = NOTHING
    """For every masked position of every row, by branch: its index in ``positions``."""
    committing: Indices = NOTHING
    """Batch index of the last committing position: of each row if keys and values differ by branch, otherwise of the
    sequence; none if nothing commits."""

    @property
    def drafts(self) -> bool:
        return any(row.drafts for row in self.share.plan.rows)


class Batch(NamedTuple):
    """What one rank computes in a step."""

    inputs: ForwardInputs | None
    """The model returns all parts' predicting hidden states, then all committing ones. None without a row."""
    parts: tuple[Part, ...]

    def split(self, hidden: Tensor) -> list[tuple[Tensor, Tensor]]:
        """By part, the predicting hidden states and the committing ones."""
        sizes = [len(part.predicting) for part in self.parts] + [len(part.committing) for part in self.parts]
        states, count = hidden.split(sizes), len(self.parts)
        return list(zip(states[:count], states[count:], strict=True))


def build_batch(
    items: Sequence[tuple[Share, PageTables]], max_queries: int | None, logit_shift: int, *, compiled: bool = False
) -> Batch:
    """The batch of some sequences, on the host. With ``compiled`` each row is one entry, or as many as ``max_queries``
    (see ``Ops``) wants, without a prefix."""
    parts: list[Part] = []
    tokens: list[Indices] = []
    positions: list[Indices] = []
    written: list[Indices] = []
    sources: list[Indices] = []
    lengths: list[int] = []
    kv_lengths: list[int] = []
    page_tables: list[Sequence[int]] = []
    causal: list[bool] = []
    prefix_groups: list[int] = []
    # A sequence has a group for queries inside its prefix, if this step computes them, and then one for those after it.
    # So the first block reads a prompt of the same step exactly as it reads a cached prompt.
    prefixes = [prefix for share, _ in items for prefix in (0, share.plan.prefix_length)]
    laid_out = _laid_out([share for share, _ in items], compiled)
    placed: list[list[Placed]] = [[] for _ in items]
    for number, span in laid_out:
        (share, pages), (num_keys, end, length, row_index, is_causal) = items[number], span
        row, begin = share.rows[row_index], end - length
        placed[number].append((span, sum(lengths)))
        tokens.append(np.array(row.tokens[begin - row.start : end - row.start], dtype=np.int64))
        positions.append(np.arange(begin, end))
        lengths.append(length)
        kv_lengths.append(num_keys)
        page_tables.append(pages.by_slot[share.slots[row_index]])
        causal.append(is_causal)
        if is_causal:
            prefix_groups.append(len(prefixes))
            prefixes.append(begin // PAGE_SIZE * PAGE_SIZE)
        else:
            prefix_groups.append(2 * number + (begin >= share.plan.prefix_length))
    for (share, pages), own in zip(items, placed, strict=True):
        if not share.rows:
            parts.append(Part(share))
            continue
        row_tokens = _row_tokens(share, own)
        parts.append(_part(share, own, row_tokens, logit_shift))
        positions_written, source = _writes(share, row_tokens, pages)
        written.append(positions_written)
        sources.append(source)
    if not tokens:
        return Batch(None, tuple(parts))
    entries = Entries(
        lengths=tuple(lengths),
        kv_lengths=tuple(kv_lengths),
        page_tables=_page_tables(page_tables, kv_lengths),
        prefix_groups=tuple(prefix_groups),
        prefixes=tuple(prefixes),
        causal=tuple(causal) if any(causal) else (),
    ).divided(max_queries)
    inputs = ForwardInputs(
        tokens=_tensor(tokens),
        positions=_tensor(positions),
        slot_mapping=_tensor(written),
        source=_tensor(sources),
        entries=entries,
        rows=_tensor([part.predicting for part in parts] + [part.committing for part in parts]),
        num_drafts=sum(span.length for number, span in laid_out if _drafts(items[number][0], span)),
    )
    return Batch(inputs, tuple(parts))


def _tensor(columns: list[Indices]) -> Tensor:
    return torch.from_numpy(np.concatenate(columns))


def _laid_out(shares: Sequence[Share], compiled: bool) -> list[tuple[int, Span]]:
    """All attention entries with their share's index, in the order of the batch: share by share, but entries that draft
    come first, as ``ForwardInputs`` wants them."""
    spans = [(number, span) for number, share in enumerate(shares) for span in _spans(share, compiled)]
    return sorted(spans, key=lambda each: not _drafts(shares[each[0]], each[1]))


def _drafts(share: Share, span: Span) -> bool:
    """Whether the weights of drafts compute an entry. They never compute what is causal."""
    return share.rows[span.row].drafts and not span.is_causal


def _spans(share: Share, compiled: bool) -> list[Span]:
    """Entries of equal shape are neighbours."""
    prefix_length = share.plan.prefix_length
    if compiled:
        rows = enumerate(share.rows)
        return sorted(Span(row.end, row.end, len(row.tokens), index, row.is_causal) for index, row in rows)
    spans: list[Span] = []
    for index, row in enumerate(share.rows):
        begin, causal_end = max(row.start, row.compute_from), min(row.end, row.causal_end)
        if begin < causal_end:
            cuts = [begin, *range(pages_for(begin + 1) * PAGE_SIZE, causal_end, PAGE_SIZE), causal_end]
            spans += [Span(last, last, last - first, index, is_causal=True) for first, last in pairwise(cuts)]
        begin = max(row.start, causal_end)
        for end in row.entry_ends:
            if begin >= row.compute_from:
                # An entry that spans prompt and first block is cut where the prefix ends.
                cuts = [begin, prefix_length, end] if begin < prefix_length < end else [begin, end]
                num_keys = max(end, row.stale_end)
                spans += [Span(num_keys, last, last - first, index) for first, last in pairwise(cuts)]
            begin = end
    return sorted(spans)


def _row_tokens(share: Share, placed: Sequence[Placed]) -> list[Indices]:
    """By row, the batch index of the token at each position."""
    row_tokens = [np.full(len(row.tokens), BEFORE_WINDOW, dtype=np.int64) for row in share.rows]
    for (_, end, length, index, _), first in placed:
        offset = end - length - share.rows[index].start
        row_tokens[index][offset : offset + length] = np.arange(first, first + length)
    for row, tokens in zip(share.rows, row_tokens, strict=True):
        num_taken_over = row.compute_from - row.start
        tokens[:num_taken_over] = row_tokens[-1][:num_taken_over]
    return row_tokens


def _part(share: Share, placed: Sequence[Placed], row_tokens: list[Indices], logit_shift: int) -> Part:
    """A token is listed once if several rows share its hidden state, with the first of these rows."""
    masked_by_row = [np.array(row.masked, dtype=np.int64) for row in share.rows]
    predicting_by_row = [
        _tokens_at(row, tokens, masked - (logit_shift if row.logit_shift is None else row.logit_shift))
        for row, tokens, masked in zip(share.rows, row_tokens, masked_by_row, strict=True)
    ]
    num_masked = [len(masked) for masked in masked_by_row]
    rows = np.repeat(np.arange(len(masked_by_row)), num_masked)
    predicting, first_use, inverse = np.unique(
        np.concatenate(predicting_by_row), return_index=True, return_inverse=True
    )
    by_row = np.split(inverse, np.cumsum(num_masked)[:-1])
    by_branch = sorted(range(len(by_row)), key=share.branches.__getitem__)
    starts_before = BEFORE_WINDOW in predicting[:1]
    num_new, committing = share.plan.num_new, row_tokens if share.plan.winner_commits else row_tokens[-1:]
    return Part(
        share=share,
        num_computed=sum(span.length for span, _ in placed),
        starts_before=starts_before,
        predicting=predicting[starts_before:],
        positions=np.concatenate(masked_by_row)[first_use],
        predicted_rows=rows[first_use],
        order=np.concatenate([by_row[row] for row in by_branch]),
        committing=np.array([tokens[num_new - 1] for tokens in committing if num_new], dtype=np.int64),
    )


def _tokens_at(row: RowPlan, tokens: Indices, positions: Indices) -> Indices:
    """The first of ``positions`` may lie before the row."""
    offsets = positions - row.start
    return np.where(offsets < 0, BEFORE_WINDOW, tokens[np.maximum(offsets, 0)])


def _writes(share: Share, row_tokens: list[Indices], pages: PageTables) -> tuple[Indices, Indices]:
    """The flat cache positions that a step writes, and the batch index of the token for each. This is the single-phase
    KV update: what a step commits goes to all slots in the step itself.

    A row's slot takes all its positions. A slot without a row takes what is the same for all slots: the committing
    positions or, with ``fills_all_slots``, all positions of the only row. With full attention it takes nothing: the
    winner's keys and values are copied there after the step.
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
        begin = plan.start if slot == 0 else max(plan.start, pages.num_shared_pages * PAGE_SIZE)
        end = plan.start + len(tokens)
        if begin < end:
            written.append(slot_mapping(pages.by_slot[slot], begin, end))
            source.append(tokens[begin - plan.start :])
    return np.concatenate(written), np.concatenate(source)


def slot_mapping(page_table: Sequence[int], begin: int, end: int) -> Indices:
    """Flat cache positions (page * 128 + offset) int64 [end - begin] of the sequence positions [begin, end)."""
    positions = np.arange(begin, end)
    pages = np.asarray(page_table, dtype=np.int64)[positions // PAGE_SIZE]
    return pages * PAGE_SIZE + positions % PAGE_SIZE


def _page_tables(tables: Sequence[Sequence[int]], kv_lengths: Sequence[int]) -> Tensor:
    """int32 [entries, pages]; the columns after an entry's own pages repeat its last page."""
    width = pages_for(max(kv_lengths))
    out = np.empty((len(tables), width), dtype=np.int32)
    for row, table in zip(out, tables, strict=True):
        pages = table[:width]
        row[: len(pages)] = pages
        row[len(pages) :] = pages[-1]
    return torch.from_numpy(out)
