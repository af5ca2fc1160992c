"""How prefill steps and decoding steps take turns."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from lopa_ascend.engine.turns import MAX_OVERTAKEN, TOKENS_PER_DECODING_STEP, Pieces, Prompt, Turns
from lopa_ascend.kv.pages import PAGE_SIZE
from tests.tiers import examples

LONG = {"long": 10 * TOKENS_PER_DECODING_STEP}


def short(number: int, num_tokens: int = TOKENS_PER_DECODING_STEP // 2) -> dict[str, int]:
    return {f"short {number}": num_tokens}


def test_a_long_prompt_is_followed_by_as_many_decoding_steps_as_its_length_asks_for() -> None:
    turns = Turns(1024)
    assert turns.choose(LONG | {"other": LONG["long"]}, decoding=False) == ["long"]
    gaps = 0
    while not turns.choose(LONG, decoding=True):
        gaps += 1
    assert gaps == 10
    assert turns.choose(LONG, decoding=True) == []
    assert turns.choose(LONG, decoding=False) == ["long"], "nothing decodes, so nobody has to wait"


def test_a_short_prompt_goes_between_two_of_these_decoding_steps() -> None:
    turns = Turns(1024)
    turns.choose(LONG, decoding=True)
    assert turns.choose(LONG | short(1), decoding=True) == []
    assert turns.choose(LONG | short(1), decoding=True) == ["short 1"]
    assert turns.choose(LONG | {"medium": TOKENS_PER_DECODING_STEP + 1}, decoding=True) == []


def test_no_step_has_more_than_the_limit_also_where_decoding_steps_are_owed() -> None:
    turns = Turns(64)
    turns.choose(LONG, decoding=True)
    turns.choose(short(1, 40) | short(2, 40), decoding=True)
    assert turns.choose(short(1, 40) | short(2, 40), decoding=True) == ["short 1"]


def test_the_shorter_prompt_goes_first_and_a_step_has_as_many_as_fit() -> None:
    turns = Turns(300)
    waiting = {"a": 200, "b": 100, "c": 120, "d": 100}
    assert turns.choose(waiting, decoding=False) == ["b", "d"]
    assert turns.choose({"a": 200, "c": 120}, decoding=False) == ["c"]
    assert Turns(300).choose({"a": 200, "b": 100}, decoding=False) == ["b", "a"], "the limit itself fits"


def test_a_prompt_is_overtaken_so_many_times_and_no_more() -> None:
    turns = Turns(1024)
    steps = overtaken = 0
    for step in range(1000):
        steps += 1
        chosen = turns.choose(LONG | short(step) | short(step + 1), decoding=True)
        if "long" in chosen:
            break
        overtaken += bool(chosen)
    assert "long" in chosen
    assert overtaken == MAX_OVERTAKEN
    assert steps <= 2 * MAX_OVERTAKEN + 2 * LONG["long"] // TOKENS_PER_DECODING_STEP


def test_nothing_goes_before_an_overdue_prompt_between_decoding_steps_that_are_owed() -> None:
    turns = Turns(1024)
    for step in range(MAX_OVERTAKEN):
        assert turns.choose(LONG | short(step), decoding=False) == [f"short {step}"]
    turns.owed = 2 * TOKENS_PER_DECODING_STEP
    assert turns.choose(LONG | short(0), decoding=True) == [], "one decodes after the short prompts"
    assert turns.owed, "decoding steps are still owed"
    assert turns.choose(LONG | short(0), decoding=True) == []


def test_overdue_prompts_do_not_overtake_one_another() -> None:
    """A long prompt waits behind those before it, and not behind all shorter ones that became overdue with it."""
    turns, limit = Turns(1024), 1024
    waiting = LONG | {f"medium {index}": 600 for index in range(10)}
    overtaken = 0
    for step in range(1000):
        waiting |= short(step)
        chosen = turns.choose(waiting, decoding=True)
        if "long" in chosen:
            break
        waiting = {name: tokens for name, tokens in waiting.items() if name not in chosen}
        overtaken += bool(chosen)
    assert "long" in chosen
    assert LONG["long"] > limit
    assert overtaken == MAX_OVERTAKEN


def test_prompts_that_came_later_do_not_count_as_overtaken() -> None:
    turns = Turns(1024)
    for step in range(3 * MAX_OVERTAKEN):
        assert turns.choose(short(step) | LONG, decoding=False) == [f"short {step}"]
    assert turns.choose(LONG | short(0), decoding=False) == ["short 0"]


def test_every_prompt_goes_at_last_and_decoding_goes_on() -> None:
    """Random arrivals: the tokens of prompts between two decoding steps are bounded, and nobody starves."""
    rng, turns, limit = random.Random(0), Turns(512), 512
    waiting: dict[str, int] = {}
    arrived: dict[str, int] = {}
    tokens_since_decoding = 0
    for step in range(5000):
        if rng.random() < 0.15:
            waiting[f"{step}"] = rng.choice([20, 60, 100, 400, 1500])
            arrived[f"{step}"] = step
        chosen = set(turns.choose(waiting, decoding=True))
        if not chosen:
            tokens_since_decoding = 0
        tokens = [num_tokens for name, num_tokens in waiting.items() if name in chosen]
        tokens_since_decoding += sum(tokens)
        assert tokens_since_decoding <= max(limit, *tokens, 0)
        waiting = {name: tokens for name, tokens in waiting.items() if name not in chosen}
        assert all(step - arrived[name] < 1000 for name in waiting)


def test_pieces_do_half_the_work_of_the_decoding_step_beside_them_but_few_tokens_in_any_case() -> None:
    turns = Pieces(1024, free_tokens=16, reach=1000)
    waiting = {"a": Prompt(0, 16000), "b": Prompt(3000, 90), "c": Prompt(0, 10)}
    assert turns.pieces(waiting, decoding=100) == {"c": 10, "b": 10}, "a token of b does the work of four"
    assert turns.pieces(waiting, decoding=100) == {}, "a decoding step"
    assert turns.pieces({"a": Prompt(3000, 16000)}, decoding=100) == {"a": 16}
    turns.pieces({}, decoding=100)
    assert turns.pieces({"a": Prompt(120, 16000)}, decoding=500) == {"a": PAGE_SIZE - 120}, "up to the page's end"
    assert turns.pieces(waiting, decoding=0) == {"c": 10, "b": 90, "a": 924}, "nobody waits"


@settings(max_examples=examples(100))
@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 3000)), min_size=1, max_size=8),
    st.integers(1, 2000),
    st.integers(1, 128),
    st.sampled_from([0, 1, 40, 500, 5000]),
)
def test_pieces_make_up_all_prompts_and_keep_to_the_limits(
    arriving: list[tuple[int, int]], max_tokens: int, free_tokens: int, decoding: int
) -> None:
    turns, left, first, decoded = Pieces(max_tokens, free_tokens, 4000), dict[str, Prompt](), dict[str, int](), True
    for step in range(100_000):
        left |= {str(i): Prompt(0, length) for i, (at, length) in enumerate(arriving) if at == step}
        found = turns.pieces(left, decoding)
        assert decoded or not found or not decoding, "a decoding step comes after each piece"
        decoded = not found
        assert sum(found.values()) <= min(max_tokens, 1024)
        work = sum(turns.work(left[name].start, size) for name, size in found.items())
        assert not decoding or len(found) < 2 or work <= max(decoding / 2, turns.work(3000, free_tokens))
        for name, size in found.items():
            assert size > 0
            first.setdefault(name, step)
            start, length = left.pop(name)
            if size < length:
                left[name] = Prompt(start + size, length - size)
        if step > 30 and not left:
            break
    assert len(first) == len(arriving)
    assert not left
