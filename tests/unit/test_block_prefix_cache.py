"""The prefix cache of block-causal models: the longest beginning in whole blocks, on pages that hold it."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lopa_ascend.config import DecodingParams
from lopa_ascend.core import Request, Sequence
from lopa_ascend.engine.scheduler import Scheduler
from lopa_ascend.kv.pages import PAGE_SIZE, PageAllocator, PageTables, pages_for
from lopa_ascend.kv.prefix_cache import BlockPrefixCache, Prefix, _num_common
from lopa_ascend.types import ModelProperties, SequencePlan
from tests.tiers import examples
from tests.unit.paper_scheduler import Paper, limits, record

SAME = ModelProperties(logit_shift=0, attention="block_causal")
SHIFTED = ModelProperties(logit_shift=1, attention="block_causal")
PHASED = ModelProperties(logit_shift=0, attention="block_causal", grid="prompt", ends_on_grid=False)
CAUSAL = ModelProperties(logit_shift=0, attention="causal")
Tokens = tuple[int, ...]


def key(tokens: Tokens, block_size: int = 4) -> Prefix:
    return Prefix("block_causal", block_size, 0, tokens)


def beginnings(tokens: Tokens, block_size: int, phase: int = 0) -> set[Tokens]:
    """The plain model of an entry: all its beginnings in whole blocks."""
    return {tokens[:end] for end in range(phase or block_size, len(tokens) + 1, block_size)}


# A sequence is a path in a small tree: few different pieces, so that much is in common.
pieces = st.lists(st.tuples(st.integers(0, 1), st.sampled_from([4, 8, 60, 128])), min_size=1, max_size=5)
texts = pieces.map(lambda parts: tuple(token for token, length in parts for _ in range(length)))


@settings(max_examples=examples(200))
@given(st.lists(st.tuples(st.booleans(), st.booleans(), texts, st.sampled_from([4, 8])), max_size=20))
def test_the_longest_beginning_is_found(actions: list[tuple[bool, bool, Tokens, int]]) -> None:
    """Without a shortage of pages: exactly what a dictionary of all beginnings has, on pages of these positions."""
    allocator = PageAllocator(1000)
    cache = BlockPrefixCache(allocator)
    known: dict[int, set[Tokens]] = {4: set(), 8: set()}
    held: dict[int, set[Tokens]] = {}  # by page: the beginnings whose last page it is
    for is_new, ends, text, size in actions:
        tokens = text[: len(text) // size * size]
        found = cache.get(key(tokens, size))
        expected = max(beginnings(tokens, size) & known[size], key=len, default=())
        assert (found.tokens if found else ()) == expected
        if found:
            assert len(found.pages) == pages_for(len(found.tokens))
            for index, page in enumerate(found.pages):
                assert expected[: (index + 1) * PAGE_SIZE] in held[page]
        if not is_new or not tokens:
            continue
        assert (key(tokens, size) in cache) == (tokens in known[size])
        table = [allocator.allocate() for _ in range(pages_for(len(tokens)))]
        if ends:
            cache.keep(key(tokens, size), table)
            pages: tuple[int, ...] | None = tuple(table)
        else:
            pages = cache.take_pages(key(tokens, size), table)
            if pages is not None:
                cache.insert(key(tokens, size), pages, None)
        for index, page in enumerate(pages or ()):
            inside = range(index * PAGE_SIZE, min(len(tokens), (index + 1) * PAGE_SIZE))
            held[page] = {tokens[: position + 1] for position in inside}
        known[size] |= beginnings(tokens, size)
        for page in table:
            allocator.release(page)
    assert allocator.num_free + allocator.num_evictable == allocator.num_pages
    cache.clear()
    assert allocator.num_free == allocator.num_pages
    assert not cache._sorted


def test_no_entry_is_the_beginning_of_another() -> None:
    allocator = PageAllocator(10)
    cache = BlockPrefixCache(allocator)
    for tokens in ((1,) * 4, (1,) * 8, (1, 1, 1, 1, 2, 2, 2, 2), (1,) * 4, (1,) * 8):
        table = [allocator.allocate()]
        cache.keep(key(tokens), table)
        allocator.release(table[0])
    assert len(cache) == 2
    assert allocator.num_evictable == 2


def test_another_block_size_or_a_part_of_a_block_is_not_found() -> None:
    allocator = PageAllocator(10)
    cache = BlockPrefixCache(allocator)
    cache.keep(key((1,) * 8), [allocator.allocate()])
    assert cache.get(key((1,) * 8, block_size=8)) is None
    assert cache.get(key((1, 1, 1, 2))) is None
    found = cache.get(key((*(1,) * 6, 2, 2)))
    assert found is not None
    assert len(found.tokens) == 4


@settings(max_examples=examples(200))
@given(texts, texts, st.integers(1, 9), st.integers(0, 8))
def test_what_two_beginnings_have_in_common_is_whole_blocks(one: Tokens, other: Tokens, size: int, phase: int) -> None:
    """Of a grid that begins anywhere; and all, if one is the beginning of the other."""
    phase %= size
    first, second = (Prefix("block_causal", size, phase, tokens) for tokens in (one, other))
    ends = [*range(phase or size, min(len(one), len(other)), size), min(len(one), len(other))]
    expected = max((end for end in ends if one[:end] == other[:end]), default=0)
    assert _num_common(first, second) == _num_common(second, first) == expected
    assert _num_common(first, replace(second, phase=phase + 1)) == 0


# ---- with the scheduler: pages hold tags that say what the keys and values at a position depend on -------------------


@dataclass(frozen=True)
class Chat:
    step: int
    text: Tokens
    rest: int  # further tokens of the prompt
    new: int
    slots: int
    size: int
    abort_after: int | None

    @property
    def prompt(self) -> Tokens:
        return (*self.text, *[7] * self.rest)


chats = st.lists(
    st.builds(
        Chat,
        step=st.integers(0, 30),
        text=texts.map(lambda text: text[:500]),
        rest=st.integers(0, 3),
        new=st.integers(1, 200),
        slots=st.integers(1, 3),
        size=st.sampled_from([4, 32, 64]),
        abort_after=st.one_of(st.none(), st.integers(0, 40)),
    ),
    min_size=1,
    max_size=20,
)


Grid = tuple[int, int]
"""(length of a block; where the first whole one begins)."""


@dataclass
class BlockPaper(Paper):
    """Commits answers of the token 1, block by block."""

    properties: ModelProperties = SAME
    requests: dict[str, Request] = field(default_factory=dict)
    known: dict[Grid, set[Tokens]] = field(default_factory=dict)  # what a cache without bound would have
    numbers: dict[tuple[Grid, int, Tokens], int] = field(default_factory=dict)

    def final_tokens(self, request: Request) -> Tokens:
        return (*request.prompt, *[1] * (request.limit - len(request.prompt)))

    def content(self, request: Request) -> list[object]:
        """For each position a tag for its grid and the tokens up to the end of its block."""
        grid, tokens = self.grid(request), self.final_tokens(request)
        tags, tag, (size, phase) = list[object](), 0, grid
        ends = [0, *range(phase or size, request.limit + 1, size)]
        for begin, end in pairwise(ends):
            tag = self.numbers.setdefault((grid, tag, tokens[begin:end]), len(self.numbers) + 1)
            tags += [tag] * (end - begin)
        return tags

    def grid(self, request: Request) -> Grid:
        if self.properties.is_causal:
            return 1, 0
        size = request.params.block_size
        return size, len(request.prompt) % size if self.properties.grid == "prompt" else 0

    def held(self, table: list[int], end: int) -> list[object]:
        return [tag for page in table[: pages_for(end)] for tag in self.pages[page]][:end]

    def ask(self, sequence: Sequence, start: int) -> None:
        request, rng = sequence.request, random.Random(f"{self.seed} {sequence.request_id} {len(self.plans)}")
        num_slots = 1 + request.params.lookaheads
        committed, rows = request.origin, 1
        if start >= request.origin:
            committed = min(request.limit, start + request.params.block_size * rng.randint(0, 3))
            rows = rng.randint(1, num_slots)
        ends = [rng.randint(committed, request.limit) for _ in range(rows)] + [0] * (num_slots - rows)
        sequence.plan = SequencePlan(start, committed - start, (), 1, winner_commits=False, prefix_length=0)
        sequence.num_computed, sequence.slot_ends = sum(end - start for end in ends if end), tuple(ends)

    def run(self, sequence: Sequence) -> None:
        start, committed, request = sequence.num_committed, sequence.committed_end, sequence.request
        pages, content, tokens = sequence.page_tables, self.content(request), self.final_tokens(request)
        sequence.strategy.branches = [replace(sequence.strategy.anchor, tokens=tokens[len(request.prompt) :])]
        for slot, end in enumerate(sequence.slot_ends):
            is_filled = (
                start // PAGE_SIZE < request.origin // PAGE_SIZE
            )  # the page where the pass begins is shared after it
            present = start if slot == 0 or not is_filled else start // PAGE_SIZE * PAGE_SIZE
            assert self.held(pages.by_slot[slot], present) == content[:present]
            first = start if slot == 0 else max(start, pages.num_shared_pages * PAGE_SIZE)
            for position in range(first, max(end, committed)):
                page = self.pages.setdefault(pages.by_slot[slot][position // PAGE_SIZE], [None] * PAGE_SIZE)
                page[position % PAGE_SIZE] = content[position] if position < committed else (request.request_id, slot)
        sequence.strategy.num_committed = committed
        done = committed == request.limit
        self.end_or_ask(sequence, done, committed)
        tables = [list(table) for table in pages.by_slot]
        self.scheduler.advance(sequence, record(start, committed))
        for table in tables:
            assert self.held(table, committed) == content[:committed]
        for end in [request.origin] * (start < request.origin) + [committed] * done:
            grid = self.grid(request)
            self.known.setdefault(grid, set()).update(beginnings(tokens[:end], *grid))
        if done:
            del self.running[request.request_id]

    def begin(self, request: Request, page_tables: PageTables, entry: Prefix | None) -> Sequence:
        """Checks what was found: all that was computed, if there are pages enough."""
        grid, tokens = self.grid(request), request.prompt
        if (self.properties.logit_shift or self.properties.is_causal) and len(tokens) % grid[0] == 0:
            tokens = tokens[: -grid[0]]
        longest = max(beginnings(tokens, *grid) & self.known.get(grid, set()), key=len, default=())
        num_cached = 0 if entry is None else len(entry.tokens)
        assert not num_cached or tokens[:num_cached] in beginnings(longest, *grid)
        assert num_cached == len(longest) or self.scheduler.limits.num_pages < 1000
        return super().begin(request, page_tables, entry)

    def drive_chats(self, arriving: list[Chat]) -> None:
        for step in range(3000):
            for index, chat in enumerate(arriving):
                name = f"r{index}"
                if chat.step == step:
                    new = chat.new if self.properties.ends_on_grid else pages_for(chat.new) * PAGE_SIZE
                    params = DecodingParams(num_branches=chat.slots - 1, block_size=chat.size, max_new_tokens=new)
                    self.requests[name] = Request(name, chat.prompt, params, properties=self.properties)
                    self.running[name] = chat  # type: ignore[assignment]
                    self.scheduler.add(self.requests[name])
                elif chat.abort_after is not None and chat.step + chat.abort_after == step:
                    if self.running.pop(name, None):
                        assert self.scheduler.remove(name)
            self.step()
            if step > 31 and not self.running:
                return
        raise AssertionError("somebody never finished")


def block_paper(seed: int, properties: ModelProperties, num_pages: int) -> BlockPaper:
    allocator = PageAllocator(num_pages)
    run = BlockPaper(seed, properties=properties)
    bounds = limits(num_pages=num_pages)
    run.scheduler = Scheduler(bounds, allocator, run.begin, BlockPrefixCache(allocator))
    return run


@settings(max_examples=examples(100))
@given(
    chats, st.integers(0, 10**6), st.sampled_from([SAME, SHIFTED, PHASED, CAUSAL]), st.sampled_from([20, 24, 40, 2000])
)
def test_shared_beginnings_hold_the_right_keys_and_values(
    arriving: list[Chat], seed: int, properties: ModelProperties, num_pages: int
) -> None:
    run = block_paper(seed, properties, num_pages)
    run.drive_chats(arriving)
    allocator = run.scheduler.allocator
    assert allocator.num_free + allocator.num_evictable == allocator.num_pages
    assert run.scheduler.prefix_cache is not None
    run.scheduler.prefix_cache.clear()
    assert allocator.num_free == allocator.num_pages


@pytest.mark.parametrize(
    ("properties", "rest", "cached"), [(SAME, 0, 304), (SAME, 3, 304), (SHIFTED, 0, 300), (SHIFTED, 3, 304)]
)
def test_a_system_prompt_is_computed_once(properties: ModelProperties, rest: int, cached: int) -> None:
    """The second request has the first one's beginning of 304 tokens; with shifted logits and no further token its last
    block is computed, since it predicts the first position."""
    run = block_paper(0, properties, 2000)
    run.drive_chats([Chat(0, (5,) * 304, 2, 8, 1, 4, None), Chat(25, (5,) * 304, rest, 8, 3, 4, None)])
    assert run.scheduler.prefix_queries == 306 + 304 + rest
    assert run.scheduler.prefix_hits == cached


def test_a_grid_from_the_prompts_end_is_shared_where_its_phase_is_the_same() -> None:
    run = block_paper(0, PHASED, 2000)
    lengths = (302, 303, 306, 310)
    run.drive_chats([Chat(10 * step, (5,) * 300, n - 300, 8, 1, 4, None) for step, n in enumerate(lengths)])
    assert run.scheduler.prefix_hits == 302 + 306, "302, 306 and 310 positions are 2 more than whole blocks, 303 are 3"


def test_the_next_turn_of_a_conversation_finds_prompt_and_answer() -> None:
    run = block_paper(0, SAME, 2000)
    run.drive_chats([Chat(0, (5,) * 130, 0, 70, 1, 4, None), Chat(29, (*(5,) * 130, *(1,) * 70, 2), 0, 8, 1, 4, None)])
    assert run.scheduler.prefix_hits == 200
