"""One decode step in eager mode: forward pass of all rows, scores, and the decode policy of every sequence.

``step(state, plan) -> (state, result)`` is what a parallel or a compiled step offers as well. The plan holds what the
host decides: who takes part and where keys and values lie. The state holds the rest: tokens, masks, block states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lopa_ascend.backend import Ops
from lopa_ascend.decode.d2f import D2F
from lopa_ascend.kv import KVPool
from lopa_ascend.layout import Indices, Part, lay_out, locations
from lopa_ascend.model.dream import Dream, ForwardInputs
from lopa_ascend.pages import PAGE_SIZE
from lopa_ascend.score import Scoring, score
from lopa_ascend.types import RowResult, SequencePlan, SequenceResult, SequenceStep, StepPlan, StepResult

HEAD_ROWS = 128  # rows of logits computed at a time, enough to make good use of the head's weights,
SCORE_ROWS = 16  # and scored at a time, few enough to stay in the cache


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
    """``results`` of the plan's rows, None if a logit was not finite; ``commit_hidden`` [rows, hidden] or [1, hidden]:
    the last committing position's final hidden state by row, or the one that all rows share."""

    results: tuple[RowResult, ...] | None
    commit_hidden: Tensor
    model_tokens: int
    head_rows: int


class Scored(NamedTuple):
    """[R] each: token ids, probabilities, confidences (float32), and whether the logits were finite."""

    tokens: NDArray[np.int64]
    probs: NDArray[np.float32]
    confidences: NDArray[np.float32]
    finite: NDArray[np.bool_]


class Runner:
    """One model on one device with its KV pool. ``copied_positions`` counts what was copied between slots."""

    def __init__(self, model: Dream, pool: KVPool, ops: Ops):
        self.model, self.pool, self.ops = model, pool, ops
        self.copied_positions = 0

    @torch.inference_mode()
    def step(self, state: BatchState, plan: StepPlan) -> tuple[BatchState, StepResult]:
        """One forward pass of the plan's sequences, and what follows from it. A sequence whose logits are not finite
        ends with an error; the others do not notice."""
        sequences = [state[pages.request_id] for pages in plan.sequences]
        forwards = self.forward(sequences, plan.sequences)
        results = []
        for sequence, pages, forward in zip(sequences, plan.sequences, forwards, strict=True):
            results.append(self._advance(sequence, pages, forward))
        return state, StepResult(tuple(results))

    def _advance(self, state: SequenceState, pages: SequenceStep, forward: ForwardResult) -> SequenceResult:
        plan, strategy = state.pending, state.strategy
        assert plan is not None
        if forward.results is None:
            state.pending = None
            message = "the model produced logits that are not finite; the request cannot go on"
            return SequenceResult(pages.request_id, strategy.cached, None, error=message)
        record = strategy.absorb(plan, forward.results, forward.model_tokens, forward.head_rows)
        self.commit(state, plan, pages, record.winner, forward)
        state.pending = strategy.plan()
        demand = None if state.pending is None else state.pending.demand
        return SequenceResult(pages.request_id, strategy.cached, demand, record)

    @torch.inference_mode()
    def forward(self, sequences: Sequence[SequenceState], pages: Sequence[SequenceStep]) -> list[ForwardResult]:
        """The forward pass of the sequences' pending plans."""
        items = []
        for state, at in zip(sequences, pages, strict=True):
            assert state.pending is not None
            items.append((state.pending, at))
        layout = lay_out(items)
        own = [part.predictions.tokens[part.predictions.tokens >= 0] for part in layout.parts]
        wanted = [rows for part, tokens in zip(layout.parts, own, strict=True) for rows in (tokens, part.commits)]
        inputs = ForwardInputs(
            tokens=torch.from_numpy(layout.tokens),
            positions=torch.from_numpy(layout.positions),
            slots=torch.from_numpy(layout.slots),
            source=torch.from_numpy(layout.source),
            entries=layout.entries,
            rows=torch.from_numpy(np.concatenate(wanted)),
        )
        hidden = self.model.forward(inputs, self.pool.k, self.pool.v).split([len(rows) for rows in wanted])
        predicting = []
        for state, part, rows in zip(sequences, layout.parts, hidden[::2], strict=True):
            if len(rows) < len(part.predictions.tokens):  # sorted: the row before the window comes first
                assert state.last is not None
                rows = torch.cat([state.last[None], rows])
            predicting.append(rows)
        scores = self._scores(predicting, sequences, layout.parts)
        for state in sequences:
            state.round += 1
        return [
            ForwardResult(row_results(part, scored), commits, part.num_tokens, len(part.predictions.tokens))
            for part, scored, commits in zip(layout.parts, scores, hidden[1::2], strict=True)
        ]

    @torch.inference_mode()
    def commit(
        self, state: SequenceState, plan: SequencePlan, pages: SequenceStep, winner: int, forward: ForwardResult
    ) -> None:
        """Makes the committing positions of the winner everybody's. In block-causal mode all slots hold them already;
        with full attention this is the second phase."""
        if not plan.commit:
            return
        state.last = forward.commit_hidden[winner if plan.winner_commits else 0].clone()
        if not plan.winner_commits:
            return
        end = plan.start + plan.commit
        source = pages.tables[plan.rows[winner].slot]
        self.copy(source, pages.tables[0], plan.start, end)
        for table in pages.tables[1:]:  # full pages are shared from now on
            self.copy(pages.tables[0], table, max(plan.start, end // PAGE_SIZE * PAGE_SIZE), end)

    def copy(self, source: Sequence[int], target: Sequence[int], begin: int, end: int) -> None:
        """Copies keys and values of the positions [begin, end) from one page table's pages to another's."""
        if source != target and begin < end:
            self.copied_positions += end - begin
            at = (torch.from_numpy(locations(table, begin, end)) for table in (source, target))
            self.ops.kv_copy(self.pool.caches, *at)

    def _scores(
        self, rows: Sequence[Tensor], sequences: Sequence[SequenceState], parts: Sequence[Part]
    ) -> list[Scored]:
        """Of each sequence's hidden states [R_i, hidden], which predict its positions. Neighbours that are scored
        alike are scored together."""
        groups: list[tuple[Scoring, int, list[int]]] = []
        for index, state in enumerate(sequences):
            kind = state.scoring, state.round if state.scoring.temperature else 0
            if groups and groups[-1][:2] == kind:
                groups[-1][2].append(index)
            else:
                groups.append((*kind, [index]))
        out: list[Scored] = []
        for scoring, round_, members in groups:
            positions = np.concatenate([parts[i].predictions.positions for i in members])
            scored = self._score(torch.cat([rows[i] for i in members]), scoring, positions, round_)
            cuts = np.cumsum([len(rows[i]) for i in members])[:-1]
            out += [Scored(*columns) for columns in zip(*(np.split(column, cuts) for column in scored), strict=True)]
        return out

    def _score(self, rows: Tensor, scoring: Scoring, positions: Indices, round_: int) -> Scored:
        num_rows, where = len(rows), torch.from_numpy(positions)
        if not num_rows:
            return Scored(
                np.empty(0, np.int64), np.empty(0, np.float32), np.empty(0, np.float32), np.empty(0, np.bool_)
            )
        if num_rows % SCORE_ROWS == 1:  # a row by itself is summed by several threads, in another order
            rows, where = torch.cat([rows, rows[-1:]]), torch.cat([where, where[-1:]])
        chunks = []
        for chunk, places in zip(rows.split(HEAD_ROWS), where.split(HEAD_ROWS), strict=True):
            for logits, at in zip(self.model.logits(chunk).split(SCORE_ROWS), places.split(SCORE_ROWS), strict=True):
                chunks.append(score(logits, scoring, at, round_))
        return Scored(*(torch.cat(column)[:num_rows].numpy() for column in zip(*chunks, strict=True)))


def row_results(part: Part, scored: Scored) -> tuple[RowResult, ...] | None:
    """By row, in the order of its masked positions; None if a logit was not finite."""
    if not scored.finite.all():
        return None
    cuts = np.cumsum([len(row.masked) for row in part.plan.rows])[:-1]
    return tuple(
        RowResult(*(tuple(column[where].tolist()) for column in (scored.tokens, scored.probs, scored.confidences)))
        for where in np.split(part.predictions.inverse, cuts)
    )
