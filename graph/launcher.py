"""Decode steps on their way to the device: one launcher for each bucket that an engine has graphs of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lopa_ascend.backend.compiler import Compiler, Run
from lopa_ascend.graph.buckets import Bucket, Buckets
from lopa_ascend.graph.inputs import Kind, Known, input_size, tables_for, views, write_inputs
from lopa_ascend.graph.policy import Tables
from lopa_ascend.graph.score import GreedyScore
from lopa_ascend.graph.seats import Seats
from lopa_ascend.graph.step import Caches, DecodeStep
from lopa_ascend.kv.pages import PAGE_SIZE

PageTables = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Graphs:
    """What decode steps are compiled for, and how: ``shape`` has the largest number of each of the ``buckets``.
    ``score`` has the confidence of ``kind``. Keys and values of nobody go to the cache positions from ``trash`` on.
    Unless ``ahead``, every step is read before the next one is launched."""

    shape: Bucket
    buckets: Buckets
    kind: Kind
    compiler: Compiler
    score: GreedyScore
    num_seats: int
    trash: int
    ahead: bool


class Launcher:
    """The compiled step of one bucket. Its inputs lie in ``memory`` on the device, which all buckets share, for steps
    run one after the other."""

    def __init__(self, step: DecodeStep, graphs: Graphs, seats: Seats, memory: Tensor, caches: Caches):
        self.bucket = step.bucket
        self._step, self._graphs, self._seats = step, graphs, seats
        self._memory = memory[: input_size(step.bucket)]
        constants = Tables(*(table.to(memory.device) for table in tables_for(self.bucket, graphs.trash)))
        self._tensors = step.tensors(views(self._memory, self.bucket), constants, seats.storage, caches)
        # In a graph nobody counts what is sent.
        self._traffic = [] if graphs.compiler.mode == "eager" else step.traffic()
        self._run: Run | None = None

    def compile(self) -> None:
        """Makes the graph, with a step of nobody."""
        kv_lengths = self._send([], [], [])
        self._run = self._graphs.compiler.compile(self._step, self.bucket.name, self._tensors, kv_lengths)

    def launch(
        self, known: Sequence[Known], tables: Sequence[PageTables], ends: Sequence[Sequence[int]]
    ) -> Callable[[], Tensor]:
        """One step of ``known`` sequences whose slots have these page tables; what it returns waits for the result.
        ``ends``: where the branches of each end, which full windows must know."""
        assert self._run is not None
        for group, sent in self._traffic:
            group.ledger.add(sent.purpose, sent.num_bytes, sent.calls)
        return self._step.model.ops.read_later(self._run(self._send(known, tables, ends)))

    def _send(self, known: Sequence[Known], tables: Sequence[PageTables], ends: Sequence[Sequence[int]]) -> list[int]:
        """Puts the inputs in place; returns the entries' KV lengths."""
        S, P, R = self.bucket.sequences, self.bucket.pages, self.bucket.slots
        pages = np.full((S, R, P), -1, dtype=np.int32)
        for row, slots in enumerate(tables):
            for slot, table in enumerate(slots):
                pages[row, slot, : min(len(table), P)] = table[:P]
        everybody = [*known, *(self._seats.nobody(row) for row in range(len(known), S))]
        host = self._step.model.ops.host_memory(len(self._memory))
        inputs, params, trash = views(host, self.bucket), self._seats.params, self._graphs.trash
        edges = write_inputs(inputs, self.bucket, everybody, torch.from_numpy(pages), params, trash)
        self._memory.copy_(host, non_blocking=True)
        kv_lengths = edges[:, None].expand(S, R, -1).numpy()
        if self.bucket.full:
            kv_lengths = np.zeros((S, R), dtype=np.int64)
            for row, branches in enumerate(ends):
                kv_lengths[row, : len(branches)] = branches
        # Of nobody they are any; a compiler takes 0 and 1 for constants.
        lengths: list[int] = kv_lengths.clip(2, P * PAGE_SIZE).flatten().tolist()
        return lengths
