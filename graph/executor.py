"""Runs decode steps as compiled graphs, launched one ahead of the host.

The device carries the sequences' states from step to step. The host follows with ``decode/``, the definition: it reads
back what each step predicted, absorbs it, and so knows what the device has decided. To launch step n + 1 it needs only
the results of step n - 1, so the device computes step n while the host reads and plans.

Prompts, and requests that ask for something that graphs do not support, are left to the eager executor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from lopa_ascend.config import DecodingParams
from lopa_ascend.graph.buckets import Bucket
from lopa_ascend.graph.launcher import Graphs, InputMemory, Launcher, LaunchItem
from lopa_ascend.graph.seats import Seats
from lopa_ascend.graph.step import DecodeStep
from lopa_ascend.graph.support import unsupported, with_fixed_branches
from lopa_ascend.graph.tensors import StepOutput, input_size, view_output
from lopa_ascend.graph.window import Window, cells_of, end_of_blocks, graph_of, next_window, num_blocks
from lopa_ascend.kv.pool import KVPool
from lopa_ascend.model.base import Model
from lopa_ascend.parallel.collectives import ALONE, Group
from lopa_ascend.parallel.placement import Placement
from lopa_ascend.probe import Probe, no_probe
from lopa_ascend.score.prediction import NOT_FINITE, Predictions
from lopa_ascend.sequence import GraphSequence, Sequence
from lopa_ascend.types import Demand, GraphStats, SequencePlan, SequenceResult, SequenceStep, StepPlan, StepRecord


@dataclass(frozen=True)
class _Member:
    """A sequence that a graph can decode in this step, with the window that its bucket must hold."""

    sequence: Sequence
    window: Window
    step: SequenceStep


@dataclass(frozen=True)
class InFlightStep:
    """A launched step whose output has not been read."""

    number: int
    bucket: Bucket
    items: list[_Member]
    """The sequences in the order of the launch."""
    read: Callable[[], Tensor]
    """Waits for the output; see ``tensors.view_output``."""


class GraphExecutor:
    """The compiled steps of one rank.

    Attributes:
        num_rows, idle_rows: see ``EngineStats``.
        inputs: the device's memory for the inputs of steps.

    Args:
        bp: the ranks that hold the same part of the model and evaluate other branches.
    """

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
        self._in_flight: list[InFlightStep] = []
        self._num_launches = self._tokens = self._padded_tokens = self._wasted_steps = 0
        self._eager_steps: Counter[str] = Counter()

    @torch.inference_mode()
    def warm_up(self, launchers: Iterable[Launcher]) -> None:
        """Compiles the buckets of some launchers. After that no bucket can be compiled any more."""
        for launcher in launchers:
            launcher.compile()
        self.graphs.compiler.freeze()

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
        )

    # ---- sequences -------------------------------------------------------------------------------------------------

    def with_fixed_branches(self, params: DecodingParams, eos: Iterable[int]) -> DecodingParams:
        """See ``support.with_fixed_branches``.

        Args:
            eos: EOS ids of a request with these parameters.
        """
        return with_fixed_branches(params, len(params.ends(eos)), self.graphs.shape, self.graphs.params)

    def start(self, sequence: Sequence) -> None:
        """Decides whether graphs can decode a sequence."""
        num_ends = len(sequence.strategy.ends)
        reason = unsupported(sequence.request.params, num_ends, self.graphs.shape, self.graphs.params)
        sequence.graph = GraphSequence(reason)

    def release(self, sequence: Sequence) -> None:
        """Frees the sequence's seat. A step that is in flight may still write to it: the next sequence in the seat
        overwrites that."""
        self.seats.release(graph_of(sequence))

    def demand(self, sequence: Sequence, eager: Demand) -> Demand:
        """What the sequence may need until its next result is read.

        While none of its compiled steps is in flight, the engine launches two before it reads the result of the first.
        This demand serves both, and the second one may open one more block.

        Args:
            eager: what an eager step would need.
        """
        graph, plan = graph_of(sequence), sequence.plan
        assert plan is not None
        if graph.eager_reason is not None or plan.start < plan.prefix_length:
            return eager
        window = next_window(sequence)
        shape = self.graphs.shape
        num_computed = shape.slots * window.blocks * shape.block_length
        if not self.graphs.ahead:
            return replace(eager, num_computed=num_computed)
        num_blocks_at_worst = window.end if graph.in_flight is not None else window.end + 1
        end = end_of_blocks(sequence, num_blocks_at_worst)
        return Demand(
            num_computed=num_computed,
            committed_end=plan.start + plan.num_new,
            slot_ends=(end,) * len(eager.slot_ends),
            winner_commits=False,
        )

    def decodes(self, sequence: Sequence) -> bool:
        """Whether a graph computes the next pass of a planned sequence."""
        return graph_of(sequence).in_flight is not None or self._eager_reason(sequence) is None

    def _eager_reason(self, sequence: Sequence) -> str | None:
        """What keeps graphs from computing the next pass of a sequence; None if they can."""
        if sequence.in_prefill:
            return "prompt"
        if (reason := graph_of(sequence).eager_reason) is not None:
            return reason
        window = next_window(sequence)
        has_bucket = self.graphs.buckets.choose(1, window.blocks, window.pages) is not None
        return None if has_bucket else "graph_window_blocks"

    # ---- launch ----------------------------------------------------------------------------------------------------

    def launch(
        self, plan: StepPlan, sequences: Mapping[str, Sequence]
    ) -> tuple[list[InFlightStep], list[SequenceStep]]:
        """Launches the graphs of a step.

        Returns:
            The launched steps that are to be read in this step, and the sequences for the eager executor.
        """
        batches, eager = self._divide(plan, sequences)
        launched = [self._launch_batch(batch) for batch in batches]
        if not self.graphs.ahead:
            return launched, eager
        before, self._in_flight = self._in_flight, launched
        return before, eager

    def _divide(
        self, plan: StepPlan, sequences: Mapping[str, Sequence]
    ) -> tuple[list[list[_Member]], list[SequenceStep]]:
        """(batches of sequences, each for one graph; sequences for the eager executor).

        A sequence that is left to the eager executor while a step of it is in flight is in neither: it waits until that
        step has been read.
        """
        fitting: list[_Member] = []
        eager: list[SequenceStep] = []
        for step in plan.sequences:
            sequence = sequences[step.request_id]
            graph = graph_of(sequence)
            reason = self._eager_reason(sequence)
            if reason is None:
                fitting.append(_Member(sequence, next_window(sequence), step))
            elif graph.in_flight is None:
                self._unseat(sequence, graph)
                if not plan.prefill:
                    self._eager_steps[reason] += 1
                eager.append(step)
        return self._batches(fitting), eager

    def _batches(self, fitting: list[_Member]) -> list[list[_Member]]:
        """Divides sequences into few batches that fit a bucket each, of windows of similar size."""
        batches: list[list[_Member]] = []
        for item in sorted(fitting, key=lambda item: item.window.blocks, reverse=True):
            if batches and self._bucket([*batches[-1], item]) is not None:
                batches[-1].append(item)
            else:
                batches.append([item])
        return batches

    def _bucket(self, batch: list[_Member]) -> Bucket | None:
        """The cheapest bucket that holds a batch; None if there is none."""
        blocks = max(item.window.blocks for item in batch)
        pages = max(item.window.pages for item in batch)
        return self.graphs.buckets.choose(len(batch), blocks, pages)

    def _unseat(self, sequence: Sequence, graph: GraphSequence) -> None:
        """Takes a sequence out of its seat, for an eager step."""
        if graph.seat is not None:
            row = self.seats.hidden_row(graph, num_blocks(sequence.strategy, sequence.num_committed))
            sequence.last_hidden = self.seats.storage.hidden[row].clone()
            self.seats.release(graph)

    def _launch_batch(self, batch: list[_Member]) -> InFlightStep:
        bucket = self._bucket(batch)
        assert bucket is not None
        items = []
        for item in batch:
            sequence, graph = item.sequence, graph_of(item.sequence)
            assert sequence.plan is not None
            if graph.seat is None:
                self.seats.take(sequence, graph)
            view = self.seats.host_view(sequence, graph, item.window.start, item.step.num_shared_pages)
            items.append(LaunchItem(view, item.step.page_tables, [row.end for row in sequence.plan.rows]))
        self._num_launches += 1
        step = InFlightStep(self._num_launches, bucket, batch, self.launchers[bucket].launch(items, self.probe))
        for item in batch:
            graph = graph_of(item.sequence)
            graph.in_flight = step.number
            graph.window_start, graph.window_blocks = item.window.start, bucket.blocks
        self._tokens += bucket.tokens
        self._padded_tokens += bucket.tokens  # _count subtracts what branches needed
        return step

    # ---- collect ---------------------------------------------------------------------------------------------------

    def collect(self, steps: list[InFlightStep], sequences: Mapping[str, Sequence]) -> list[SequenceResult]:
        """Reads launched steps and updates their sequences, except those that have ended meanwhile."""
        results = []
        for step in steps:
            output = view_output(step.read(), step.bucket, self.graphs.score.num_columns)
            for index, item in enumerate(step.items):
                graph = graph_of(item.sequence)
                if graph.in_flight == step.number:
                    graph.in_flight = None
                if sequences.get(item.step.request_id) is not item.sequence:
                    self._wasted_steps += 1
                    continue
                with self.probe("absorb", step.bucket):
                    results.append(self._absorb(item, index, step.bucket, output))
        return results

    def _absorb(self, item: _Member, index: int, bucket: Bucket, output: StepOutput) -> SequenceResult:
        """Takes in what a step predicted for one sequence, as ``decode/`` defines it, and checks that the device has
        decided the same.

        Args:
            index: of the sequence in the launch.
        """
        sequence, plan = item.sequence, item.sequence.plan
        assert plan is not None
        self._count(plan, bucket)
        branches = _predictions(item, plan, index, bucket, output)
        if not all(predictions.valid for predictions in branches):
            sequence.plan = None
            return SequenceResult(sequence.request_id, None, NOT_FINITE)
        num_computed = bucket.tokens // bucket.sequences
        results = [predictions.row_result() for predictions in branches]
        record = sequence.strategy.absorb(plan, results, model_tokens=num_computed, head_rows=num_computed)
        winner = int(output.winners[index])
        end = plan.rows[record.winner].end
        if winner != record.winner or not self._agrees(item, bucket, output.tokens[index], end):
            sequence.plan = None
            return SequenceResult(sequence.request_id, record, _disagreement(record))
        if plan.winner_commits:  # on one branch-parallel group, so a branch's slot has the branch's number
            self.pool.copy_to_slots(item.step.page_tables, winner, plan.start, plan.start + plan.num_new)
        sequence.plan = sequence.strategy.plan()
        return SequenceResult(sequence.request_id, record)

    def _agrees(self, item: _Member, bucket: Bucket, tokens: Tensor, end: int) -> bool:
        """Whether the device's window holds the tokens that ``decode/`` has decided on.

        Args:
            tokens: token ids of the window [C].
            end: of the winner's row.
        """
        sequence, strategy = item.sequence, item.sequence.strategy
        begin = end_of_blocks(sequence, item.window.start)
        positions = np.arange(begin, end)
        cells = cells_of(sequence, item.window.start, bucket.block_length, positions)
        first = len(strategy.prompt)
        decided = list(strategy.anchor.tokens[begin - first : end - first])
        return bool(tokens.numpy()[cells].tolist() == decided)

    def _count(self, plan: SequencePlan, bucket: Bucket) -> None:
        """Counts one sequence of a step that was read."""
        self.num_rows += len(plan.rows)
        self.idle_rows += bucket.branches - len(plan.rows)
        own_rows = plan.rows[self._placement.group :: self._placement.size]
        self._padded_tokens -= sum(len(row.tokens) for row in own_rows)


def _predictions(
    item: _Member, plan: SequencePlan, index: int, bucket: Bucket, output: StepOutput
) -> list[Predictions]:
    """What a step predicted for the masked positions of one sequence, by branch."""
    columns = (output.ids, output.max_probs, output.confidences)
    tokens, probs, confidences = (column[index].numpy() for column in columns)  # [B, C] each
    predictions = []
    for branch, row in enumerate(plan.rows):
        masked = np.array(row.masked, np.int64)
        cells = cells_of(item.sequence, item.window.start, bucket.block_length, masked)
        predictions.append(Predictions(tokens[branch], probs[branch], confidences[branch]).take(cells))
    return predictions


def _disagreement(record: StepRecord) -> str:
    message = "the compiled step and the Python code in decode/ decided differently"
    return f"{message}, in forward pass {record.index}; please report it"
