"""The scheduler against random arrivals on a paper device: pages hold tags instead of keys and values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lopa_ascend.config import DecodingParams, ParameterError
from lopa_ascend.kv.pages import PageAllocator, worst_case
from lopa_ascend.kv.prefix_cache import Prefix, PrefixCache
from tests.tiers import examples
from tests.unit.paper_scheduler import Arrival, Paper, arrivals, limits, paper


@settings(max_examples=examples(200))
@given(arrivals, st.integers(0, 10**6), st.booleans(), st.sampled_from([14, 17, 20, 40]))
def test_pages_in_are_pages_out_and_everybody_finishes(
    arriving: list[Arrival], seed: int, cache: bool, num_pages: int
) -> None:
    run = paper(seed, cache, num_pages=num_pages)
    run.drive(arriving)
    allocator = run.scheduler.allocator
    assert not run.scheduler.running
    assert not run.scheduler.waiting
    if run.scheduler.prefix_cache is not None:
        assert allocator.num_free + allocator.num_evictable == allocator.num_pages
        while run.scheduler.prefix_cache.drop_oldest():
            pass
    assert allocator.num_free == allocator.num_pages


@settings(max_examples=examples(50))
@given(arrivals, st.integers(0, 10**6))
def test_the_same_arrivals_give_the_same_plans(arriving: list[Arrival], seed: int) -> None:
    first, second = paper(seed), paper(seed)
    assert first.drive(arriving) == second.drive(arriving)
    assert first.planned == second.planned


def test_a_small_request_does_not_overtake_a_large_one_that_waits_for_pages() -> None:
    run = paper(0, num_pages=24, max_num_seqs=8)
    arriving = [Arrival(0, 128, n, 250, 4, False, None) for n in range(4)] + [Arrival(1, 1, 9, 1, 1, False, None)]
    run.drive(arriving)
    first_seen: dict[str, int] = {}
    for index, plan in enumerate(run.plans):
        for sequence in plan.sequences:
            first_seen.setdefault(sequence.request_id, index)
    assert sorted(first_seen, key=lambda name: (first_seen[name], name)) == ["r0", "r1", "r2", "r3", "r4"]


def test_under_a_steady_load_no_request_waits_more_than_its_turn() -> None:
    """A budget of one request a step: four that run take turns, however many arrive."""
    run = paper(1, cache=False, max_num_batched_tokens=200)
    run.drive([Arrival(step, 60, 0, 200, 2, False, None) for step in range(25)])
    last: dict[str, int] = {}
    gaps: list[int] = []
    for index, plan in enumerate(run.plans):
        for sequence in plan.sequences:
            gaps.append(index - last.get(sequence.request_id, index))
            last[sequence.request_id] = index
    assert max(gaps) <= 2 * run.scheduler.limits.max_num_seqs


def test_a_whole_prompt_is_reused_and_a_beginning_is_not() -> None:
    arriving = [Arrival(0, 300, 0, 10, 2, False, None), Arrival(20, 300, 0, 50, 3, False, None)]
    run = paper(0)
    run.drive(arriving)
    assert run.scheduler.prefix_hits == 300
    longer = [*arriving, Arrival(30, 700, 0, 10, 2, False, None)]
    assert paper(0).drive(longer)
    run = paper(0)
    run.drive(longer)
    assert run.scheduler.prefix_hits == 300


def test_a_decoding_step_has_as_many_sequences_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    demand = Paper.demand
    monkeypatch.setattr(Paper, "demand", lambda *args: (100, *demand(*args)[1:]))
    run = paper(0, max_num_batched_tokens=300)
    run.drive([Arrival(0, 1, n, 300, 1, False, None) for n in range(5)])
    assert max(len(plan.sequences) for plan in run.plans if not plan.prefill) == 3
    assert run.scheduler.num_prefill_steps == sum(plan.prefill for plan in run.plans)
    assert run.scheduler.num_steps == len(run.plans)
    assert run.scheduler.prefix_queries == 5


def test_a_prompt_is_copied_into_the_cache_once() -> None:
    run = paper(0)
    run.drive([Arrival(0, 130, 0, 200, 1, False, None)])
    assert sum(len(plan.copies) for plan in run.plans) == 1


def test_a_cached_prompt_is_reused_only_if_its_own_pages_can_stay() -> None:
    """A prompt of a full and a partial page, cached in 2 of n pages; again with two slots, which need 3 pages, or 2
    beside the cached full page. The cached partial page must stay until it is copied, so 4 pages are enough to reuse
    it, and 3 to compute it again."""
    arriving = [Arrival(0, 130, 0, 1, 1, False, None), Arrival(20, 130, 0, 1, 2, False, None)]
    for num_pages, hits in ((3, 0), (4, 130)):
        run = paper(0, num_pages=num_pages)
        assert run.drive(arriving) == ["r0", "r1"]
        assert run.scheduler.prefix_hits == hits


def test_the_oldest_entry_goes_first() -> None:
    allocator = PageAllocator(4)
    cache = PrefixCache(allocator)
    keys = [Prefix("block_causal", 0, 0, (n,) * 128) for n in range(4)]
    for key in keys:
        table = [allocator.allocate()]
        pages = cache.take_pages(key, table)
        assert pages is not None
        cache.insert(key, pages, None)
        allocator.release(table[0])
    assert allocator.num_evictable == 4
    assert cache.get(keys[0]) is not None
    allocator.allocate()
    assert [key in cache for key in keys] == [True, False, True, True]


def test_worst_case_counts_what_the_prompt_fills_once() -> None:
    assert worst_case(128 * 4, num_slots=3, committed=130) == 1 + 3 * 3
    assert worst_case(100, num_slots=1, committed=0) == 1


@pytest.mark.parametrize(
    ("prompt", "params", "field", "numbers"),
    [
        (1024, {}, "prompt", ["1024", "max_model_len"]),
        (1000, {"max_new_tokens": 25}, "max_new_tokens", ["25", "1000", "1024", "24"]),
        (700, {"max_new_tokens": 8}, "prompt", ["700", "8", "max_num_batched_tokens"]),
        (400, {"decoding": "parallel", "max_new_tokens": 301}, "prompt", ["400", "parallel", "301", "700"]),
        (10, {"decoding": "parallel", "max_new_tokens": 700}, "max_new_tokens", ["parallel", "of 700", "tokens 700"]),
        (10, {"block_size": 750, "max_new_tokens": 800}, "block_size", ["first block of 750", "tokens 700"]),
        (300, {"base": "parallel", "max_new_tokens": 400, "num_branches": 7}, "num_branches", ["8 branches", "48 KV"]),
        (10, {"num_branches": 8}, "num_branches", ["8", "max_num_branches 7"]),
        (10, {"num_branches": 7, "max_new_tokens": 1000}, "num_branches", ["8 branches", "64 KV pages", "40"]),
        (
            10,
            {"num_branches": 4, "block_size": 200, "max_new_tokens": 200},
            "num_branches",
            ["num_branches: 4 with block_size 200 need 1000 tokens in one pass; max_num_batched_tokens is 700"],
        ),
        (
            100,
            {"base": "parallel", "num_branches": 3, "max_new_tokens": 100},
            "num_branches",
            ["prompt of 100 tokens and max_new_tokens 100 need 800 tokens"],
        ),
        (10, {"eos_token_id": 1000}, "eos_token_id", ["1000"]),
        (10, {"eos_token_id": tuple(range(999)), "min_new_tokens": 5}, "min_new_tokens", ["5", "eos_token_id"]),
        (10, {"stop_token_ids": tuple(range(3, 999)), "min_new_tokens": 5}, "min_new_tokens", ["5", "stop_token_ids"]),
    ],
)
def test_what_could_never_run_is_refused_with_the_numbers(
    prompt: int, params: dict[str, Any], field: str, numbers: list[str]
) -> None:
    with pytest.raises(ParameterError) as caught:
        replace(limits(), eos_token_ids=(0, 1, 2)).check(prompt, DecodingParams(**params))
    assert caught.value.param == field
    assert all(number in str(caught.value) for number in numbers)


def test_some_token_is_left_for_every_position() -> None:
    few = replace(limits(), vocab_size=12, mask_token_id=11, num_token_ids=10, eos_token_ids=(3,))
    with pytest.raises(ParameterError, match="logit_bias: 10 is no token of the tokenizer, which is never generated"):
        few.check(1, DecodingParams(logit_bias=((10, 1.0),)))
    with pytest.raises(ParameterError, match="prompt: must not be empty"):
        few.check(0, DecodingParams())
    words = tuple((5, token) if token % 2 else (token,) for token in range(10))
    few.check(1, DecodingParams(bad_words=words[1:]))
    few.check(1, DecodingParams(eos_token_id=tuple(range(10))))
    few.check(1, DecodingParams(eos_token_id=tuple(range(9)), min_new_tokens=5))
    refused: list[tuple[str, dict[str, Any]]] = [
        ("bad_words", {"bad_words": words}),
        ("min_new_tokens", {"bad_words": words[:3] + words[4:], "min_new_tokens": 5}),
        ("min_new_tokens", {"stop_token_ids": list(range(7)), "eos_token_id": [7, 8, 9], "min_new_tokens": 5}),
    ]
    for field, asked in refused:
        with pytest.raises(ParameterError) as caught:
            few.check(1, DecodingParams(**asked))
        assert caught.value.param == field
