"""One decode step in eager mode: forward pass of this rank's rows, scores, and the decode policy of every sequence.

``step(state, plan) -> (state, result)`` is what a compiled step offers as well. The plan holds what the host decides:
who takes part and where keys and values lie. The state holds the rest: tokens, masks, block states.

With several ranks each runs all of this. A branch-parallel group evaluates its own branches; one gather of (token,
probability, confidence) tells every rank what all of them say, and every rank goes on by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lopa_ascend.backend import Ops
from lopa_ascend.decode.d2f import D2F
from lopa_ascend.kv.pages import PAGE_SIZE, slots_for
from lopa_ascend.kv.pool import KVPool
from lopa_ascend.model.base import ForwardInputs
from lopa_ascend.model.dream import Dream
from lopa_ascend.parallel.collectives import ALONE, Group
from lopa_ascend.parallel.placement import Placement
from lopa_ascend.runner.layout import Indices, Part, build_layout
from lopa_ascend.score.sampling import CANDIDATES, merge_scores, shard_scores
from lopa_ascend.types import (
    Demand,
    GraphStats,
    RowResult,
    Scoring,
    SequencePlan,
    SequenceResult,
    SequenceStep,
    Share,
    StepPlan,
    StepResult,
)

HEAD_ROWS = 128  # rows of logits computed at a time, enough to make good use of the head's weights,
SCORE_ROWS = 16  # and scored at a time, few enough to stay in the cache


NOT_FINITE = "the model produced logits that are not finite; the request cannot go on"


@dataclass
class SequenceState:
    """What a step carries on of a sequence: the policy's state and its next plan (None when it is done), how it is
    scored, and the normed hidden state [hidden] of the last committed position, which predicts the first position of
    the window."""

    strategy: D2F
    scoring: Scoring
    pending: SequencePlan | None
    last: Tensor | None = None
    round: int = 0


BatchState = dict[str, SequenceState]


@dataclass(frozen=True)
class ForwardResult:
    """This rank's part of a sequence's forward pass.

    ``predictions`` int32 [n, 3]: token id (-1 where a logit was not finite) and the float32 bits of probability and
    confidence, of every masked position of every row of this group, by branch. ``commit_hidden`` [rows, hidden] or
    [1, hidden]: the last committing position's final hidden state by row of the share, or the one that all share.
    """

    predictions: NDArray[np.int32]
    commit_hidden: Tensor
    model_tokens: int
    head_rows: int


class Runner:
    """One model on one device with its KV pool. The model's group is the tensor-parallel one; ``bp`` connects the ranks
    that have the same part of the model and other branches.

    ``num_rows`` counts the branches of all groups, ``idle_rows``
    those that would have fitted in beside them.
    """

    def __init__(self, model: Dream, pool: KVPool, ops: Ops, bp: Group = ALONE):
        self.model, self.pool, self.ops, self.bp = model, pool, ops, bp
        self.placement = Placement(bp.size, bp.rank)
        self.num_rows = self.idle_rows = 0

    def begin(self, strategy: D2F, scoring: Scoring, last: Tensor | None = None) -> SequenceState:
        """A sequence before its first step. ``last`` as in SequenceState, where its prompt is in the cache."""
        state = SequenceState(strategy, scoring, None, last)
        self.plan_next(state)
        return state

    def plan_next(self, state: SequenceState) -> None:
        """After the policy has taken a step in."""
        state.pending = state.strategy.plan()

    def leave(self, state: SequenceState) -> None:
        """Forgets a sequence that has been ended from outside."""

    def graph_stats(self) -> GraphStats | None:
        return None

    def demand(self, state: SequenceState) -> Demand | None:
        """What the sequence's next step needs; None when it is done."""
        return None if state.pending is None else self.placement.demand(state.pending)

    @torch.inference_mode()
    def step(self, state: BatchState, plan: StepPlan) -> tuple[BatchState, StepResult]:
        """One forward pass of the plan's sequences, and what follows from it. A sequence whose logits are not finite
        ends with an error; the others do not notice."""
        sequences = [state[pages.request_id] for pages in plan.sequences]
        plans = [_pending(sequence) for sequence in sequences]
        shares = [self.placement.share(pending) for pending in plans]
        forwards = self.forward(sequences, shares, plan.sequences)
        for sequence, pending in zip(sequences, plans, strict=True):
            sequence.round += 1
            self.num_rows += len(pending.rows)
            self.idle_rows += slots_for(len(pending.rows), self.bp.size) * self.bp.size - len(pending.rows)
        results = self.exchange(plans, [forward.predictions for forward in forwards])
        advanced = []
        for at in zip(sequences, plan.sequences, shares, forwards, results, strict=True):
            advanced.append(self._advance(*at))
        return state, StepResult(tuple(advanced))

    def _advance(
        self,
        state: SequenceState,
        pages: SequenceStep,
        share: Share,
        forward: ForwardResult,
        results: tuple[RowResult, ...] | None,
    ) -> SequenceResult:
        strategy = state.strategy
        if results is None:
            state.pending = None
            return SequenceResult(pages.request_id, strategy.num_committed, None, error=NOT_FINITE)
        record = strategy.absorb(share.plan, results, forward.model_tokens, forward.head_rows)
        self.commit(state, share, pages, record.winner, forward)
        self.plan_next(state)
        return SequenceResult(pages.request_id, strategy.num_committed, self.demand(state), record)

    def exchange(
        self, plans: Sequence[SequencePlan], own: Sequence[NDArray[np.int32]]
    ) -> list[tuple[RowResult, ...] | None]:
        """What all groups predict, by sequence and row; None for a sequence with logits that were not finite.

        The one message of a step between branch-parallel groups: 12 bytes a masked position, padded to the group that
        has most of them.
        """
        counts = [0] * self.bp.size
        for plan in plans:
            for branch, row in enumerate(plan.rows):
                counts[self.placement.home(branch)[0]] += len(row.masked)
        message = np.zeros((max(counts), 3), dtype=np.int32)
        message[: counts[self.bp.rank]] = np.concatenate(own)
        gathered = np.broadcast_to(message, (self.bp.size, *message.shape))
        if message.size:
            gathered = self.bp.all_gather(self._put(message), "branches").cpu().numpy()
        tokens = gathered[..., 0].tolist()
        probs, confidences = (gathered[..., column].copy().view(np.float32).tolist() for column in (1, 2))
        read = [0] * self.bp.size
        results: list[tuple[RowResult, ...] | None] = []
        for plan in plans:
            rows = []
            for branch, row in enumerate(plan.rows):
                group = self.placement.home(branch)[0]
                at = slice(read[group], read[group] + len(row.masked))
                read[group] = at.stop
                rows.append(RowResult(*(tuple(column[group][at]) for column in (tokens, probs, confidences))))
            finite = all(min(row.tokens, default=0) >= 0 for row in rows)
            results.append(tuple(rows) if finite else None)
        return results

    @torch.inference_mode()
    def forward(
        self, sequences: Sequence[SequenceState], shares: Sequence[Share], pages: Sequence[SequenceStep]
    ) -> list[ForwardResult]:
        """This rank's part of the forward pass of the sequences' pending plans."""
        results = [ForwardResult(np.empty((0, 3), np.int32), self.model.head.new_empty(0), 0, 0) for _ in sequences]
        busy = [index for index, share in enumerate(shares) if share.rows]
        if not busy:
            return results
        states = [sequences[index] for index in busy]
        layout = build_layout([(shares[index], pages[index]) for index in busy])
        own = [part.predictions.tokens[part.predictions.tokens >= 0] for part in layout.parts]
        wanted = [rows for part, tokens in zip(layout.parts, own, strict=True) for rows in (tokens, part.commits)]
        inputs = ForwardInputs(
            tokens=self._put(layout.tokens),
            positions=self._put(layout.positions),
            slot_mapping=self._put(layout.slot_mapping),
            source=self._put(layout.source),
            entries=replace(layout.entries, page_tables=layout.entries.page_tables.to(self.ops.device)),
            rows=self._put(np.concatenate(wanted)),
        )
        hidden = self.model.forward(inputs, self.pool.k, self.pool.v).split([len(rows) for rows in wanted])
        predicting = []
        for state, part, rows in zip(states, layout.parts, hidden[::2], strict=True):
            if len(rows) < len(part.predictions.tokens):  # sorted: the row before the window comes first
                assert state.last is not None
                rows = torch.cat([state.last[None], rows])
            predicting.append(rows)
        scores = self._scores(predicting, states, layout.parts)
        for index, part, scored, commits in zip(busy, layout.parts, scores, hidden[1::2], strict=True):
            predictions = _by_branch(part, scored)
            results[index] = ForwardResult(predictions, commits, part.num_computed, len(part.predictions.tokens))
        return results

    @torch.inference_mode()
    def commit(
        self, state: SequenceState, share: Share, pages: SequenceStep, winner: int, forward: ForwardResult
    ) -> None:
        """Makes the committing positions of the winner everybody's. In block-causal mode all slots of all groups hold
        them already; with full attention this is the second phase."""
        plan = share.plan
        if not plan.num_new:
            return
        own = share.branches.index(winner) if winner in share.branches else 0
        if not plan.winner_commits:
            state.last = forward.commit_hidden[0].clone()
            return
        begin, end = plan.start, plan.start + plan.num_new
        group, slot = self.placement.home(winner)
        if self.placement.sends_values(plan):
            state.last = self._send(pages.page_tables[slot], begin, end, group, forward.commit_hidden[own : own + 1])
        else:
            state.last = forward.commit_hidden[own].clone()
        self.spread(pages, slot, begin, end)

    def spread(self, pages: SequenceStep, slot: int, begin: int, end: int) -> None:
        """Gives the keys and values of the positions [begin, end) in a slot to all slots."""
        self.pool.copy(pages.page_tables[slot], pages.page_tables[0], begin, end)
        for table in pages.page_tables[1:]:  # full pages are shared from now on
            self.pool.copy(pages.page_tables[0], table, max(begin, end // PAGE_SIZE * PAGE_SIZE), end)

    def _send(self, table: Sequence[int], begin: int, end: int, group: int, last: Tensor) -> Tensor:
        """Gives the keys and values of the positions [begin, end) in a slot's table of ``group``, and the final hidden
        state ``last`` [1, hidden] there, to all groups; returns that hidden state [hidden]."""
        at = self.pool.positions(table, begin, end)
        values = self.pool.read(at)
        hidden = last[0] if self.bp.rank == group else values.new_empty(self.model.config.hidden_size)
        message = torch.cat([values.flatten(), hidden])
        self.bp.broadcast(message, group, "kv")
        if self.bp.rank != group:
            self.pool.write(at, message[: values.numel()].view_as(values))
        return message[values.numel() :].clone()

    def _put(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self.ops.device)

    def _scores(
        self, rows: Sequence[Tensor], sequences: Sequence[SequenceState], parts: Sequence[Part]
    ) -> list[NDArray[np.int32]]:
        """int32 [R_i, 3] as in ForwardResult, of each sequence's hidden states [R_i, hidden], which predict its
        positions. Neighbours that are scored alike are scored together."""
        groups: list[tuple[Scoring, int, list[int]]] = []
        for index, state in enumerate(sequences):
            kind = state.scoring, state.round if state.scoring.temperature else 0
            if groups and groups[-1][:2] == kind:
                groups[-1][2].append(index)
            else:
                groups.append((*kind, [index]))
        out: list[NDArray[np.int32]] = []
        for scoring, round_, members in groups:
            positions = np.concatenate([parts[i].predictions.positions for i in members])
            scored = self._score(torch.cat([rows[i] for i in members]), scoring, positions, round_)
            out += np.split(scored, np.cumsum([len(rows[i]) for i in members])[:-1])
        return out

    def _score(self, rows: Tensor, scoring: Scoring, positions: Indices, round_: int) -> NDArray[np.int32]:
        num_rows, where = len(rows), self._put(positions)
        if not num_rows:
            return np.empty((0, 3), np.int32)
        if num_rows % SCORE_ROWS == 1:  # a row by itself is summed by several threads, in another order
            rows, where = torch.cat([rows, rows[-1:]]), torch.cat([where, where[-1:]])
        tp, first = self.model.tp, self.model.first_token_id
        limit = None if tp.size == 1 else CANDIDATES
        local = (
            (shard_scores(logits, scoring, at, round_, first, limit), at)
            for chunk, places in zip(rows.split(HEAD_ROWS), where.split(HEAD_ROWS), strict=True)
            for logits, at in zip(self.model.logits(chunk).split(SCORE_ROWS), places.split(SCORE_ROWS), strict=True)
        )
        if tp.size == 1:
            merged = [merge_scores(stats[None], scoring, at, round_) for stats, at in local]
        else:
            stats = tp.all_gather(torch.cat([stats for stats, _ in local]), "vocabulary")
            merged = [merge_scores(stats, scoring, where, round_)]
        tokens, probs, confidences, finite = (
            torch.cat(column)[:num_rows].cpu().numpy() for column in zip(*merged, strict=True)
        )
        bits = (np.ascontiguousarray(column, np.float32).view(np.int32) for column in (probs, confidences))
        scored: NDArray[np.int32] = np.stack([np.where(finite, tokens, -1).astype(np.int32), *bits], axis=1)
        return scored


def _pending(state: SequenceState) -> SequencePlan:
    assert state.pending is not None
    return state.pending


def _by_branch(part: Part, scored: NDArray[np.int32]) -> NDArray[np.int32]:
    """``scored`` of the part's predictions for every masked position of its rows, which stand in branch order then."""
    share = part.share
    cuts = np.cumsum([len(row.masked) for row in share.rows])[:-1]
    by_row = np.split(part.predictions.inverse, cuts)
    order = sorted(range(len(by_row)), key=share.branches.__getitem__)
    return np.take(scored, np.concatenate([by_row[row] for row in order]), axis=0)
