"""How prefill steps and decoding steps take turns."""

from __future__ import annotations

import random

from lopa_ascend.engine.turns import MAX_OVERTAKEN, TOKENS_PER_DECODING_STEP, Turns

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
