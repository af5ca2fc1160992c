"""Runs the forward pass of a plan: lays its rows out as tensors, keeps the slots' pages, scores the logits.

Positions that branches share by construction are computed once: a row computes the blocks from its lookahead position
on, takes what lies before from the anchor, and keys and values are written to every slot that needs them (DESIGN's
slot rules).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lopa_ascend.backend import Entries, Ops
from lopa_ascend.kv import KVPool
from lopa_ascend.model.dream import Dream, ForwardInputs
from lopa_ascend.pages import PAGE_SIZE, SlotTables
from lopa_ascend.score import Scoring, score
from lopa_ascend.types import RowPlan, RowResult, SequencePlan

Indices = NDArray[np.int64]
HEAD_ROWS = 128  # rows of logits computed at a time, enough to make good use of the head's weights,
SCORE_ROWS = 16  # and scored at a time, few enough to stay in the cache


@dataclass
class SequenceState:
    """What the device side keeps of a sequence: its slots' pages, how it is scored, and the normed hidden state
    [hidden] of the last committed position, which predicts the first position of the window."""

    tables: SlotTables
    scoring: Scoring
    last: Tensor | None = None
    round: int = 0


@dataclass(frozen=True)
class Layout:
    """Where a plan's positions are computed: ``flat[r][i]`` is the token that holds position start + i of row r."""

    tokens: Indices
    positions: Indices
    lengths: tuple[int, ...]
    kv_lengths: tuple[int, ...]
    slots: tuple[int, ...]
    flat: tuple[Indices, ...]


@dataclass(frozen=True)
class ForwardResult:
    """``results`` of the plan's rows; ``commit_hidden`` [rows, hidden] or [1, hidden]: the last committing position's
    final hidden state by row, or the one that all rows share; ``model_tokens`` and ``head_rows`` were computed."""

    results: tuple[RowResult, ...]
    commit_hidden: Tensor | None
    model_tokens: int
    head_rows: int


def lay_out(plan: SequencePlan) -> Layout:
    """Cuts the rows into attention entries and orders them so that entries of equal shape stand side by side."""
    spans: list[tuple[int, int, int, int]] = []  # (length, kv length, row, first position)
    for index, row in enumerate(plan.rows):
        begin = row.start
        for edge in row.edges:
            if begin >= row.compute_from:
                spans.append((edge - begin, edge, index, begin))
            begin = edge
    spans.sort(key=lambda span: (span[1], span[0], span[2], span[3]))
    flat = [np.full(len(row.tokens), -1, dtype=np.int64) for row in plan.rows]
    tokens, positions, count = [], [], 0
    for length, _, index, begin in spans:
        row = plan.rows[index]
        offset = begin - row.start
        flat[index][offset : offset + length] = np.arange(count, count + length)
        tokens.append(np.array(row.tokens[offset : offset + length], dtype=np.int64))
        positions.append(np.arange(begin, begin + length))
        count += length
    anchor = flat[-1]
    for row, where in zip(plan.rows, flat, strict=True):
        shared = row.compute_from - row.start
        where[:shared] = anchor[:shared]
    return Layout(
        np.concatenate(tokens),
        np.concatenate(positions),
        tuple(span[0] for span in spans),
        tuple(span[1] for span in spans),
        tuple(plan.rows[span[2]].slot for span in spans),
        tuple(flat),
    )


class Runner:
    """One model on one device with its KV pool."""

    def __init__(self, model: Dream, pool: KVPool, ops: Ops):
        self.model, self.pool, self.ops = model, pool, ops

    def open(self, num_slots: int, scoring: Scoring) -> SequenceState:
        return SequenceState(SlotTables(self.pool.allocator, num_slots), scoring)

    def close(self, state: SequenceState) -> None:
        """Gives the sequence's pages back."""
        state.tables.release()

    @torch.inference_mode()
    def step(self, state: SequenceState, plan: SequencePlan) -> ForwardResult:
        """One forward pass of one sequence.

        Raises:
            NonFiniteError: the logits are not finite.
        """
        layout = lay_out(plan)
        self._make_room(state.tables, plan)
        slots, source = self._writes(state.tables, plan, layout)
        wanted, inverse, positions = wanted_rows(plan, layout)
        commits = [where[plan.commit - 1] for where in (layout.flat if plan.winner_commits else layout.flat[-1:])]
        commits = commits if plan.commit else []
        own = wanted[wanted >= 0]
        inputs = ForwardInputs(
            tokens=torch.from_numpy(layout.tokens),
            positions=torch.from_numpy(layout.positions),
            slots=torch.from_numpy(slots),
            source=torch.from_numpy(source),
            entries=self._entries(state.tables, layout),
            rows=torch.from_numpy(np.concatenate([own, np.array(commits, dtype=np.int64)])),
        )
        hidden = self.model.forward(inputs, self.pool.k, self.pool.v)
        rows = hidden[: len(own)]
        if len(own) < len(wanted):  # sorted: the row before the window comes first
            assert state.last is not None
            rows = torch.cat([state.last[None], rows])
        scores = self._score(rows, state, positions)
        state.round += 1
        results = tuple(
            RowResult(*(tuple(column[where].tolist()) for column in scores))  # token, probability, confidence
            for where in np.split(inverse, np.cumsum([len(row.masked) for row in plan.rows])[:-1])
        )
        return ForwardResult(results, hidden[len(own) :] if commits else None, len(layout.tokens), len(wanted))

    @torch.inference_mode()
    def commit(self, state: SequenceState, plan: SequencePlan, winner: int, result: ForwardResult) -> None:
        """Makes the committing positions of the winner everybody's. In block-causal mode all slots hold them already;
        with full attention this is the second phase."""
        if not plan.commit:
            return
        assert result.commit_hidden is not None
        state.last = result.commit_hidden[winner if plan.winner_commits else 0].clone()
        if not plan.winner_commits:
            return
        tables, end = state.tables, plan.start + plan.commit
        self._copy(tables, plan.rows[winner].slot, 0, plan.start, end)
        tables.share_committed(end)
        for slot in range(1, plan.num_slots):
            tables.grow(slot, end)
            self._copy(tables, 0, slot, max(plan.start, tables.num_shared * PAGE_SIZE), end)

    def _copy(self, tables: SlotTables, source: int, target: int, begin: int, end: int) -> None:
        if source != target and begin < end:
            at = (torch.from_numpy(locations(tables.tables[slot], begin, end)) for slot in (source, target))
            self.ops.kv_copy(self.pool.caches, *at)

    def _make_room(self, tables: SlotTables, plan: SequencePlan) -> None:
        committed = plan.start + plan.commit
        ends = dict.fromkeys(range(plan.num_slots), 0 if plan.winner_commits else committed)
        ends |= {row.slot: row.end for row in plan.rows}
        tables.grow(0, ends[0])
        if not plan.winner_commits:  # equal for all branches, so full pages can be shared before they are written
            tables.share_committed(committed)
        for slot, end in ends.items():
            tables.grow(slot, end)

    def _writes(self, tables: SlotTables, plan: SequencePlan, layout: Layout) -> tuple[Indices, Indices]:
        """(cache positions, the tokens they take). A slot without a row takes the anchor's committing positions."""
        committing = layout.flat[-1][: 0 if plan.winner_commits else plan.commit]
        rows = {row.slot: where for row, where in zip(plan.rows, layout.flat, strict=True)}
        slots, source = [], []
        for slot in range(plan.num_slots):
            where = rows.get(slot, committing)
            end = plan.start + len(where)
            begin = plan.start if slot == 0 else max(plan.start, tables.num_shared * PAGE_SIZE)
            if begin < end:
                slots.append(locations(tables.tables[slot], begin, end))
                source.append(where[begin - plan.start :])
        return np.concatenate(slots), np.concatenate(source)

    def _entries(self, tables: SlotTables, layout: Layout) -> Entries:
        width = -(-max(layout.kv_lengths) // PAGE_SIZE)
        table = np.empty((len(layout.slots), width), dtype=np.int64)
        for i, slot in enumerate(layout.slots):
            pages = tables.tables[slot][:width]
            table[i, : len(pages)] = pages
            table[i, len(pages) :] = pages[-1]
        return Entries(layout.lengths, layout.kv_lengths, torch.from_numpy(table))

    def _score(self, rows: Tensor, state: SequenceState, positions: Indices) -> tuple[NDArray[np.generic], ...]:
        """(tokens, probabilities, confidences), each [R], of hidden states [R, hidden] that predict ``positions``."""
        num_rows, where = len(rows), torch.from_numpy(positions)
        if not num_rows:
            return np.empty(0, np.int64), np.empty(0, np.float32), np.empty(0, np.float32)
        if num_rows % SCORE_ROWS == 1:  # a row by itself is summed by several threads, in another order
            rows, where = torch.cat([rows, rows[-1:]]), torch.cat([where, where[-1:]])
        parts = []
        for chunk, places in zip(rows.split(HEAD_ROWS), where.split(HEAD_ROWS), strict=True):
            for logits, at in zip(self.model.logits(chunk).split(SCORE_ROWS), places.split(SCORE_ROWS), strict=True):
                parts.append(score(logits, state.scoring, at, state.round))
        return tuple(torch.cat(column)[:num_rows].numpy() for column in zip(*parts, strict=True))


def locations(table: Sequence[int], begin: int, end: int) -> Indices:
    """Flat cache indices page * 128 + offset of the positions [begin, end)."""
    positions = np.arange(begin, end)
    pages = np.asarray(table, dtype=np.int64)[positions // PAGE_SIZE]
    return pages * PAGE_SIZE + positions % PAGE_SIZE


def wanted_rows(plan: SequencePlan, layout: Layout) -> tuple[Indices, Indices, Indices]:
    """(tokens whose hidden states predict something, ascending and once each; for every masked position of every row
    its index among them; the position that each predicts). -1 stands for the row before the window."""
    predicted = [np.array(row.masked, dtype=np.int64) for row in plan.rows]
    tokens = [before(row, where, at) for row, where, at in zip(plan.rows, layout.flat, predicted, strict=True)]
    wanted, first, inverse = np.unique(np.concatenate(tokens), return_index=True, return_inverse=True)
    return wanted, inverse, np.concatenate(predicted)[first]


def before(row: RowPlan, where: Indices, positions: Indices) -> Indices:
    """The token at position q - 1 for each q (the logits are shifted by one), -1 where it lies before the row."""
    offsets = positions - row.start - 1
    return np.where(offsets < 0, -1, where[np.maximum(offsets, 0)])
