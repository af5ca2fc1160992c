"""Which requests run, and which of them take part in a step. Plain Python, no torch.

First come, first served. A request is admitted when the pages that it can need at worst are there (its prompt and
max_new_tokens, times its slots where they differ), so none that runs is ever put back. What it turns out not to need
is free for others after each commit.

Prompts are computed in steps of their own. Between two such steps lies at least one decoding step if anything decodes:
arrivals make running requests wait for at most every other step. When a step cannot hold all running requests, those
that waited longest go first, so each takes part again after the others did.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from lopa_ascend.config import Limits
from lopa_ascend.kv.pages import PAGE_SIZE, PageAllocator, PageTables, worst_case
from lopa_ascend.kv.prefix_cache import PrefixCache, PrefixEntry, PrefixKey
from lopa_ascend.types import Demand, SequenceResult, SequenceStep, StepPlan


@dataclass(eq=False)
class Sequence:
    """A request as the scheduler sees it: at most ``limit`` positions; ``key`` is None where no prefix cache is asked.
    ``demand`` is what its next step needs; ``served`` the index of the last step that it took part in."""

    request_id: str
    prompt_tokens: int
    limit: int
    page_tables: PageTables
    key: PrefixKey | None = None
    committed: int = 0
    demand: Demand | None = None
    served: int = -1

    @property
    def prefills(self) -> bool:
        return self.committed < self.prompt_tokens

    @property
    def reserved(self) -> int:
        """Pages that it may still take."""
        committed = max(self.committed, self.prompt_tokens)
        return worst_case(self.limit, len(self.page_tables.by_slot), committed) - self.page_tables.num_pages


@dataclass(frozen=True)
class Admission:
    """A request that begins to run. What the prefix cache has of its prompt counts as committed, and its full pages are
    in the request's tables; ``entry``: it has all of it."""

    sequence: Sequence
    entry: PrefixEntry | None


@dataclass
class Scheduler:
    """Decides from what it was told alone: the same calls in the same order give the same plans."""

    limits: Limits
    allocator: PageAllocator
    prefix_cache: PrefixCache | None = None
    approximate: bool = False
    waiting: deque[Sequence] = field(default_factory=deque)
    running: list[Sequence] = field(default_factory=list)
    num_steps: int = 0
    num_prefill_steps: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    _prefilled_last: bool = False

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def remove(self, request_id: str) -> bool:
        """Takes a request out, running or waiting, and gives its pages back; False if there is none."""
        for group in (self.running, self.waiting):
            for sequence in group:
                if sequence.request_id == request_id:
                    group.remove(sequence)
                    sequence.page_tables.release()
                    return True
        return False

    # ---- admission -------------------------------------------------------------------------------------------------

    def admit(self) -> Admission | None:
        """The next request, if it may begin now. Whoever calls must give it a ``demand``, and, if there is an entry
        with a partial page, copy that page before anything else is allocated."""
        if not self.waiting or len(self.running) >= self.limits.max_num_seqs:
            return None
        sequence = self.waiting[0]
        entry, pages = self._cached(sequence.key)
        if pages and not self._fits(sequence, entry, pages):
            entry, pages = None, ()
        if not pages and not self._fits(sequence, None, ()):
            return None
        self.running.append(self.waiting.popleft())
        full = entry.full_pages if entry else pages
        sequence.page_tables.adopt(full)
        sequence.committed = sequence.prompt_tokens if entry else len(full) * PAGE_SIZE
        if sequence.key is not None:
            self.prefix_queries += sequence.prompt_tokens
            self.prefix_hits += sequence.committed
        return Admission(sequence, entry)

    def _cached(self, key: PrefixKey | None) -> tuple[PrefixEntry | None, tuple[int, ...]]:
        """(the entry of an equal prompt, all its pages), or (None, full pages of an equal beginning)."""
        if key is None or self.prefix_cache is None:
            return None, ()
        entry = self.prefix_cache.get(key)
        if entry is not None:
            return entry, entry.pages
        return None, self.prefix_cache.longest(key) if self.approximate else ()

    def _fits(self, sequence: Sequence, entry: PrefixEntry | None, pages: tuple[int, ...]) -> bool:
        """Whether this one and all that run can get their pages at worst. Cached ``pages`` that it uses cannot be
        evicted meanwhile, an entry's partial page until it was copied."""
        full = entry.full_pages if entry else pages
        needed = worst_case(sequence.limit, len(sequence.page_tables.by_slot), sequence.prompt_tokens) - len(full)
        available = self.allocator.num_free - sum(other.reserved for other in self.running)
        if needed <= available and not pages:
            return True
        if self.prefix_cache is None:
            return False
        pinned = sum(map(self.prefix_cache.is_evictable, pages))
        return needed + pinned <= available + self.prefix_cache.num_evictable

    # ---- steps -----------------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """The next step, with room in the pages for what it writes; None if nothing runs."""
        prefill, chosen = self._choose()
        if not chosen:
            return None
        steps = []
        for sequence in chosen:
            assert sequence.demand is not None
            sequence.page_tables.make_room(sequence.demand)
            sequence.served = self.num_steps
            tables = tuple(map(tuple, sequence.page_tables.by_slot))
            steps.append(SequenceStep(sequence.request_id, tables, sequence.page_tables.num_shared))
        plan = StepPlan(self.num_steps, prefill, tuple(steps))
        self.num_steps += 1
        self.num_prefill_steps += prefill
        self._prefilled_last = prefill
        return plan

    def _choose(self) -> tuple[bool, list[Sequence]]:
        """(whether it is a prefill step, who takes part): as many as ``max_num_batched_tokens`` holds, but one at
        least, whose branches together may exceed it."""
        prefills = [sequence for sequence in self.running if sequence.prefills]
        decodes = [sequence for sequence in self.running if not sequence.prefills]
        prefill = bool(prefills) and not (self._prefilled_last and decodes)
        chosen: list[Sequence] = []
        tokens = 0
        for sequence in prefills if prefill else sorted(decodes, key=lambda sequence: sequence.served):
            assert sequence.demand is not None
            tokens += sequence.demand.num_computed
            if chosen and tokens > self.limits.max_num_batched_tokens:
                break
            chosen.append(sequence)
        return prefill, chosen

    def advance(self, result: SequenceResult) -> None:
        """Takes note of what a step made of a sequence: surplus pages are free, or all, if it is done."""
        if result.next_demand is None:
            self.remove(result.request_id)
            return
        sequence = next(s for s in self.running if s.request_id == result.request_id)
        sequence.committed, sequence.demand = result.num_committed, result.next_demand
        sequence.page_tables.share_committed(result.num_committed)
