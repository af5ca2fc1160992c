"""A scheduler on a paper device, whose pages hold tags instead of keys and values."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from lopa_ascend.admission import Limits
from lopa_ascend.config import DecodingParams
from lopa_ascend.core import Request, Sequence, Step
from lopa_ascend.decode import begin
from lopa_ascend.decode.strategy import SequenceStart
from lopa_ascend.engine.scheduler import Scheduler, prefix_key
from lopa_ascend.kv.pages import PAGE_SIZE, PageAllocator, PageTables
from lopa_ascend.kv.prefix_cache import Prefix, PrefixCache
from lopa_ascend.types import Scoring, SequencePlan, StepRecord


def limits(**changes: int) -> Limits:
    values: dict[str, Any] = {
        "vocab_size": 1000,
        "mask_token_id": 999,
        "max_model_len": 1024,
        "num_pages": 40,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 700,
        "max_num_branches": 7,
    }
    return Limits(**{**values, **changes})


@dataclass
class Arrival:
    step: int
    prompt: int
    text: int  # equal numbers: equal prompts, as far as both go
    new: int
    slots: int
    full: bool
    abort_after: int | None
    canvas: bool = False  # decodes a whole canvas, which commits nothing

    @property
    def num_rows(self) -> int:  # of a whole canvas; slots share no page of it, and all must fit into 14 pages
        return min(self.slots, 2)

    def request(self, name: str) -> Request:
        if self.canvas:
            kind: dict[str, Any] = {"decoding": "parallel"}
            if self.num_rows > 1:
                kind = {"base": "parallel", "num_branches": self.num_rows - 1}
            params = DecodingParams(block_size=self.new % 3 + 1, max_new_tokens=self.new, **kind)
            return Request(name, (self.text,) * self.prompt, params)
        params = DecodingParams(
            num_branches=self.slots - 1,
            block_size=self.new % 3 + 1,
            max_new_tokens=self.new,
            window_attention="full" if self.full else "block_causal",
        )
        return Request(name, (self.text,) * self.prompt, params)


arrivals = st.lists(
    st.builds(
        Arrival,
        step=st.integers(0, 30),
        prompt=st.sampled_from([1, 60, 127, 128, 129, 256, 300]),
        text=st.integers(0, 2),
        new=st.integers(1, 300),
        slots=st.integers(1, 4),
        full=st.booleans(),
        abort_after=st.one_of(st.none(), st.integers(0, 40)),
        canvas=st.booleans(),
    ),
    min_size=1,
    max_size=25,
)


@dataclass
class Paper:
    """A device whose pages hold (whose, which page of it) at every offset. Strategies are not asked: what a sequence
    computes and commits next is random."""

    seed: int
    pages: dict[int, list[object]] = field(default_factory=dict)
    running: dict[str, Arrival] = field(default_factory=dict)
    plans: list[Step] = field(default_factory=list)
    planned: list[object] = field(default_factory=list)  # what each plan said when it was made
    scheduler: Scheduler = field(init=False)

    def write(self, table: tuple[int, ...] | list[int], begin: int, end: int, whose: object) -> None:
        for number in range(begin // PAGE_SIZE, -(-end // PAGE_SIZE)):
            first, last = max(begin - number * PAGE_SIZE, 0), min(end - number * PAGE_SIZE, PAGE_SIZE)
            page = self.pages.setdefault(table[number], [None] * PAGE_SIZE)
            page[first:last] = [(whose, number)] * (last - first)

    def check(self, table: tuple[int, ...] | list[int], begin: int, end: int, whose: object) -> None:
        for number in range(begin // PAGE_SIZE, -(-end // PAGE_SIZE)):
            first, last = max(begin - number * PAGE_SIZE, 0), min(end - number * PAGE_SIZE, PAGE_SIZE)
            assert self.pages[table[number]][first:last] == [(whose, number)] * (last - first)

    def begin(self, request: Request, page_tables: PageTables, entry: Prefix | None) -> Sequence:
        num_cached = 0 if entry is None else len(entry.tokens)
        strategy = begin(
            SequenceStart(request.prompt, request.params, 999, frozenset(), num_cached, request.properties)
        )
        sequence = Sequence(request, strategy, Scoring("max_prob", 999, 999), page_tables, num_cached)
        self.ask(sequence, num_cached)
        return sequence

    def ask(self, sequence: Sequence, start: int) -> None:
        """Anything that a strategy could ask for next: more rows, longer windows, some of it committed."""
        name = sequence.request_id
        num_computed, committed, slot_ends = self.demand(name, start)
        full = self.running[name].full and not self.running[name].canvas
        sequence.plan = SequencePlan(0, committed, (), 1, winner_commits=full, prefix_length=0)
        sequence.num_computed, sequence.slot_ends = num_computed, slot_ends

    def demand(self, name: str, start: int) -> tuple[int, int, tuple[int, ...]]:
        """Tokens to compute, the end of what is committed, and how many positions each slot must have room for."""
        arrival, rng = self.running[name], random.Random(f"{self.seed} {name} {len(self.plans)}")
        limit = arrival.prompt + arrival.new
        if arrival.canvas:  # all of it, or a later part that reads what the passes before have left
            first, end = rng.choice([(0, limit), (arrival.prompt, limit), (arrival.prompt, arrival.prompt + 1)])
            first, end = (first, end) if start and arrival.num_rows == 1 else (0, limit)
            rows = rng.randint(1, arrival.num_rows) if start else 1
            slot_ends = (*[end] * rows, *[0] * (arrival.num_rows - rows))
            return rows * (end - first), 0, slot_ends
        if start < arrival.prompt:
            committed, rows = arrival.prompt, 1
        else:
            committed, rows = min(limit, start + rng.choice([0, 1, 32, 90])), rng.randint(1, arrival.slots)
        ends = [rng.randint(committed, limit) for _ in range(rows)] + [0] * (arrival.slots - rows)
        tokens = sum(end - start for end in ends if end)
        return tokens, committed, tuple(ends)

    def step(self) -> None:
        scheduler = self.scheduler
        plan = scheduler.plan()
        if plan is None:
            return
        for copy in plan.copies:
            assert 0 < copy.num_positions < PAGE_SIZE
            target = self.pages.setdefault(copy.target, [None] * PAGE_SIZE)
            target[: copy.num_positions] = self.pages[copy.source][: copy.num_positions]
        self.plans.append(plan)
        tables = [(s.request_id, [[*table] for table in s.page_tables.by_slot]) for s in plan.sequences]
        self.planned.append((plan.index, plan.prefill, tables, plan.copies))
        decoding = any(not s.in_prefill for s in scheduler.running.values())
        assert not (plan.prefill and decoding and len(self.plans) > 1 and self.plans[-2].prefill)
        assert {s.in_prefill for s in plan.sequences} == {plan.prefill}
        tokens = sum(s.num_computed for s in plan.sequences)
        assert tokens <= scheduler.limits.max_num_batched_tokens or len(plan.sequences) == 1
        self.check_owners()
        for sequence in plan.sequences:
            self.run(sequence)

    def check_owners(self) -> None:
        """No private page is in two tables, and all that is not free is held by somebody."""
        scheduler = self.scheduler
        private: list[int] = [
            page
            for sequence in scheduler.running.values()
            for table in sequence.page_tables.by_slot
            for page in table
            if scheduler.allocator.references(page) == 1
        ]
        assert len(private) == len(set(private))
        held = {page for s in scheduler.running.values() for table in s.page_tables.by_slot for page in table}
        cached = scheduler.allocator.num_evictable
        assert scheduler.allocator.num_free + cached + len(held) == scheduler.allocator.num_pages
        assert all(s.num_reserved >= 0 for s in scheduler.running.values())
        assert sum(s.num_reserved for s in scheduler.running.values()) <= scheduler.allocator.num_free + cached

    def run(self, sequence: Sequence) -> None:
        """Writes what the rows compute, hands the winner's on, and checks that every slot holds what is committed."""
        name, start, committed = sequence.request_id, sequence.num_committed, sequence.committed_end
        arrival, pages, winner_commits = self.running[name], sequence.page_tables, sequence.next_pass.winner_commits
        if arrival.canvas:
            self.run_canvas(sequence)
            return
        own = [("prompt", prefix_key(sequence.request)) if start < arrival.prompt else name, name]
        common = start if winner_commits else committed
        for slot, end in enumerate(sequence.slot_ends):
            first = start if slot == 0 else max(start, pages.num_shared_pages * PAGE_SIZE)
            self.write(pages.by_slot[slot], first, max(first, common), own[0])
            self.write(pages.by_slot[slot], max(first, common), max(first, common, end), (name, slot))
        for slot, end in enumerate(sequence.slot_ends):
            self.check(pages.by_slot[slot], start, common, own[0])
            self.check(pages.by_slot[slot], common, end, (name, slot))
        if winner_commits:
            end = committed
            self.write(pages.by_slot[0], start, end, own[0])
            for table in pages.by_slot[1:]:
                first = max(start, end // PAGE_SIZE * PAGE_SIZE)
                self.write(table, first, max(first, end), own[0])
        done = committed >= arrival.prompt + arrival.new
        sequence.strategy.num_committed = committed
        self.end_or_ask(sequence, done, committed)
        self.scheduler.advance(sequence, record(start, committed))
        for own_table in [] if done else sequence.page_tables.by_slot:
            self.check(own_table, 0, arrival.prompt, ("prompt", prefix_key(sequence.request)))
            self.check(own_table, arrival.prompt, committed, name)
        if done:
            del self.running[name]

    def end_or_ask(self, sequence: Sequence, done: bool, start: int) -> None:
        sequence.plan = None
        if not done:
            self.ask(sequence, start)

    def run_canvas(self, sequence: Sequence) -> None:
        """Writes what a pass on a whole canvas computes, and checks that the rest is as earlier passes have left it."""
        name, strategy, pages = sequence.request_id, sequence.strategy, sequence.page_tables
        row_ends = [end for end in sequence.slot_ends if end]
        start = row_ends[0] - sequence.num_computed // len(row_ends)
        for slot, end in enumerate(row_ends):
            table = pages.by_slot[slot]
            if start:
                self.check(table, 0, start, (name, slot))
            if end < sequence.request.limit:
                self.check(table, end, sequence.request.limit, (name, slot))
            self.write(table, start, end, (name, slot))
        for slot, end in enumerate(row_ends):
            self.check(pages.by_slot[slot], start, end, (name, slot))
        strategy.num_forwards += 1
        done = strategy.num_forwards > self.seed % 7
        self.end_or_ask(sequence, done, strategy.num_forwards)
        self.scheduler.advance(sequence, record(start, start))
        if done:
            del self.running[name]

    def drive(self, arriving: list[Arrival]) -> list[str]:
        """All arrivals to their end; the order in which they finished or were ended."""
        order: list[str] = []
        scheduler = self.scheduler
        for step in range(3_000):
            for index, arrival in enumerate(arriving):
                if arrival.step == step:
                    name = f"r{index}"
                    self.running[name] = arrival
                    scheduler.add(arrival.request(name))
                elif arrival.abort_after is not None and arrival.step + arrival.abort_after == step:
                    if self.running.pop(f"r{index}", None):
                        assert scheduler.remove(f"r{index}")
                        order.append(f"r{index}")
            before = set(self.running)
            self.step()
            order += sorted(before - set(self.running))
            if step > 31 and not self.running and all(a.step <= step for a in arriving):
                return order
        raise AssertionError("somebody never finished")


def record(start: int, end: int) -> StepRecord:
    """Of a pass that commits the positions [start, end)."""
    return StepRecord(0, (start, end), start, end - start, (), 0, (), 0, 0, 0)


def paper(seed: int, cache: bool = True, **changes: int) -> Paper:
    bounds = limits(**changes)
    allocator = PageAllocator(bounds.num_pages)
    run = Paper(seed)
    run.scheduler = Scheduler(bounds, allocator, run.begin, PrefixCache(allocator) if cache else None)
    return run
