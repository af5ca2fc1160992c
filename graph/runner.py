"""Decode steps as compiled graphs, launched one ahead of the host.

The device carries the sequences' states from step to step. The host follows with ``decode/``, the definition: of every
step it reads back what was predicted, takes it in, and so knows what the device has made of it. It needs to know only
what two steps ago came out to launch the next one, so while it reads and plans, the device computes.

What no graph can do runs as in ``runner.py``: prompts, and steps of requests that ask for what graphs have no room for.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lopa_ascend.backend import Ops
from lopa_ascend.decode.d2f import D2F
from lopa_ascend.graph.buckets import Bucket
from lopa_ascend.graph.inputs import input_size, unsupported
from lopa_ascend.graph.launcher import Graphs, Launcher
from lopa_ascend.graph.seats import AtRest, Seat, Seats, committed_blocks, most_blocks
from lopa_ascend.graph.step import DecodeStep, Told, read
from lopa_ascend.kv.pages import pages_for
from lopa_ascend.kv.pool import KVPool
from lopa_ascend.model.dream import Dream
from lopa_ascend.parallel.collectives import ALONE, Group
from lopa_ascend.runner.eager import NOT_FINITE, BatchState, Runner, SequenceState
from lopa_ascend.types import (
    Demand,
    GraphStats,
    Scoring,
    SequencePlan,
    SequenceResult,
    SequenceStep,
    StepPlan,
    StepResult,
)


@dataclass
class Room(SequenceState):
    """A sequence of a GraphRunner. ``eager`` names the field of its request that no graph can do. Before ``pending``
    was planned ``opened`` blocks were open, and ``rest`` was its state, if it has no seat. ``flight`` is a launched
    step that has not been read yet."""

    eager: str | None = None
    opened: int = 0
    rest: AtRest | None = None
    seat: Seat | None = None
    flight: Flight | None = None


@dataclass(frozen=True)
class Window:
    """Of a sequence's next step: blocks [first, end), at least one, and the ``pages`` of a slot up to there."""

    first: int
    end: int
    pages: int

    @property
    def blocks(self) -> int:
        return self.end - self.first


Launched = list[tuple[Window, Room, SequenceStep]]


@dataclass(eq=False)
class Flight:
    """A launched step of some sequences, in the order of their rows; ``told`` waits for what ``step.read`` takes."""

    bucket: Bucket
    sequences: Launched
    told: Callable[[], Tensor]


class GraphRunner(Runner):
    """Runs decode steps as graphs where one can do what a sequence asks for."""

    def __init__(self, model: Dream, pool: KVPool, ops: Ops, graphs: Graphs, bp: Group = ALONE):
        super().__init__(model, pool, ops, bp)
        self.graphs = graphs
        hidden = model.head.new_empty(0, model.config.hidden_size)
        self.seats = Seats(graphs.num_seats, graphs.shape, model.config.mask_token_id, hidden, ops)
        declared = graphs.buckets.declared
        self._memory = torch.zeros(max(map(input_size, declared)), dtype=torch.int32, device=ops.device)
        steps = [DecodeStep(bucket, model, graphs.score, bp) for bucket in declared]
        caches = pool.k, pool.v
        self.launchers = {step.bucket: Launcher(step, graphs, self.seats, self._memory, caches) for step in steps}
        self._flights: list[Flight] = []
        self._num_steps = self._tokens = self._padded_tokens = self._wasted_steps = 0
        self._eager_steps: Counter[str] = Counter()

    @torch.inference_mode()
    def warm_up(self, launchers: Iterable[Launcher]) -> None:
        """Compiles their buckets; from then on no other bucket can be."""
        for launcher in launchers:
            launcher.compile()
        self.graphs.compiler.freeze()

    def graph_stats(self) -> GraphStats:
        compiler, pool, storage = self.graphs.compiler, self.pool, self.seats.storage
        spare = pool.caches.nbytes - pool.caches[:, :, : pool.num_pages].nbytes
        own = storage.states.nbytes + storage.hidden.nbytes + self._memory.nbytes
        return GraphStats(
            num_buckets=compiler.num_compilations + compiler.num_loaded,
            memory=compiler.memory + spare + own,
            num_late=compiler.num_refused,
            num_steps=self._num_steps,
            tokens=self._tokens,
            padded_tokens=self._padded_tokens,
            wasted_steps=self._wasted_steps,
            eager_steps=dict(+self._eager_steps),
        )

    # ---- sequences -------------------------------------------------------------------------------------------------

    def begin(self, strategy: D2F, scoring: Scoring, last: Tensor | None = None) -> SequenceState:
        room = Room(strategy, scoring, None, last)
        room.eager = unsupported(strategy.params, len(strategy.eos), self.graphs.shape, self.graphs.kind)
        self.plan_next(room)
        return room

    def plan_next(self, state: SequenceState) -> None:
        room = _room(state)
        room.opened = len(room.strategy.branches[-1].blocks) - 1
        if room.eager is None and room.seat is None:
            room.rest = AtRest.of(room.strategy)
        super().plan_next(room)

    def leave(self, state: SequenceState) -> None:
        room = _room(state)
        if room.seat is not None:
            self.seats.leave(room.seat)
            room.seat = None

    def demand(self, state: SequenceState) -> Demand | None:
        """All that the next step may need; and if it is launched ahead, the one after it, which is planned before
        anything is heard of the sequence again."""
        room, exact = _room(state), super().demand(state)
        plan = room.pending
        if exact is None or plan is None or room.eager is not None or plan.start < plan.prefix_length:
            return exact
        window, strategy = _window(room), room.strategy
        tokens = self.graphs.shape.slots * window.blocks * self.graphs.shape.length
        if not self.graphs.ahead:
            return replace(exact, num_computed=tokens)
        blocks = window.end + (room.flight is None)
        end = min(len(strategy.prompt) + blocks * strategy.params.block_size, strategy.limit)
        return Demand(tokens, plan.start + plan.num_new, (end,) * len(exact.slot_ends), winner_commits=False)

    # ---- steps -----------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self, state: BatchState, plan: StepPlan) -> tuple[BatchState, StepResult]:
        """Launches the graphs of a step, runs what is eager, and reads the step before, or this one unless ``ahead``.
        So a sequence may be in the plan and not in the result, and the other way round."""
        behind = self._flights
        groups, eager = self._divide(state, plan)
        self._flights = [self._launch(group) for group in groups]
        results: list[SequenceResult] = []
        if eager:
            state, result = super().step(state, replace(plan, sequences=tuple(eager)))
            results += result.sequences
        if not self.graphs.ahead:
            behind, self._flights = self._flights, []
        for flight in behind:
            results += self._take_in(flight, state)
        return state, StepResult(tuple(results))

    def _divide(self, state: BatchState, plan: StepPlan) -> tuple[list[Launched], list[SequenceStep]]:
        """(sequences for one graph each, sequences of the eager step). What no bucket holds as it may be at worst waits
        until it is known."""
        fitting: Launched = []
        eager: list[SequenceStep] = []
        for pages in plan.sequences:
            room = _room(state[pages.request_id])
            reason = "prompt" if plan.prefill else room.eager
            if reason is None:
                window = _window(room)
                if self.graphs.buckets.choose(1, window.blocks, window.pages) is not None:
                    fitting.append((window, room, pages))
                    continue
                reason = "graph_window_blocks"
            if room.flight is None:
                self._stand_up(room)
                self._eager_steps[reason] += not plan.prefill
                eager.append(pages)
        groups: list[Launched] = []
        for item in sorted(fitting, key=lambda item: item[0].blocks, reverse=True):
            if not groups or self._bucket([*groups[-1], item]) is None:
                groups.append([])
            groups[-1].append(item)
        return groups, eager

    def _bucket(self, group: Launched) -> Bucket | None:
        blocks, pages = (max(getattr(window, name) for window, *_ in group) for name in ("blocks", "pages"))
        return self.graphs.buckets.choose(len(group), blocks, pages)

    def _stand_up(self, room: Room) -> None:
        """Takes the sequence out of its seat for an eager step."""
        if room.seat is not None:
            first = committed_blocks(room.strategy, room.strategy.num_committed)
            room.last = self.seats.storage.hidden[self.seats.row(room.seat, first)].clone()
            self.leave(room)

    def _launch(self, group: Launched) -> Flight:
        bucket = self._bucket(group)
        assert bucket is not None
        known, tables, ends = [], [], []
        for window, room, pages in group:
            strategy = room.strategy
            if room.seat is None:
                assert room.rest is not None
                assert room.last is not None
                room.seat = self.seats.take(room.rest, strategy.params, sorted(strategy.eos), room.last)
            known.append(self.seats.known(room.seat, strategy, window.first, pages.num_shared))
            tables.append(pages.page_tables)
            assert room.pending is not None
            ends.append([row.end for row in room.pending.rows])
        flight = Flight(bucket, group, self.launchers[bucket].launch(known, tables, ends))
        for window, room, _ in group:
            assert room.seat is not None
            room.flight, room.seat.before, room.seat.held = flight, window.first, bucket.blocks
        self._num_steps += 1
        self._tokens += bucket.tokens
        self._padded_tokens += bucket.tokens
        return flight

    def _take_in(self, flight: Flight, state: BatchState) -> list[SequenceResult]:
        told = read(flight.told(), flight.bucket)
        results = []
        for row, (_, room, pages) in enumerate(flight.sequences):
            if room.flight is flight:
                room.flight = None
            if state.get(pages.request_id) is not room:
                self._wasted_steps += 1
                continue
            results.append(self._absorb(row, flight, told))
        return results

    def _absorb(self, row: int, flight: Flight, told: Told) -> SequenceResult:
        """Takes in what a step told of one of its sequences, as ``decode/`` defines it."""
        window, room, pages = flight.sequences[row]
        bucket, strategy, plan = flight.bucket, room.strategy, room.pending
        assert plan is not None
        self._count(plan, bucket)
        cells = partial(_cells, strategy, window.first, bucket.length)
        error, record, room.round = None, None, room.round + 1
        masked = [cells(np.array(branch.masked, dtype=np.int64)) for branch in plan.rows]
        results = [told.result(row, branch, where) for branch, where in enumerate(masked)]
        if not all(math.isfinite(prob) for result in results for prob in result.max_probs):
            error = NOT_FINITE
        else:
            tokens = bucket.tokens // bucket.sequences
            record = strategy.absorb(plan, results, tokens, tokens)
            begin = len(strategy.prompt) + window.first * strategy.params.block_size
            here = cells(np.arange(begin, strategy.branches[-1].end))
            decided = strategy.winner.tokens[begin - len(strategy.prompt) :]
            if told.winners[row] != record.winner or told.tokens[row, here].tolist() != decided:
                error = f"the device decided otherwise than decode/ defines, in forward pass {record.index}"
        if error is None:
            if plan.winner_commits:
                self.spread(pages, told.winners[row], plan.start, plan.start + plan.num_new)
            self.plan_next(room)
        else:
            room.pending = None
        if room.pending is None:
            self.leave(room)
        return SequenceResult(pages.request_id, strategy.num_committed, self.demand(room), record, error)

    def _count(self, plan: SequencePlan, bucket: Bucket) -> None:
        self.num_rows += len(plan.rows)
        self.idle_rows += bucket.branches - len(plan.rows)
        mine = plan.rows[self.placement.group :: self.placement.size]
        self._padded_tokens -= sum(len(branch.tokens) for branch in mine)


def _room(state: SequenceState) -> Room:
    assert isinstance(state, Room)
    return state


def _window(room: Room) -> Window:
    """What the next step's must hold: the blocks that are open, or after a flight may be, and one that it may add."""
    strategy, plan = room.strategy, room.pending
    assert plan is not None
    first, opened = committed_blocks(strategy, plan.start), room.opened
    if room.flight is not None:
        first = committed_blocks(strategy, plan.start + plan.num_new)
        opened = max(committed_blocks(strategy, row.end) for row in plan.rows)
    end = max(min(opened + 1, most_blocks(strategy)), first + 1)
    positions = min(len(strategy.prompt) + end * strategy.params.block_size, strategy.limit)
    return Window(first, end, pages_for(positions))


def _cells(strategy: D2F, first: int, length: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """The cells of a window that begins with block ``first``."""
    at, size = positions - len(strategy.prompt), strategy.params.block_size
    cells: NDArray[np.int64] = (at // size - first) * length + at % size
    return cells
