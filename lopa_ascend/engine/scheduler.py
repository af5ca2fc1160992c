"""Which requests run, which of them take part in a step, and which pages they use. Imports no torch.

Requests are admitted first come, first served, once all pages are available that one can need in the worst case: for
the prompt and the whole canvas, once for every slot except where slots share pages. So a running request is never
preempted. After each commit, pages that it can no longer need become available to others.

Prompts are computed in steps of their own, which take turns with decoding steps (``turns.py``). If a step cannot hold
all running requests, those that have waited longest go first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from lopa_ascend.admission import Limits
from lopa_ascend.core import Request, Sequence, Step
from lopa_ascend.engine.turns import MAX_PREFILL_TOKENS, Pieces, Prompt, Turns
from lopa_ascend.kv.pages import PAGE_SIZE, PageAllocator, PageTables, worst_case
from lopa_ascend.kv.prefix_cache import Prefix, PrefixCache
from lopa_ascend.types import PageCopy, StepRecord

Begin = Callable[[Request, PageTables, Prefix | None], Sequence]
"""See ``Starter.begin``."""


class Scheduler:
    """Admits requests, plans steps and frees pages. Equal calls in equal order give equal plans on every rank.

    Attributes:
        waiting: by request id, in order of arrival.
        running: by request id, in order of admission.
        prefix_queries, prefix_hits: prompt tokens looked up in the prefix cache, and found.

    Args:
        begin: makes the sequence of an admitted request.
        prefix_cache: None: no prompt is reused.
        pieces: for a causal model's prompts; None: prompts are computed whole.
    """

    def __init__(
        self,
        limits: Limits,
        allocator: PageAllocator,
        begin: Begin,
        prefix_cache: PrefixCache | None = None,
        pieces: Pieces | None = None,
    ) -> None:
        self.limits, self.allocator, self.prefix_cache = limits, allocator, prefix_cache
        self.waiting: dict[str, Request] = {}
        self.running: dict[str, Sequence] = {}
        self.num_steps = 0
        self.num_prefill_steps = 0
        self.prefix_queries = 0
        self.prefix_hits = 0
        self._begin = begin
        self._copies: list[PageCopy] = []
        self._turns = Turns(min(MAX_PREFILL_TOKENS, limits.max_num_batched_tokens))
        self._pieces = pieces

    def add(self, request: Request) -> None:
        """Queues a request that was checked against ``limits`` and has a new id."""
        self.waiting[request.request_id] = request

    def remove(self, request_id: str) -> bool:
        """Drops a request wherever it is and frees its pages; False if there is none."""
        is_waiting = self.waiting.pop(request_id, None) is not None
        sequence = self.running.pop(request_id, None)
        if sequence is None:
            return is_waiting
        sequence.page_tables.release()
        return True

    # ---- admission -------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Starts waiting requests in order until one does not fit."""
        while self.waiting and len(self.running) < self.limits.max_num_seqs:
            request = next(iter(self.waiting.values()))
            entry = self._find_cached(request)
            if entry is not None and not self._fits(request, entry):
                entry = None  # pages that a request reuses cannot be evicted, so it may fit only if it reuses none
            if entry is None and not self._fits(request, None):
                return
            self.running[request.request_id] = self._start(request, entry)
            del self.waiting[request.request_id]

    def _find_cached(self, request: Request) -> Prefix | None:
        """The cached prefix of the prompt."""
        if self.prefix_cache is None or not request.params.is_pipelined:
            return None
        key = prefix_key(request)
        return self.prefix_cache.get(replace(key, tokens=key.tokens[: request.num_reusable]))

    def _fits(self, request: Request, entry: Prefix | None) -> bool:
        """Whether this request's worst case fits beside that of every running one. ``entry``: its cached prefix."""
        params = request.params
        num_slots, num_shared = self.limits.num_slots(params), request.num_shared_positions
        needed = worst_case(request.limit, num_slots, num_shared, params.max_window)
        reserved = sum(sequence.num_reserved for sequence in self.running.values())
        available = self.allocator.num_free + self.allocator.num_evictable - reserved
        if entry is not None:
            needed -= len(entry.full_pages)
            # The request's cached pages must stay: the shared ones while it runs, the partial page until it is copied.
            available -= sum(map(self.allocator.is_evictable, entry.pages))
        return needed <= available

    def _start(self, request: Request, entry: Prefix | None) -> Sequence:
        """Begins a sequence on the cached pages of its prompt; a partial page is copied."""
        page_tables = PageTables(self.allocator, self.limits.num_slots(request.params))
        if entry is not None:
            page_tables.adopt(entry.full_pages)
        sequence = self._begin(request, page_tables, entry)
        if entry is not None and entry.partial_page is not None:
            self._copy_to_slots(entry, page_tables, request.num_shared_positions)
        if self.prefix_cache is not None and request.params.is_pipelined:
            self.prefix_queries += len(request.prompt)
            self.prefix_hits += sequence.num_cached
        return sequence

    def _copy_to_slots(self, entry: Prefix, page_tables: PageTables, num_shared: int) -> None:
        """Gives the slots copies of the page that holds the last cached positions. If the ``num_shared`` positions that
        all slots share fill that page, slot 0 alone needs it now."""
        assert entry.partial_page is not None
        partial_page, num_cached = entry.partial_page, len(entry.tokens)
        self.allocator.share(partial_page)  # growing a table may drop the entry from the cache
        is_filled = num_shared // PAGE_SIZE > num_cached // PAGE_SIZE
        for slot, table in enumerate(page_tables.by_slot[:1] if is_filled else page_tables.by_slot):
            page_tables.grow(slot, num_cached)
            self._copies.append(PageCopy(partial_page, table[-1], num_cached % PAGE_SIZE))
        self.allocator.release(partial_page)

    # ---- steps -----------------------------------------------------------------------------------------------------

    def plan(self) -> Step | None:
        """Admits what may run and plans the next step, with pages for what it writes; None if nothing runs."""
        self._admit()
        prefill, chosen = self._choose()
        if not chosen:
            return None
        for sequence in chosen:
            sequence.make_room()
            sequence.last_step = self.num_steps
        step = Step(self.num_steps, prefill, tuple(chosen), tuple(self._copies))
        self._copies.clear()
        self.num_steps += 1
        if prefill:
            self.num_prefill_steps += 1
        return step

    def _choose(self) -> tuple[bool, list[Sequence]]:
        """Whether the next step is a prefill step, and its sequences. A decoding step takes what
        ``max_num_batched_tokens`` allows, but at least one sequence, even if its branches exceed that."""
        prompts = [sequence for sequence in self.running.values() if sequence.in_prefill]
        decodes = [sequence for sequence in self.running.values() if not sequence.in_prefill]
        if with_prompts := self._choose_prompts(prompts, decodes):
            return True, with_prompts
        chosen: list[Sequence] = []
        num_computed = 0
        for sequence in sorted(decodes, key=lambda sequence: sequence.last_step):
            num_computed += sequence.num_computed
            if chosen and num_computed > self.limits.max_num_batched_tokens:
                break
            chosen.append(sequence)
        return False, chosen

    def _choose_prompts(self, prompts: list[Sequence], decodes: list[Sequence]) -> list[Sequence]:
        """Sequences whose prompts, or pieces of them, the next step computes; none if it is a decoding step."""
        if self._pieces is None:
            waiting = {sequence.request_id: sequence.num_computed for sequence in prompts}
            return [self.running[request_id] for request_id in self._turns.choose(waiting, bool(decodes))]
        left = {
            sequence.request_id: Prompt(sequence.num_committed, len(sequence.next_pass.rows[-1].tokens))
            for sequence in prompts
        }
        work = sum(self._pieces.work(sequence.num_committed, sequence.num_computed) for sequence in decodes)
        pieces = self._pieces.pieces(left, work)
        for request_id, size in pieces.items():
            sequence = self.running[request_id]
            sequence.plan = sequence.next_pass.piece(size)
        return [self.running[request_id] for request_id in pieces]

    def advance(self, sequence: Sequence, record: StepRecord | None) -> None:
        """Follows a step that updated the sequence: caches what later requests can reuse, and frees pages no longer
        needed, or all if the sequence is done. ``record`` is None if the step failed."""
        if record is not None and _commits(record, sequence.request.origin):
            self._remember(sequence)
        if sequence.plan is None:
            if sequence.error is None and self.prefix_cache is not None:
                self.prefix_cache.keep(_committed_key(sequence), sequence.page_tables.by_slot[0])
            self.remove(sequence.request_id)
        else:
            sequence.page_tables.share_committed(sequence.num_committed)

    def _remember(self, sequence: Sequence) -> None:
        """Caches a prompt that was just computed, unless all pages are in use."""
        if self.prefix_cache is None:
            return
        key, table = prefix_key(sequence.request), sequence.page_tables.by_slot[0]
        pages = self.prefix_cache.take_pages(key, table)
        if pages is None:
            return
        num_partial = len(key.tokens) % PAGE_SIZE
        if num_partial:
            self._copies.append(PageCopy(table[len(pages) - 1], pages[-1], num_partial))
        self.prefix_cache.insert(key, pages, sequence.last_hidden)


def _commits(record: StepRecord, end: int) -> bool:
    """Whether a pass first left the final keys and values of all positions before ``end``."""
    return record.cache_length < end <= record.cache_length + record.committed


def prefix_key(request: Request) -> Prefix:
    """What keys and values of the prompt depend on; in a block-causal model, those of its whole blocks."""
    params, tokens = request.params, request.prompt[: request.origin]
    if request.properties.is_block_causal:
        phase = len(request.prompt) % params.block_size if request.properties.grid == "prompt" else 0
        return Prefix(params.window_attention, params.block_size, phase, tokens)
    if request.properties.is_causal:
        return Prefix(params.window_attention, 1, 0, tokens)
    full = params.window_attention == "full"
    return Prefix(params.window_attention, min(params.block_size, params.max_new_tokens) if full else 0, 0, tokens)


def _committed_key(sequence: Sequence) -> Prefix:
    """What keys and values of all committed positions depend on."""
    tokens = *sequence.request.prompt, *sequence.strategy.anchor.tokens
    return replace(prefix_key(sequence.request), tokens=tokens[: sequence.num_committed])
