"""The prefix cache: keys and values of whole prompts, kept for requests with an equal prompt. No torch.

A prompt attends to itself in both directions, so its keys and values depend on all of it, and only an equal whole
prompt has the same ones. With full attention they also depend on the first block, which is all masks: on its length.
One cache belongs to one engine, and so to one model and adapter.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lopa_ascend.kv.pages import PAGE_SIZE, PageAllocator

PrefixKey = tuple[tuple[int, ...], str, int]
"""What the keys and values of a prompt depend on: its token ids, ``DecodingParams.window_attention``, and with full
attention the length of the first block, otherwise 0."""


@dataclass(frozen=True, slots=True)
class PrefixEntry:
    """A cached prompt."""

    key: PrefixKey
    pages: tuple[int, ...]
    """Ids of the pages that hold the prompt. The last one, if partial, is a copy that belongs to the cache alone."""
    last_hidden: Any
    """Normed hidden state of the last position, which predicts the first generated one."""

    @property
    def full_pages(self) -> tuple[int, ...]:
        return self.pages[: len(self.key[0]) // PAGE_SIZE]

    @property
    def partial_page(self) -> int | None:
        return self.pages[-1] if len(self.key[0]) % PAGE_SIZE else None


class PrefixCache:
    """Cached prompts. Whenever the allocator needs a page, the least recently used entry is dropped.

    Args:
        allocator: of the KV pool's pages; it calls ``drop_oldest`` when no page is free.
    """

    def __init__(self, allocator: PageAllocator) -> None:
        self._allocator = allocator
        allocator.reclaim = self.drop_oldest
        self._entries: OrderedDict[PrefixKey, PrefixEntry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: PrefixKey) -> bool:
        return key in self._entries

    def get(self, key: PrefixKey) -> PrefixEntry | None:
        """The entry of an equal prompt, which becomes the most recently used one."""
        entry = self._entries.get(key)
        if entry is not None:
            self._entries.move_to_end(key)
        return entry

    def take_pages(self, key: PrefixKey, table: Sequence[int]) -> tuple[int, ...] | None:
        """Pages for a new entry: the full pages of a prompt, shared, and a free page for a copy of the partial page.
        None if there is an entry already, or no page for the copy, not even by dropping entries.

        Args:
            table: page ids of the prompt.
        """
        if key in self._entries:
            return None
        full, partial = divmod(len(key[0]), PAGE_SIZE)
        can_allocate = self._allocator.num_free or self._allocator.num_evictable
        if partial and not can_allocate:
            return None  # to drop all entries would free no page either
        pages = [self._allocator.share(page) for page in table[:full]]
        if partial:
            pages.append(self._allocator.allocate())
        return tuple(pages)

    def insert(self, key: PrefixKey, pages: Sequence[int], last_hidden: Any) -> None:
        """Adds an entry.

        Args:
            pages: what ``take_pages`` returned; the cache releases them when it drops the entry.
        """
        self._entries[key] = PrefixEntry(key, tuple(pages), last_hidden)
        for page in pages:
            self._allocator.give_to_cache(page)

    def drop_oldest(self) -> bool:
        """Drops the least recently used entry; False if there is none."""
        if not self._entries:
            return False
        _, entry = self._entries.popitem(last=False)
        for page in entry.pages:
            self._allocator.take_from_cache(page)
            self._allocator.release(page)
        return True

    def clear(self) -> None:
        """Drops all entries."""
        while self.drop_oldest():
            pass
