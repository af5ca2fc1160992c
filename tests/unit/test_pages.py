"""Pages: taken, shared and given back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lopa_ascend.kv.pages import PAGE_SIZE, OutOfPages, PageAllocator, PageTables


@given(st.lists(st.integers(0, 6), max_size=60))
def test_no_page_has_two_owners_and_all_come_back(actions: list[int]) -> None:
    allocator, held = PageAllocator(4), []
    for action in actions:
        if action < 4 and allocator.num_free:
            page = allocator.allocate()
            assert page not in held
            held.append(page)
        elif held:
            allocator.release(held.pop(action % len(held)))
        assert allocator.num_free == 4 - len(held)
    for page in held:
        allocator.release(page)
    assert allocator.num_free == 4


def test_an_empty_pool_says_so() -> None:
    allocator = PageAllocator(1)
    allocator.allocate()
    with pytest.raises(OutOfPages, match="1 KV pages"):
        allocator.allocate()


def test_full_committed_pages_are_shared_and_the_window_is_private() -> None:
    allocator = PageAllocator(16)
    slots = PageTables(allocator, 3)
    for slot in range(3):
        slots.grow(slot, PAGE_SIZE + 10)
    assert allocator.num_free == 16 - 6
    slots.share_committed(PAGE_SIZE)
    assert {table[0] for table in slots.by_slot} == {slots.by_slot[0][0]}
    assert len({table[1] for table in slots.by_slot}) == 3
    assert allocator.num_free == 16 - 4
    slots.release()
    assert allocator.num_free == 16


def test_a_slot_that_had_no_page_yet_shares_slot_zeros() -> None:
    slots = PageTables(PageAllocator(8), 2)
    slots.grow(0, 3 * PAGE_SIZE)
    slots.share_committed(2 * PAGE_SIZE + 1)
    assert slots.by_slot[1] == slots.by_slot[0][:2]
