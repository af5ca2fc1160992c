"""The prefix cache: keys and values of prompts, kept for later requests. No torch.

One cache belongs to one engine, and so to one model and adapter. What can be reused depends on the attention:

- "full": a prompt's keys and values depend on all of it, so only an equal whole prompt has the same (``PrefixCache``).
- "block_causal": a block sees itself and the blocks before it, so sequences share their common beginning, block by
  block (``BlockPrefixCache``).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import compress, count
from operator import ne
from typing import Any

from lopa_ascend.kv.pages import PAGE_SIZE, PageAllocator, pages_for


@dataclass(frozen=True, slots=True, order=True)
class Prefix:
    """What the keys and values of a sequence's beginning depend on, and where they are, if cached. Equal if the keys
    and values are. In order, prefixes with a common beginning are neighbours."""

    window_attention: str
    block_size: int
    """Block-causal: the block size. Otherwise the first block's length if the prompt sees that, all masks; else 0."""
    phase: int
    """Where the first whole block begins, if the grid does not begin at position 0; else 0."""
    tokens: tuple[int, ...]
    pages: tuple[int, ...] = field(default=(), compare=False)
    last_hidden: Any = field(default=None, compare=False)
    """Normed hidden state of the last position, which predicts the next one; None if block-causal."""

    @property
    def full_pages(self) -> tuple[int, ...]:
        return self.pages[: len(self.tokens) // PAGE_SIZE]

    @property
    def partial_page(self) -> int | None:
        """The page that these positions fill in part: whoever goes on from here needs a copy."""
        return self.pages[-1] if len(self.tokens) % PAGE_SIZE else None


class PrefixCache:
    """Cached whole prompts. If ``allocator`` needs a page, the least recently used entry is dropped."""

    def __init__(self, allocator: PageAllocator) -> None:
        self._allocator = allocator
        allocator.reclaim = self.drop_oldest
        self._entries: OrderedDict[Prefix, Prefix] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: Prefix) -> bool:
        return key in self._entries

    def get(self, key: Prefix) -> Prefix | None:
        """What is cached of a prompt, here all or nothing. It becomes the most recently used entry."""
        entry = self._entries.get(key)
        if entry is not None:
            self._entries.move_to_end(key)
        return entry

    def take_pages(self, key: Prefix, table: Sequence[int]) -> tuple[int, ...] | None:
        """Pages for a new entry: the full ones of ``table``, shared, and a free one for a copy of the partial page.
        None if all is cached already, or even dropping entries gives no page for the copy."""
        if key in self:
            return None
        full, partial = divmod(len(key.tokens), PAGE_SIZE)
        can_allocate = self._allocator.num_free or self._allocator.num_evictable
        if partial and not can_allocate:
            return None  # to drop all entries would free no page either
        pages = [self._allocator.share(page) for page in table[:full]]
        if partial:
            pages.append(self._allocator.allocate())
        return tuple(pages)

    def insert(self, key: Prefix, pages: Sequence[int], last_hidden: Any) -> None:
        """``pages`` hold a reference for the cache, as from ``take_pages``, released when the entry is dropped."""
        self._entries[key] = replace(key, pages=tuple(pages), last_hidden=last_hidden)
        for page in pages:
            self._allocator.give_to_cache(page)

    def keep(self, key: Prefix, table: Sequence[int]) -> None:
        """Adds the positions of a sequence that ends, if others can share them: here they cannot."""

    def drop_oldest(self) -> bool:
        """Drops the least recently used entry; False if there is none."""
        if not self._entries:
            return False
        self._drop(next(iter(self._entries)))
        return True

    def _drop(self, key: Prefix) -> None:
        for page in self._entries.pop(key).pages:
            self._allocator.take_from_cache(page)
            self._allocator.release(page)

    def clear(self) -> None:
        while self.drop_oldest():
            pass


class BlockPrefixCache(PrefixCache):
    """Cached beginnings in whole blocks, for a block-causal model. No entry is the beginning of another one."""

    def __init__(self, allocator: PageAllocator) -> None:
        super().__init__(allocator)
        self._sorted: list[Prefix] = []
        """Ascending: what has most in common with a key is next to its place."""

    def __contains__(self, key: Prefix) -> bool:
        return any(_num_common(key, other) == len(key.tokens) for other in self._neighbours(key))

    def get(self, key: Prefix) -> Prefix | None:
        """The longest cached beginning of a sequence of whole blocks, if at least its first one is cached. The entry
        that holds it becomes the most recently used."""
        longest = max(self._neighbours(key), key=lambda other: _num_common(key, other), default=key)
        if longest not in self._entries or not (length := _num_common(key, longest)):
            return None
        self._entries.move_to_end(longest)
        pages = self._entries[longest].pages[: pages_for(length)]
        return replace(key, tokens=key.tokens[:length], pages=pages)

    def insert(self, key: Prefix, pages: Sequence[int], last_hidden: Any) -> None:
        """Replaces the entry that is its beginning, if there is one."""
        for other in self._neighbours(key):
            if _num_common(key, other) == len(other.tokens):
                self._drop(other)
        super().insert(key, pages, None)
        insort(self._sorted, key)

    def keep(self, key: Prefix, table: Sequence[int]) -> None:
        """Unless they are cached already. They stay in their pages."""
        if key.tokens and key not in self:
            self.insert(key, [self._allocator.share(page) for page in table[: pages_for(len(key.tokens))]], None)

    def _neighbours(self, key: Prefix) -> list[Prefix]:
        """The entries before and after the place of a key."""
        place = bisect_left(self._sorted, key)
        return self._sorted[max(place - 1, 0) : place + 1]

    def _drop(self, key: Prefix) -> None:
        super()._drop(key)
        del self._sorted[bisect_left(self._sorted, key)]


def _num_common(key: Prefix, other: Prefix) -> int:
    """Positions at the beginning, in whole blocks, with the same keys and values."""
    if (key.window_attention, key.block_size, key.phase) != (other.window_attention, other.block_size, other.phase):
        return 0
    end = min(len(key.tokens), len(other.tokens))
    same = next(compress(count(), map(ne, key.tokens, other.tokens)), end)  # of thousands of tokens, without a loop
    return same if same == end else max(0, same - (same - key.phase) % key.block_size)
