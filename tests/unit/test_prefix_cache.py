"""Cached prompts: which are found, and what they hold."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lopa_ascend.config import DecodingParams
from lopa_ascend.core import Request
from lopa_ascend.engine.scheduler import prefix_key
from lopa_ascend.kv.pages import PAGE_SIZE, PageAllocator
from lopa_ascend.kv.prefix_cache import Prefix, PrefixCache

PROMPT = tuple(range(3 * PAGE_SIZE + 40))


def key(tokens: tuple[int, ...]) -> Prefix:
    return Prefix("block_causal", 0, 0, tokens)


def cache_of(*prompts: tuple[int, ...]) -> PrefixCache:
    """With the pages 0 to 3 for the first prompt, 4 to 7 for the second and so on."""
    allocator = PageAllocator(4 * len(prompts))
    cache = PrefixCache(allocator)
    for tokens in prompts:
        cache.insert(key(tokens), [allocator.allocate() for _ in range(4)], None)
    return cache


def test_only_an_equal_whole_prompt_is_found() -> None:
    cache = cache_of(PROMPT)
    found = cache.get(key(PROMPT))
    assert found is not None
    assert found.pages == (0, 1, 2, 3)
    for tokens in (PROMPT[:-1], (*PROMPT, 5), (*PROMPT[:-1], -1), (-1, *PROMPT[1:])):
        assert cache.get(key(tokens)) is None


@pytest.mark.parametrize("num_tokens", [1, PAGE_SIZE - 1, PAGE_SIZE, PAGE_SIZE + 1, 2 * PAGE_SIZE])
def test_the_last_page_is_partial_unless_the_prompt_fills_it(num_tokens: int) -> None:
    pages = tuple(range(-(-num_tokens // PAGE_SIZE)))
    entry = replace(key(PROMPT[:num_tokens]), pages=pages)
    assert entry.full_pages == pages[: num_tokens // PAGE_SIZE]
    assert entry.partial_page == (pages[-1] if num_tokens % PAGE_SIZE else None)


def test_a_prompt_that_finds_no_page_for_its_copy_drops_no_entry() -> None:
    cache = cache_of(PROMPT)
    others = PROMPT[:10]
    for page in range(4):
        cache._allocator.share(page)  # a running request has the pages of the entry
    assert cache.take_pages(key(others), [0]) is None
    assert key(PROMPT) in cache
    cache._allocator.release(3)
    assert cache.take_pages(key(others), [0]) == (3,)
    assert key(PROMPT) not in cache


@pytest.mark.parametrize(
    ("window_attention", "block_size", "first_block"), [("block_causal", 16, 0), ("full", 16, 16), ("full", 64, 50)]
)
def test_keys_and_values_depend_on_the_first_block_if_the_prompt_sees_it(
    window_attention: str, block_size: int, first_block: int
) -> None:
    params = DecodingParams(window_attention=window_attention, block_size=block_size, max_new_tokens=50)
    assert prefix_key(Request("a", (1, 2), params)) == Prefix(window_attention, first_block, 0, (1, 2))
