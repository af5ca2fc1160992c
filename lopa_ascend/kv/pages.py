"""Page allocation for keys and values: who holds which page. Plain integers, no tensors.

A page holds 128 positions. A slot is the place of a row, with a page table of its own. Full committed pages are shared
by all slots of a sequence; the pages that the window touches are private.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lopa_ascend.types import KVShape

PAGE_SIZE = 128


class OutOfPages(RuntimeError):
    """The pool has no page left."""


class PageAllocator:
    """Reference-counted pages of a pool of fixed size. ``reclaim`` gives up references if no page is free, and returns
    False if it has none."""

    def __init__(self, num_pages: int, reclaim: Callable[[], bool] = lambda: False) -> None:
        self.num_pages = num_pages
        self.reclaim = reclaim
        self.num_evictable = 0
        """Pages whose only holder is the prefix cache."""
        self._references = [0] * num_pages
        self._cached_references = [0] * num_pages
        """By page: the prefix cache's share of its references."""
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def references(self, page: int) -> int:
        return self._references[page]

    def is_evictable(self, page: int) -> bool:
        """Whether the prefix cache is its only holder."""
        return 0 < self._cached_references[page] == self._references[page]

    def allocate(self) -> int:
        """A free page, reclaimed if need be, with one reference. Raises OutOfPages if there is none."""
        while not self._free:
            if not self.reclaim():
                raise OutOfPages(f"all {self.num_pages} KV pages are in use")
        page = self._free.pop()
        self._references[page] = 1
        return page

    def share(self, page: int) -> int:
        assert self._references[page] > 0
        self._count(page, references=1)
        return page

    def release(self, page: int) -> None:
        """A page without references is free."""
        assert self._references[page] > self._cached_references[page]
        self._count(page, references=-1)
        if not self._references[page]:
            self._free.append(page)

    def give_to_cache(self, page: int) -> None:
        """Turns an ordinary reference into one of the prefix cache."""
        assert self._references[page] > self._cached_references[page]
        self._count(page, cached=1)

    def take_from_cache(self, page: int) -> None:
        """The reverse of ``give_to_cache``."""
        assert self._cached_references[page] > 0
        self._count(page, cached=-1)

    def _count(self, page: int, *, references: int = 0, cached: int = 0) -> None:
        self.num_evictable -= self.is_evictable(page)
        self._references[page] += references
        self._cached_references[page] += cached
        self.num_evictable += self.is_evictable(page)


def page_bytes(shape: KVShape, item_size: int) -> int:
    return 2 * shape.num_layers * PAGE_SIZE * shape.num_kv_heads * shape.head_dim * item_size


def pages_for(positions: int) -> int:
    return -(-positions // PAGE_SIZE)


def slots_for(num_branches: int, groups: int) -> int:
    """Slots of a sequence in each of ``groups`` branch-parallel groups, which take its branches in turn."""
    return -(-num_branches // groups)


def worst_case(positions: int, num_slots: int, committed: int, window: int | None = None) -> int:
    """The most pages that a sequence can hold from now on. Full pages of ``committed`` positions are held once, all
    others once for each slot. The prompt counts as committed from the start if one row computes it. ``window``: the
    most positions that are not committed when slots beside the first have rows; None: any number."""
    private = pages_for(positions) - committed // PAGE_SIZE
    if window is not None:
        private = min(private, pages_for(PAGE_SIZE - 1 + window))
    return pages_for(positions) + (num_slots - 1) * private


class PageTables:
    """The page tables of one sequence's slots: ``by_slot[slot][i]`` is the page of the positions [128 i, 128 (i + 1)).
    The first ``num_shared_pages`` are the same in all slots."""

    def __init__(self, allocator: PageAllocator, num_slots: int) -> None:
        self.allocator = allocator
        self.by_slot: list[list[int]] = [[] for _ in range(num_slots)]
        self.num_shared_pages = 0

    @property
    def num_pages(self) -> int:
        """Different pages held."""
        return len({page for table in self.by_slot for page in table})

    def grow(self, slot: int, positions: int) -> None:
        """Allocates pages until a slot holds ``positions``."""
        table = self.by_slot[slot]
        while len(table) < pages_for(positions):
            table.append(self.allocator.allocate())

    def adopt(self, pages: Sequence[int]) -> None:
        """Shares full, written pages as the first pages of all slots, which must be empty."""
        for table in self.by_slot:
            assert not table
            table.extend(self.allocator.share(page) for page in pages)
        self.num_shared_pages = len(pages)

    def make_room(self, committed: int, slot_ends: Sequence[int], *, winner_commits: bool) -> None:
        """Allocates the pages that a step writes: each slot must hold what is then ``committed``, and its longest row,
        which ends at ``slot_ends`` (0: none). A slot without a row shares slot 0's full committed pages."""
        self.grow(0, max(committed, slot_ends[0]))
        if not winner_commits:  # all branches write the same, so full pages are shared before they are written
            self.share_committed(committed)
        for slot, end in enumerate(slot_ends):
            table = self.by_slot[slot]
            if not end:
                for page in self.by_slot[0][len(table) : committed // PAGE_SIZE]:
                    table.append(self.allocator.share(page))
            self.grow(slot, max(committed, end))

    def share_committed(self, num_committed: int) -> None:
        """Makes all slots share slot 0's full committed pages."""
        num_full = num_committed // PAGE_SIZE
        for table in self.by_slot[1:]:
            for i in range(self.num_shared_pages, num_full):
                page = self.allocator.share(self.by_slot[0][i])
                if i < len(table):
                    self.allocator.release(table[i])
                    table[i] = page
                else:
                    table.append(page)
        self.num_shared_pages = max(self.num_shared_pages, num_full)

    def release(self) -> None:
        for table in self.by_slot:
            for page in table:
                self.allocator.release(page)
            table.clear()
        self.num_shared_pages = 0
