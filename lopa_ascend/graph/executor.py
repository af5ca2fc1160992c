"""Runs decode steps as compiled graphs, launched one ahead of the host.

The device carries the sequences' states from step to step. The host follows with ``decode/``, the definition: it
absorbs what each step predicted, and so knows what the device has decided. To launch step n + 1 it needs only the
results of step n - 1, so the device computes step n while the host reads and plans. If packed buckets save more than
that, the host reads step n first.

Prompts, and requests that graphs do not support, are left to the eager executor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from lopa_ascend.config import DecodingParams
from lopa_ascend.core import Result, Sequence, Step
from lopa_ascend.graph.buckets import Bucket
from lopa_ascend.graph.check import StepCheck
from lopa_ascend.graph.launcher import Counts, Graphs, InputMemory, Launcher
from lopa_ascend.graph.seats import Seats
from lopa_ascend.graph.step import DecodeStep
from lopa_ascend.graph.support import unsupported, with_fixed_branches
from lopa_ascend.graph.tensors import StepOutput, input_size, view_output
from lopa_ascend.graph.window import block_rows, cells_of, end_of_blocks, next_window, num_blocks
from lopa_ascend.kv.pages import pages_for
from lopa_ascend.kv.pool import KVPool
from lopa_ascend.model.base import Model
from lopa_ascend.parallel.collectives import ALONE, Group
from lopa_ascend.parallel.placement import Placement
from lopa_ascend.probe import Probe, no_probe
from lopa_ascend.score.prediction import NOT_FINITE, row_result
from lopa_ascend.types import GraphStats, RowResult, SequencePlan

DISAGREEMENT = "the compiled step and the Python code in decode/ decided differently"
HOST_SECONDS = 3e-3
"""From a step's result to the next launch, for one sequence with 8 branches. A Xeon takes 1.2 ms to absorb the result
and 0.8 ms to write inputs."""
Windows = list[tuple[Sequence, range]]
"""Sequences that a graph can decode in this step, with the blocks that its bucket must hold."""


@dataclass(frozen=True)
class InFlightStep:
    number: int
    bucket: Bucket
    sequences: list[Sequence]
    starts: list[int]
    """First block of each sequence's window."""
    counts: Counts
    """In a packed bucket, what each sequence has room for."""
    read: Callable[[], Tensor]
    """Waits for the output (``tensors.view_output``)."""


class GraphExecutor:
    """The compiled steps of one rank. ``bp``: the ranks that hold the same part of the model and evaluate other
    branches. ``num_rows``, ``idle_rows``: see ``EngineStats``."""

    def __init__(self, model: Model, pool: KVPool, graphs: Graphs, bp: Group = ALONE) -> None:
        self.graphs, self.pool = graphs, pool
        self.probe: Probe = no_probe
        self.num_rows = self.idle_rows = 0
        self._placement = Placement(bp.size, bp.rank)
        hidden = model.head.new_empty(0, model.config.hidden_size)
        declared = graphs.buckets.declared
        num_tokens = max(bucket.tokens for bucket in declared)
        self.seats = Seats(graphs.num_seats, graphs.shape, model.config.mask_token_id, hidden, model.ops, num_tokens)
        self.inputs = InputMemory(max(map(input_size, declared)), model.ops.device)
        steps = [DecodeStep(bucket, model, graphs.score, bp, graphs.params.branch_acceptance) for bucket in declared]
        caches = pool.k, pool.v
        self.launchers = {step.bucket: Launcher(step, graphs, self.seats, self.inputs, caches) for step in steps}
        self._unsupported: dict[Sequence, str | None] = {}
        """By sequence, the field of the request that no graph supports; None if graphs can decode it."""
        self._in_flight: list[InFlightStep] = []
        self._num_launches = self._tokens = self._padded_tokens = self._wasted_steps = 0
        self._eager_steps: Counter[str] = Counter()

    @torch.inference_mode()
    def rehearse(self, launchers: Iterable[Launcher]) -> None:
        """See ``Compiler.rehearse``."""
        for launcher in launchers:
            launcher.rehearse()

    @torch.inference_mode()
    def warm_up(self, launchers: Iterable[Launcher], check: StepCheck | None = None) -> None:
        """Compiles the launchers' buckets and has ``check`` compare them. No bucket can be compiled afterwards."""
        for launcher in launchers:
            launcher.compile(check)
        self.graphs.compiler.freeze()
        if self.graphs.ahead and self.graphs.compiler.packs and self.graphs.compiler.mode != "eager":
            self.graphs = replace(self.graphs, ahead=not self._pays_to_read_first())

    def _pays_to_read_first(self) -> bool:
        """Whether to read a step before the next is launched: then its lookahead cells are known and a smaller bucket
        holds it, but the device waits for the host. The same on all ranks. A single sequence decides: others add work
        to the device as they do to the host."""
        alone = [bucket for bucket in self.graphs.buckets.declared if bucket.sequences == 1]
        smallest = [bucket for bucket in alone if bucket.blocks == alone[0].blocks]
        least, most = (self.launchers[bucket].seconds() for bucket in (smallest[0], smallest[-1]))
        return self.graphs.compiler.on_every_rank(most - least > HOST_SECONDS)

    def stats(self) -> GraphStats:
        compiler, pool, storage = self.graphs.compiler, self.pool, self.seats.storage
        padding_pages = pool.caches.nbytes - pool.caches[:, :, : pool.num_pages].nbytes
        own = storage.states.nbytes + storage.hidden.nbytes + self.inputs.tensor.nbytes
        return GraphStats(
            num_buckets=compiler.num_compilations + compiler.num_loaded,
            memory=compiler.memory + padding_pages + own,
            num_late=compiler.num_refused,
            num_steps=self._num_launches,
            tokens=self._tokens,
            padded_tokens=self._padded_tokens,
            wasted_steps=self._wasted_steps,
            eager_steps=dict(self._eager_steps),
            replay_milliseconds=dict(compiler.replay_milliseconds),
        )

    # ---- sequences -------------------------------------------------------------------------------------------------

    def with_fixed_branches(self, params: DecodingParams, eos: Iterable[int]) -> DecodingParams:
        return with_fixed_branches(params, len(params.ends(eos)), self.graphs.shape, self.graphs.params)

    def start(self, sequence: Sequence) -> None:
        num_ends = len(sequence.strategy.ends)
        reason = unsupported(sequence.request.params, num_ends, self.graphs.shape, self.graphs.params)
        self._unsupported[sequence] = "continuations" if sequence.request.continuations else reason

    def release(self, sequence: Sequence) -> None:
        """Frees the sequence's seat. A step in flight may still write to it; the next sequence in the seat overwrites
        that."""
        self.seats.release(sequence)
        self._unsupported.pop(sequence, None)

    def ask(self, sequence: Sequence) -> None:
        """Notes what the sequence may need until its next result is read, if that is more than an eager step needs.
        While none of its compiled steps is in flight, the engine launches two before it reads the first result. What is
        noted serves both, and the second one may open one more block."""
        plan = sequence.next_pass
        if self._unsupported[sequence] is not None or plan.start < plan.prefix_length:
            return
        window = self._next_window(sequence)
        shape = self.graphs.shape
        sequence.num_computed = shape.slots * len(window) * shape.block_length
        if self.graphs.ahead:
            num_blocks_at_worst = window.stop if self._is_in_flight(sequence) else window.stop + 1
            end = end_of_blocks(sequence, num_blocks_at_worst)
            sequence.slot_ends = (end,) * len(sequence.slot_ends)

    def decodes(self, sequence: Sequence) -> bool:
        """Whether a graph computes the next pass of a planned sequence."""
        return self._is_in_flight(sequence) or self._eager_reason(sequence) is None

    def _eager_reason(self, sequence: Sequence) -> str | None:
        if sequence.in_prefill:
            return "prompt"
        if (reason := self._unsupported[sequence]) is not None:
            return reason
        has_bucket = self._bucket([(sequence, self._next_window(sequence))]) is not None
        return None if has_bucket else "graph_window_blocks"

    def _is_in_flight(self, sequence: Sequence) -> bool:
        seat = self.seats.of.get(sequence)
        return seat is not None and seat.in_flight is not None

    def _next_window(self, sequence: Sequence) -> range:
        return next_window(sequence, in_flight=self._is_in_flight(sequence))

    # ---- launch ----------------------------------------------------------------------------------------------------

    def launch(self, step: Step) -> tuple[list[InFlightStep], list[Sequence]]:
        """Launches the graphs of a step: (launched steps to read in this step, sequences for the eager executor). Page
        tables are read now, and may change afterwards."""
        batches, eager = self._divide(step)
        launched = [self._launch_batch(batch) for batch in batches]
        if not self.graphs.ahead:
            return launched, eager
        before, self._in_flight = self._in_flight, launched
        return before, eager

    def _divide(self, step: Step) -> tuple[list[Windows], list[Sequence]]:
        """(batches of sequences, each for one graph; sequences for the eager executor). A sequence for the eager
        executor with a step in flight is in neither: it waits until that step has been read."""
        fitting: Windows = []
        eager: list[Sequence] = []
        for sequence in step.sequences:
            reason = self._eager_reason(sequence)
            if reason is None:
                fitting.append((sequence, self._next_window(sequence)))
            elif not self._is_in_flight(sequence):
                self._unseat(sequence)
                if not step.prefill:
                    self._eager_steps[reason] += 1
                eager.append(sequence)
        return self._batches(fitting), eager

    def _batches(self, fitting: Windows) -> list[Windows]:
        """Divides sequences into few batches with windows of similar size, each of which fits a bucket."""
        batches: list[Windows] = []
        for item in sorted(fitting, key=lambda item: len(item[1]), reverse=True):
            if batches and self._bucket([*batches[-1], item]) is not None:
                batches[-1].append(item)
            else:
                batches.append([item])
        return batches

    def _bucket(self, batch: Windows, num_rows: int | None = None) -> Bucket | None:
        """The cheapest bucket that holds a batch; None if there is none. ``num_rows``: see ``Buckets.choose``."""
        blocks = max(len(window) for _, window in batch)
        end = max(end_of_blocks(sequence, window.stop) for sequence, window in batch)
        return self.graphs.buckets.choose(len(batch), blocks, pages_for(end), num_rows)

    def _block_rows(self, sequence: Sequence, window: range, *, in_flight: bool) -> tuple[int, ...]:
        slots, num_groups = self.graphs.shape.slots, self._placement.size
        return block_rows(sequence, window, in_flight=in_flight, slots=slots, num_groups=num_groups)

    def _unseat(self, sequence: Sequence) -> None:
        if sequence in self.seats.of:
            row = self.seats.hidden_row(sequence, num_blocks(sequence.strategy, sequence.num_committed))
            sequence.last_hidden = self.seats.storage.hidden[row].clone()
            self.seats.release(sequence)

    def _launch_batch(self, batch: Windows) -> InFlightStep:
        counts = tuple(self._block_rows(*item, in_flight=self._is_in_flight(item[0])) for item in batch)
        bucket = self._bucket(batch, sum(map(sum, counts)))
        assert bucket is not None
        sequences, starts = [sequence for sequence, _ in batch], [window.start for _, window in batch]
        for sequence in sequences:
            if sequence not in self.seats.of:
                self.seats.take(sequence)
        views = [self.seats.host_view(sequence, start) for sequence, start in zip(sequences, starts, strict=True)]
        self._num_launches += 1
        read = self.launchers[bucket].launch(sequences, views, counts, self.probe)
        for sequence, start in zip(sequences, starts, strict=True):
            seat = self.seats.of[sequence]
            seat.window_start, seat.window_blocks, seat.in_flight = start, bucket.blocks, self._num_launches
        self._tokens += bucket.tokens
        self._padded_tokens += bucket.tokens  # _count subtracts what branches needed
        return InFlightStep(self._num_launches, bucket, sequences, starts, counts, read)

    # ---- collect ---------------------------------------------------------------------------------------------------

    def collect(self, steps: list[InFlightStep]) -> list[Result]:
        """Reads launched steps and updates their sequences, except those that have ended meanwhile."""
        results = []
        for step in steps:
            output = view_output(step.read(), step.bucket, self.graphs.score.num_columns)
            for index, sequence in enumerate(step.sequences):
                seat = self.seats.of.get(sequence)
                if seat is None:  # it has ended: until then it keeps its seat while a step is in flight
                    self._wasted_steps += 1
                    continue
                if seat.in_flight == step.number:
                    seat.in_flight = None
                with self.probe("absorb", step.bucket):
                    results.append(self._absorb(step, index, output))
        return results

    def _absorb(self, step: InFlightStep, index: int, output: StepOutput) -> Result:
        """Absorbs a step's predictions for the sequence number ``index`` of the launch, as ``decode/`` defines it, and
        checks that the device has decided the same."""
        sequence, bucket = step.sequences[index], step.bucket
        plan = sequence.next_pass
        self._count(plan, bucket)
        rows = _predictions(step, index, output)
        results = [row for row in rows if row is not None]
        if len(results) < len(rows):
            sequence.fail(NOT_FINITE)
            return sequence, None
        if bucket.rows is not None and not self._has_room(step, index):
            sequence.fail(f"{DISAGREEMENT}: a packed step had no room for all branches; please report it")
            return sequence, None
        num_rows = bucket.tokens // bucket.block_length // bucket.sequences
        num_computed = bucket.block_length * (num_rows if bucket.rows is None else sum(step.counts[index]))
        record = sequence.strategy.absorb(plan, results, model_tokens=num_computed, head_rows=num_computed)
        winner = int(output.winners[index])
        end = plan.rows[record.winner].end
        if winner != record.winner or not _agrees(step, index, output.tokens[index], end):
            sequence.fail(f"{DISAGREEMENT}, in forward pass {record.index}; please report it")
            return sequence, record
        if plan.winner_commits:  # on one branch-parallel group, so a branch's slot has the branch's number
            tables = sequence.page_tables.by_slot
            self.pool.copy_to_slots(tables, winner, plan.start, plan.start + plan.num_new)
        sequence.plan = sequence.strategy.plan()
        return sequence, record

    def _has_room(self, step: InFlightStep, index: int) -> bool:
        """Whether a packed step has computed every block that differs between a sequence's branches."""
        sequence, start, counts = step.sequences[index], step.starts[index], step.counts[index]
        num_opened = max(num_blocks(sequence.strategy, row.end) for row in sequence.next_pass.rows)
        needed = self._block_rows(sequence, range(start, num_opened), in_flight=False)
        return len(needed) <= len(counts) and all(n <= count for n, count in zip(needed, counts, strict=False))

    def _count(self, plan: SequencePlan, bucket: Bucket) -> None:
        self.num_rows += len(plan.rows)
        self.idle_rows += bucket.branches - len(plan.rows)
        own_rows = plan.rows[self._placement.group :: self._placement.size]
        shares = bucket.rows is not None and self._placement.size == 1
        self._padded_tokens -= sum(row.end - (row.compute_from if shares else row.start) for row in own_rows)


def _agrees(step: InFlightStep, index: int, tokens: Tensor, end: int) -> bool:
    """Whether the device's window holds the tokens that ``decode/`` decided on. ``tokens`` are the window's ids [C];
    the winner's row ends at ``end``."""
    sequence, start = step.sequences[index], step.starts[index]
    begin = end_of_blocks(sequence, start)
    cells = cells_of(sequence, start, step.bucket.block_length, np.arange(begin, end))
    decided = [*sequence.request.prompt, *sequence.strategy.anchor.tokens][begin:end]
    return bool(tokens.numpy()[cells].tolist() == decided)


def _predictions(step: InFlightStep, index: int, output: StepOutput) -> list[RowResult | None]:
    """Predictions for one sequence's masked positions, by branch (``prediction.row_result``)."""
    sequence, start = step.sequences[index], step.starts[index]
    tokens, probs, confidences = (  # [B, C] each
        column[index].numpy() for column in (output.ids, output.max_probs, output.confidences)
    )
    predictions = []
    for branch, row in enumerate(sequence.next_pass.rows):
        cells = cells_of(sequence, start, step.bucket.block_length, np.array(row.masked, np.int64))
        predictions.append(row_result(tokens[branch, cells], probs[branch, cells], confidences[branch, cells]))
    return predictions
