"""Compiled forward passes of causal models. The host decides between them, so they support all that a request asks.

A pass has rows of one length: with "ar" one position, otherwise a block. The positions of a block see one another or,
in the pass that commits it, are causal. Blocks that are drafted by weights of their own are a third kind. Each kind has
its own buckets, by number of rows. Prompts, and a shorter last block, are computed op by op.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from lopa_ascend.backend.compiler import MIN_KV_LENGTH, Compiler, Run
from lopa_ascend.backend.interface import Entries
from lopa_ascend.config import divided_length
from lopa_ascend.core import Sequence as Running
from lopa_ascend.graph.buckets import ladder
from lopa_ascend.graph.check import StepCheck
from lopa_ascend.graph.spec import int32, num_elements, specs, views
from lopa_ascend.kv.pages import PAGE_SIZE, slots_for
from lopa_ascend.kv.pool import KVPool
from lopa_ascend.model.base import ForwardInputs, Model
from lopa_ascend.types import GraphStats, SequencePlan


class PassKind(NamedTuple):
    """What the rows of a pass have in common."""

    length: int
    is_causal: bool
    drafts: bool = False
    """See ``RowPlan.drafts``."""

    @classmethod
    def of(cls, plan: SequencePlan) -> PassKind | None:
        """None if rows differ, do not compute all their positions, or are causal in part."""
        kinds = {cls(len(row.tokens), len(row.tokens) > 1 and row.is_causal, row.drafts) for row in plan.rows}
        has_whole_rows = all(
            row.compute_from <= row.start and (row.is_causal or row.causal_end <= row.start) for row in plan.rows
        )
        return kinds.pop() if has_whole_rows and len(kinds) == 1 else None


class PassShape(NamedTuple):
    """The shapes of a compiled forward pass."""

    rows: int
    length: int
    is_causal: bool
    slots: int
    """Most slots that a position is written to."""
    pages: int
    max_queries: int | None
    drafts: bool = False

    @property
    def kind(self) -> PassKind:
        return PassKind(self.length, self.is_causal, self.drafts)

    @property
    def tokens(self) -> int:
        return self.rows * self.length

    @property
    def writes(self) -> int:
        return self.tokens * self.slots

    @property
    def entry_lengths(self) -> tuple[int, ...]:
        """Queries of each attention entry of a row."""
        return divided_length(self.length, self.max_queries)

    @property
    def all_entries(self) -> int:
        return self.rows * len(self.entry_lengths)

    @property
    def name(self) -> str:
        kind = "drafts" if self.drafts else "causal" if self.is_causal else "rows"
        return f"{kind}{self.rows}_length{self.length}_pages{self.pages}"

    def shape(self, dims: str) -> tuple[int, ...]:
        return tuple(getattr(self, name) for name in dims.split())


def declare_rows(kinds: Mapping[PassKind, int], shape: PassShape, max_tokens: int) -> tuple[PassShape, ...]:
    """The buckets of an engine. ``kinds``: most rows of a pass, by kind; ``shape``: slots of a pass that commits,
    pages, and ``max_queries``; ``max_tokens``: most tokens of a step on a rank, but one row may have more."""
    declared = []
    for kind, most in kinds.items():
        commits = kind.is_causal or kind.length == 1
        bucket = shape._replace(**kind._asdict(), slots=shape.slots if commits else 1)
        fitting = (rows for rows in ladder(most) if rows == 1 or rows * kind.length <= max_tokens)
        declared += [bucket._replace(rows=rows) for rows in fitting]
    return tuple(declared)


class ForwardTensors(NamedTuple):
    """What the host writes for a pass, beside the KV lengths; see ``ForwardInputs``."""

    tokens: Annotated[Tensor, int32("tokens")]
    positions: Annotated[Tensor, int32("tokens")]
    slot_mapping: Annotated[Tensor, int32("writes")]
    source: Annotated[Tensor, int32("writes")]
    page_tables: Annotated[Tensor, int32("all_entries pages")]


class PassLauncher:
    def __init__(
        self, bucket: PassShape, model: Model, pool: KVPool, memory: Tensor, first_padding_position: int
    ) -> None:
        self.bucket, self._model = bucket, model
        self._memory = memory[: num_elements(ForwardTensors, bucket)]
        self._first_padding_position = first_padding_position
        self._tensors = [*self._views(self._memory), *pool.k, *pool.v]
        self._lengths = bucket.entry_lengths * bucket.rows
        self._groups, self._causal = (0,) * bucket.all_entries, (bucket.is_causal,) * bucket.all_entries
        self._run: Run | None = None

    def rehearse(self, compiler: Compiler) -> None:
        few = self._write(None)
        with self._model.tp.ledger.paused():
            compiler.rehearse(self._step, self.bucket.name, self._tensors, few)

    def compile(self, compiler: Compiler, check: StepCheck | None = None) -> None:
        """Compiles the pass and tries it out, with few keys and with the most; then ``check`` compares it. GraphError
        as in ``Compiler.compile`` and ``StepCheck.compare``."""
        name = self.bucket.name
        if check is not None:
            expected = check.expected(name, self._hidden, self._write_random(check))
        few = self._write(None)
        most = [self.bucket.pages * PAGE_SIZE] * len(few)
        with self._model.tp.ledger.paused():
            run = self._run = compiler.compile(self._step, name, self._tensors, few)
        compiler.try_out(run, name, (few, most))
        if check is not None:
            lengths = self._write_random(check)
            launch = partial(compiler.launch, run, name, lengths)
            check.compare(name, lambda: check.scored(launch())[:2], expected, self.bucket.length)

    def _write_random(self, check: StepCheck) -> list[int]:
        self._write(None)
        bucket, given = self.bucket, self._views(self._memory)
        given.source.copy_(torch.arange(bucket.writes) % bucket.tokens)
        return check.write(*given[:2], given.page_tables, bucket.all_entries, bucket.writes, bucket.length)

    def _hidden(self, kv_lengths: Sequence[int]) -> Tensor:
        with self._model.tp.ledger.paused():
            return self._step(self._tensors, kv_lengths)

    def launch(self, inputs: ForwardInputs) -> Tensor:
        """Final hidden states of all tokens, valid until the next launch. ``inputs`` is on the host."""
        assert self._run is not None
        for sent in self._model.traffic(self.bucket.tokens):
            self._model.tp.ledger.add(sent.purpose, sent.num_bytes, sent.calls)
        return self._run(self._write(inputs))

    def _step(self, tensors: Sequence[Tensor], kv_lengths: Sequence[int] | Tensor) -> Tensor:
        num_given = len(ForwardTensors._fields)
        given, caches = ForwardTensors(*tensors[:num_given]), tensors[num_given:]
        on_host, on_device = ((), kv_lengths) if isinstance(kv_lengths, Tensor) else (tuple(kv_lengths), None)
        entries = Entries(self._lengths, on_host, given.page_tables, self._groups, (0,), on_device, causal=self._causal)
        source = None if self.bucket.slots == 1 else given.source  # without it two kernels a layer fewer, or three
        num_drafts = self.bucket.tokens if self.bucket.drafts else 0
        inputs = ForwardInputs(
            given.tokens, given.positions, given.slot_mapping, source, entries, rows=None, num_drafts=num_drafts
        )
        num_layers = len(caches) // 2
        return self._model.forward(inputs, caches[:num_layers], caches[num_layers:])

    def _write(self, inputs: ForwardInputs | None) -> list[int]:
        """Writes a pass's inputs to the device, padded; returns the KV length of each entry."""
        bucket = self.bucket
        on_host = self._model.ops.host_memory(len(self._memory))
        target = self._views(on_host)
        on_host.zero_()
        target.slot_mapping.copy_(self._first_padding_position + torch.arange(bucket.writes))
        target.page_tables.fill_(self._first_padding_position // PAGE_SIZE)
        kv_lengths: tuple[int, ...] = ()
        if inputs is not None:
            assert inputs.source is not None
            for mine, given in zip(target[:2], (inputs.tokens, inputs.positions), strict=False):
                mine[: len(given)] = given
            if bucket.slots == 1:  # each token is written once
                target.slot_mapping[inputs.source] = inputs.slot_mapping.to(torch.int32)
            else:
                target.slot_mapping[: len(inputs.source)] = inputs.slot_mapping
                target.source[: len(inputs.source)] = inputs.source
            kv_lengths, tables = inputs.entries.kv_lengths, inputs.entries.page_tables
            target.page_tables[: len(tables), : tables.shape[1]] = tables
        self._memory.copy_(on_host, non_blocking=True)
        padding = [max(MIN_KV_LENGTH, bucket.length)] * (bucket.all_entries - len(kv_lengths))
        return [*kv_lengths, *padding]

    def _views(self, memory: Tensor) -> ForwardTensors:
        return ForwardTensors(*views(memory, specs(ForwardTensors).values(), self.bucket))


class Forwards:
    """The compiled forward passes of one rank. ``launchers``: by bucket, cheapest first."""

    def __init__(self, declared: Sequence[PassShape], compiler: Compiler, model: Model, pool: KVPool, num_groups: int):
        self._compiler, self._pool, self._num_groups = compiler, pool, num_groups
        size = max(num_elements(ForwardTensors, bucket) for bucket in declared)
        self._memory = torch.zeros(size, dtype=torch.int32, device=model.ops.device)
        padding = pool.num_pages * PAGE_SIZE
        self.launchers = {bucket: PassLauncher(bucket, model, pool, self._memory, padding) for bucket in declared}
        self._slots = max(bucket.slots for bucket in declared)
        self._num_launches = self._tokens = self._padded_tokens = 0
        self._eager_steps: Counter[str] = Counter()

    @torch.inference_mode()
    def rehearse(self, launchers: Iterable[PassLauncher]) -> None:
        """See ``Compiler.rehearse``."""
        for launcher in launchers:
            launcher.rehearse(self._compiler)

    @torch.inference_mode()
    def warm_up(self, launchers: Iterable[PassLauncher], check: StepCheck | None = None) -> None:
        """Compiles the launchers' buckets and has ``check`` compare them. No bucket can be compiled afterwards."""
        for launcher in launchers:
            launcher.compile(self._compiler, check)
        self._compiler.freeze()

    def stats(self) -> GraphStats:
        compiler, pool = self._compiler, self._pool
        padding_pages = pool.caches.nbytes - pool.caches[:, :, : pool.num_pages].nbytes
        return GraphStats(
            num_buckets=compiler.num_compilations + compiler.num_loaded,
            memory=compiler.memory + padding_pages + self._memory.nbytes,
            num_late=compiler.num_refused,
            num_steps=self._num_launches,
            tokens=self._tokens,
            padded_tokens=self._padded_tokens,
            wasted_steps=0,
            eager_steps=dict(self._eager_steps),
            replay_milliseconds=dict(compiler.replay_milliseconds),
        )

    def divide(self, sequences: Iterable[Running]) -> Iterator[tuple[PassKind | None, list[Running]]]:
        """Divides a step's sequences, the same on all ranks, into groups by kind, each with at most a bucket's rows.
        Those of kind None are computed op by op."""
        by_kind: dict[PassKind | None, list[list[Running]]] = {}
        for sequence in sequences:
            kind, rows = self._kind(sequence), self._num_rows([sequence])
            groups = by_kind.setdefault(kind, [[]])
            if kind is not None and self._num_rows(groups[-1]) + rows > self._most(kind):
                groups.append([])
            groups[-1].append(sequence)
        for kind, groups in by_kind.items():
            for group in groups:
                yield kind, group

    def _kind(self, sequence: Running) -> PassKind | None:
        if sequence.in_prefill:  # its pieces have any length, and their bits do not depend on it
            return None
        kind = PassKind.of(sequence.next_pass)
        if kind is None or not (most := self._most(kind)):
            self._eager_steps["block_size"] += 1
            return None
        if self._num_rows([sequence]) > most or len(sequence.page_tables.by_slot) > self._slots:
            self._eager_steps["num_branches"] += 1
            return None
        return kind

    def _most(self, kind: PassKind) -> int:
        return max((bucket.rows for bucket in self.launchers if bucket.kind == kind), default=0)

    def _num_rows(self, sequences: Sequence[Running]) -> int:
        return sum(slots_for(len(sequence.next_pass.rows), self._num_groups) for sequence in sequences)

    def hidden(self, kind: PassKind, inputs: ForwardInputs) -> Tensor:
        """Final normed hidden states [R, hidden] of ``inputs.rows``. ``inputs`` is on the host, for sequences that
        ``divide`` gave for this kind."""
        assert inputs.rows is not None
        num_rows = len(inputs.tokens) // kind.length
        bucket = next(bucket for bucket in self.launchers if bucket.kind == kind and bucket.rows >= num_rows)
        self._num_launches += 1
        self._tokens += bucket.tokens
        self._padded_tokens += bucket.tokens - len(inputs.tokens)
        hidden = self.launchers[bucket].launch(inputs)
        return hidden.index_select(0, inputs.rows.to(hidden.device))
