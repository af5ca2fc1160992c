"""KV pages: who holds which of them. Plain integers, no tensors.

A page holds the keys and values of 128 positions. A slot is the place of a row, with a page table of its own. Pages
that are full and committed are shared by all slots of a sequence; the pages that the window touches are private.
"""

from __future__ import annotations

PAGE_SIZE = 128


class OutOfPages(RuntimeError):
    """The pool has no page left."""


class PageAllocator:
    """Reference-counted pages out of a pool of fixed size; the lowest free page first."""

    def __init__(self, num_pages: int):
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._references = [0] * num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self) -> int:
        if not self._free:
            raise OutOfPages(f"all {self.num_pages} KV pages are in use")
        page = self._free.pop()
        self._references[page] = 1
        return page

    def share(self, page: int) -> int:
        """One more reference to a page that is in use."""
        assert self._references[page] > 0
        self._references[page] += 1
        return page

    def release(self, page: int) -> None:
        assert self._references[page] > 0
        self._references[page] -= 1
        if not self._references[page]:
            self._free.append(page)


def pages_for(positions: int) -> int:
    return -(-positions // PAGE_SIZE)


class SlotTables:
    """The page tables of one sequence's slots: ``tables[slot][i]`` holds positions [128 i, 128 (i + 1))."""

    def __init__(self, allocator: PageAllocator, num_slots: int):
        self.allocator = allocator
        self.tables: list[list[int]] = [[] for _ in range(num_slots)]
        self.num_shared = 0

    def grow(self, slot: int, positions: int) -> None:
        """Makes room for ``positions`` positions in a slot."""
        table = self.tables[slot]
        while len(table) < pages_for(positions):
            table.append(self.allocator.allocate())

    def share_committed(self, committed: int) -> None:
        """Pages that ``committed`` positions fill become slot 0's for all slots."""
        full = committed // PAGE_SIZE
        for table in self.tables[1:]:
            for i in range(self.num_shared, full):
                if i < len(table):
                    self.allocator.release(table[i])
                    table[i] = self.allocator.share(self.tables[0][i])
                else:
                    table.append(self.allocator.share(self.tables[0][i]))
        self.num_shared = max(self.num_shared, full)

    def release(self) -> None:
        """Gives every page back."""
        for table in self.tables:
            for page in table:
                self.allocator.release(page)
            table.clear()
        self.num_shared = 0
