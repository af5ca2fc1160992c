"""Keys and values of whole prompts, kept for requests with an equal prompt. Page ids and opaque values, no torch.

A prompt attends to itself in both directions, so its pages depend on all of it, and only an equal whole prompt can
share them exactly. With full attention they depend on the first block as well, which is all masks: on its length.
One cache belongs to one engine, and so to one model and adapter.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lopa_ascend.kv.pages import PAGE_SIZE, OutOfPages, PageAllocator


@dataclass(frozen=True, slots=True)
class PrefixKey:
    """``first_block`` is the length of the first block with full attention, else 0."""

    tokens: tuple[int, ...]
    window_attention: str
    first_block: int


@dataclass(frozen=True, slots=True)
class PrefixEntry:
    """``pages`` hold all positions of ``key.tokens``; a partial last one is a copy of its own. ``last`` is the final
    normed hidden state of the last position."""

    key: PrefixKey
    pages: tuple[int, ...]
    last: Any

    @property
    def full_pages(self) -> tuple[int, ...]:
        return self.pages[: len(self.key.tokens) // PAGE_SIZE]

    @property
    def partial_page(self) -> int | None:
        return self.pages[-1] if len(self.key.tokens) % PAGE_SIZE else None


class PrefixCache:
    """The least recently used entry goes first, whenever the allocator needs a page."""

    def __init__(self, allocator: PageAllocator):
        self._allocator = allocator
        allocator.reclaim = self.drop_oldest
        self._entries: OrderedDict[PrefixKey, PrefixEntry] = OrderedDict()
        self._held: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: PrefixKey) -> bool:
        return key in self._entries

    @property
    def num_evictable(self) -> int:
        """Pages that nobody but this cache holds."""
        return sum(map(self.is_evictable, self._held))

    def is_evictable(self, page: int) -> bool:
        return self._allocator.references(page) == self._held[page]

    def get(self, key: PrefixKey) -> PrefixEntry | None:
        entry = self._entries.get(key)
        if entry is not None:
            self._entries.move_to_end(key)
        return entry

    def longest(self, key: PrefixKey) -> tuple[int, ...]:
        """The full pages of the longest beginning of ``key.tokens``, short of all of them, that any entry has: the
        published approximation, for the entry's prompt went on differently."""
        best: PrefixEntry | None = None
        length = 0
        for entry in self._entries.values():
            if entry.key.window_attention == key.window_attention:
                common = _common_pages(entry.key.tokens, key.tokens)
                if common > length:
                    best, length = entry, common
        if best is None:
            return ()
        self._entries.move_to_end(best.key)
        return best.pages[:length]

    def take_pages(self, key: PrefixKey, table: Sequence[int]) -> tuple[int, ...] | None:
        """Pages for an entry: a reference to each full one of ``table``, which holds the prompt, and a free one for a
        copy of the partial one. None if there is an entry already, or no page for it."""
        if key in self._entries:
            return None
        full, partial = divmod(len(key.tokens), PAGE_SIZE)
        pages = [self._allocator.share(page) for page in table[:full]]
        if partial:
            try:
                pages.append(self._allocator.allocate())
            except OutOfPages:
                for page in pages:
                    self._allocator.release(page)
                return None
        return tuple(pages)

    def insert(self, key: PrefixKey, pages: Sequence[int], last: Any) -> None:
        """Takes over the references of ``take_pages``."""
        self._entries[key] = PrefixEntry(key, tuple(pages), last)
        for page in pages:
            self._held[page] = self._held.get(page, 0) + 1

    def drop_oldest(self) -> bool:
        """Returns whether there was an entry to drop."""
        if not self._entries:
            return False
        _, entry = self._entries.popitem(last=False)
        for page in entry.pages:
            self._held[page] -= 1
            if not self._held[page]:
                del self._held[page]
            self._allocator.release(page)
        return True

    def clear(self) -> None:
        while self.drop_oldest():
            pass


def _common_pages(a: Sequence[int], b: Sequence[int]) -> int:
    """Full pages in which both are equal, leaving at least one token of ``b``."""
    most = min(len(a), len(b) - 1) // PAGE_SIZE
    for page in range(most):
        span = slice(page * PAGE_SIZE, (page + 1) * PAGE_SIZE)
        if a[span] != b[span]:
            return page
    return most
