"""One launcher for each bucket writes a step's inputs and starts its graph."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from collections.abc import Sequence as List
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from lopa_ascend.backend.compiler import Compiler, Run
from lopa_ascend.config import GraphParams
from lopa_ascend.core import Sequence
from lopa_ascend.graph.buckets import Bucket, Buckets
from lopa_ascend.graph.check import StepCheck
from lopa_ascend.graph.inputs import BlockRows, HostView, block_rows, write_inputs
from lopa_ascend.graph.policy import Constants
from lopa_ascend.graph.seats import Seats
from lopa_ascend.graph.step import DecodeStep
from lopa_ascend.graph.tensors import (
    Caches,
    flatten,
    input_size,
    make_constants,
    view_inputs,
    view_output,
    view_packing,
)
from lopa_ascend.kv.pages import PAGE_SIZE
from lopa_ascend.probe import Probe, no_probe
from lopa_ascend.score.greedy import GreedyScore, Scored

Counts = tuple[tuple[int, ...], ...]
"""By sequence and block of its window, how many slots may compute the block; see ``policy/packed.py``."""


@dataclass(frozen=True)
class Graphs:
    shape: Bucket
    buckets: Buckets
    params: GraphParams
    compiler: Compiler
    score: GreedyScore
    """Its confidence is the one in ``params``."""
    num_seats: int
    first_padding_position: int
    """Padding rows and cells write their keys and values from here on."""
    ahead: bool
    """Whether a step is launched before the output of the last one is read."""


class InputMemory:
    """Device memory for the inputs of steps, ``size`` 32-bit elements. All launchers share it, because steps run one
    after the other."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.tensor = torch.zeros(size, dtype=torch.int32, device=device)
        self.num_written = 0
        self.key: Hashable = None
        """Equal for equal inputs; None: it holds none yet."""
        self.kv_lengths: list[int] = []


def filled_up(counts: Counts, bucket: Bucket) -> Counts:
    """Counts that use more of a packed bucket's block-rows, so that inputs change less often."""
    spare, filled = (bucket.rows or 0) - sum(map(sum, counts)), list[tuple[int, ...]]()
    for of_sequence in counts:
        more = list[int]()
        for count in reversed(of_sequence):
            more.append(min(bucket.slots, count + spare))
            spare -= more[-1] - count
        filled.append(tuple(reversed(more)))
    return tuple(filled)


class Launcher:
    def __init__(self, step: DecodeStep, graphs: Graphs, seats: Seats, memory: InputMemory, caches: Caches) -> None:
        self.bucket = step.bucket
        self._step, self._graphs, self._seats, self._shared = step, graphs, seats, memory
        self._memory = memory.tensor[: input_size(step.bucket)]
        constants = make_constants(self.bucket, graphs.first_padding_position)
        on_device = Constants(*(tensor.to(self._memory.device) for tensor in constants))
        inputs, packing = view_inputs(self._memory, self.bucket), view_packing(self._memory, self.bucket)
        self._tensors = flatten(inputs, on_device, seats.storage, caches, packing)
        # Collectives inside a graph do not count themselves.
        self._traffic = [] if graphs.compiler.mode == "eager" else step.traffic()
        self._run: Run | None = None

    def rehearse(self) -> None:
        few = self._write([], [])
        with self._step.bp.ledger.paused():
            self._graphs.compiler.rehearse(self._step, self.bucket.name, self._tensors, few)

    def compile(self, check: StepCheck | None = None) -> None:
        """Compiles the step and tries it out with padding rows, with few keys and with the most; then ``check``
        compares it. GraphError as in ``Compiler.compile`` and ``StepCheck.compare``."""
        compiler, name = self._graphs.compiler, self.bucket.name
        if check is not None:  # first, while little memory is taken
            expected = check.expected(name, self.hidden, self.write_random(check))
        few = self._write([], [])
        most = [self.bucket.pages * PAGE_SIZE] * len(few)
        with self._step.bp.ledger.paused():  # a rank's groups share one
            run = self._run = compiler.compile(self._step, name, self._tensors, few)
        compiler.try_out(run, name, (few, most))
        if check is not None:
            self.compare(check, expected)

    def compare(self, check: StepCheck, expected: Scored) -> None:
        """Compares the graph with what the step predicts op by op for the same inputs (``write_random``)."""
        run, compiler, name = self._run, self._graphs.compiler, self.bucket.name
        assert run is not None
        launch = partial(compiler.launch, run, name, self.write_random(check))
        check.compare(name, lambda: self._predicted(launch()), expected, self.bucket.block_length)

    def write_random(self, check: StepCheck) -> list[int]:
        """Writes padding rows with random tokens, positions and pages; returns KV lengths."""
        bucket, num_seats = self.bucket, self._seats.num_seats
        rows = range(num_seats, num_seats + bucket.sequences)
        views = [HostView(row, block_size=bucket.block_length, num_positions=bucket.cells) for row in rows]
        self._write_anew(views, (), (), self._take_lookaheads())
        self._shared.key = None
        self._seats.storage.hidden.zero_()
        launch, _, inputs = view_inputs(self._memory, bucket)
        targets = launch.new_tokens, inputs.positions, inputs.page_tables
        return check.write(*targets, bucket.all_entries, bucket.writes, bucket.block_length)

    def _take_lookaheads(self) -> tuple[tuple[int, ...], ...]:
        """Gives padding rows lookahead branches that fill a packed bucket, from the first block on. Returns by sequence
        how many slots compute each block; in a full bucket nothing."""
        bucket, storage = self.bucket, self._seats.storage
        if bucket.rows is None:
            return ()
        num_rows = bucket.rows // bucket.sequences  # of each sequence
        if self._step.bp.size > 1:
            return ((bucket.slots,) * (num_rows // bucket.slots),) * bucket.sequences
        num_blocks = min(num_rows, bucket.blocks)
        counts, spare, own_blocks = [1] * num_blocks, num_rows - num_blocks, list[int]()
        while spare and len(own_blocks) < bucket.slots - 1:
            own_blocks.append(max(0, num_blocks - spare))
            spare -= num_blocks - own_blocks[-1]
            counts = [count + (own_blocks[-1] <= block) for block, count in enumerate(counts)]
        states = torch.zeros(bucket.state_size, dtype=torch.int32)
        states[-bucket.branches :] = -1
        for branch, block in enumerate(own_blocks):
            states[branch - bucket.branches] = block * bucket.block_length + branch % bucket.block_length
        storage.states[self._seats.num_seats :] = states.view(torch.float32).to(storage.states.device)
        return (tuple(counts),) * bucket.sequences

    def hidden(self, kv_lengths: List[int]) -> Tensor:
        """The hidden states [T, hidden] that predict the cells of all slots; see ``DecodeStep.hidden``."""
        with self._step.bp.ledger.paused():
            _, layout, hidden = self._step.hidden(self._tensors, kv_lengths)
        if layout is None:
            return hidden
        return hidden.view(-1, self.bucket.block_length, hidden.shape[1])[layout.rows.long()].flatten(0, 1)

    def _predicted(self, output: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens and probabilities of this rank's rows, on the host."""
        found, bp = view_output(output.cpu(), self.bucket, self._step.score.num_columns), self._step.bp
        return found.ids[:, bp.rank :: bp.size], found.max_probs[:, bp.rank :: bp.size]

    def seconds(self) -> float:
        """Duration of a step of padding rows with few keys."""
        times = []
        for _ in range(3):  # the first writes the inputs
            begin = time.perf_counter()
            with self._step.bp.ledger.paused():
                read = self.launch([], [], (), no_probe)
            read()
            times.append(time.perf_counter() - begin)
        return min(times)

    def launch(
        self, sequences: list[Sequence], views: list[HostView], counts: Counts, probe: Probe
    ) -> Callable[[], Tensor]:
        """Starts a step of some sequences. Returns a function that waits for its output, int32 [n] on the host.
        ``counts``: in a packed bucket, how many slots may compute each block of a sequence's window."""
        assert self._run is not None
        for group, sent in self._traffic:
            group.ledger.add(sent.purpose, sent.num_bytes, sent.calls)
        with probe("inputs", self.bucket):
            kv_lengths = self._write(sequences, views, counts)
        return self._step.model.ops.read_later(self._run(kv_lengths), self._step.bp.while_waiting)

    def _write(self, sequences: list[Sequence], views: list[HostView], counts: Counts = ()) -> list[int]:
        """Writes the inputs to the device unless it has them from the last launch; returns the KV length of each
        attention entry."""
        tables = tuple(tuple(map(tuple, sequence.page_tables.by_slot)) for sequence in sequences)
        branch_ends = tuple(tuple(row.end for row in sequence.next_pass.rows) for sequence in sequences)
        ends_seen = branch_ends if self.bucket.full_attention else ()  # of the keys in each branch's entry
        counts = () if self.bucket.rows is None else filled_up(counts, self.bucket)
        key = self.bucket, self._seats.num_taken, tuple(views), tables, ends_seen, counts
        if self._shared.key != key:
            self._shared.kv_lengths = self._write_anew(views, tables, ends_seen, counts)
            self._shared.key = key
            self._shared.num_written += 1
        return self._shared.kv_lengths

    def _write_anew(
        self,
        views: list[HostView],
        tables: tuple[tuple[tuple[int, ...], ...], ...],
        branch_ends: tuple[tuple[int, ...], ...],
        counts: Counts,
    ) -> list[int]:
        """Writes the inputs to the device; returns the KV length of each attention entry. ``tables``: page ids by
        sequence and slot; ``branch_ends``: with full attention, the end of the window by sequence and branch."""
        bucket = self.bucket
        page_tables = np.full(bucket.shape("sequences slots pages"), -1, dtype=np.int32)
        for row, by_slot in enumerate(tables):
            for slot, table in enumerate(by_slot):
                pages = table[: bucket.pages]
                page_tables[row, slot, : len(pages)] = pages
        padding = [self._seats.padding_view(row) for row in range(len(views), bucket.sequences)]
        on_host = self._step.model.ops.host_memory(len(self._memory))
        packing, rows = view_packing(on_host, bucket), None
        if bucket.rows is not None:
            rows = block_rows(counts, bucket.rows)
        block_ends = write_inputs(
            view_inputs(on_host, bucket),
            bucket,
            [*views, *padding],
            torch.from_numpy(page_tables),
            self._seats.params,
            self._graphs.first_padding_position,
            None if packing is None or rows is None else (packing, rows),
        )
        self._memory.copy_(on_host, non_blocking=True)
        return self._kv_lengths(block_ends, branch_ends, rows)

    def _kv_lengths(
        self, block_ends: Tensor, branch_ends: tuple[tuple[int, ...], ...], rows: BlockRows | None
    ) -> list[int]:
        """The KV length of each attention entry. ``block_ends``: of the windows' blocks, int64 [S, W]; ``branch_ends``:
        see ``_write_anew``; ``rows``: of a packed bucket."""
        bucket = self.bucket
        if rows is not None:
            kv_lengths = block_ends[rows.sequence, rows.block].numpy()
        elif bucket.full_attention:
            kv_lengths = np.zeros(bucket.shape("sequences slots"), dtype=np.int64)
            for row, ends in enumerate(branch_ends):
                kv_lengths[row, : len(ends)] = ends
        else:
            kv_lengths = block_ends[:, None].expand(bucket.shape("sequences slots blocks")).numpy()
        kv_lengths = kv_lengths.repeat(len(bucket.entry_lengths), -1)
        # The lengths of padding entries have no meaning, but compilers take 0 and 1 for constants.
        lengths: list[int] = kv_lengths.clip(2, bucket.pages * PAGE_SIZE).flatten().tolist()
        return lengths
