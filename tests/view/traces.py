"""Trace files for the page."""

from __future__ import annotations

import json
import random
from typing import Any

START = {
    "object": "diffusion.start", "format": "lopa-trace", "version": 1, "id": "trace-1", "created": 0, "model": "m",
    "prompt": "a question", "prompt_tokens": 5, "max_new_tokens": 64, "block_size": 8, "first_block": 0,
    "decoding": {"decoding": "lopa", "base": "d2f", "num_branches": 1, "tau_act": 0.5},
}  # fmt: skip


def fill(position: int, prob: float = 0.99) -> dict[str, Any]:
    token = f" t{position}"
    return {"position": position, "token_id": position, "token": token, "prob": prob, "confidence": prob}


def branch(rank: int, score: float, own: dict[str, Any] | None) -> dict[str, Any]:
    return {"rank": rank, "score": score, "masks": 1, "lookahead": own, "further": []}


def step(
    index: int,
    filled: list[dict[str, Any]],
    branches: list[dict[str, Any]],
    winner: int,
    length: int,
    committed: int = 0,
) -> dict[str, Any]:
    head = {"object": "diffusion.step", "id": "trace-1", "index": index, "seconds": 0.1 * (index + 1)}
    state = {"canvas_length": length, "committed": committed, "text": ""}
    return {**head, **state, "fills": filled, "winner": winner, "branches": branches}


def done(tokens: int, passes: int) -> dict[str, Any]:
    lopa = {"num_forwards": passes, "tokens_per_forward": tokens / passes}
    end = {"text": "the answer", "finish_reason": "stop", "stop_reason": None, "seed": None}
    return {"object": "diffusion.done", "fills": [], "token_ids": [1] * tokens, **end, "usage": {}, "lopa": lopa}


def lines(events: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(event) + "\n" for event in events).encode()


def small() -> list[dict[str, Any]]:
    """Two blocks of 8 in three passes: an anchor wins, then branch 1, then the last positions without a branch."""
    anchor = branch(0, 0.5, None)
    return [
        START,
        step(0, [fill(0), fill(1), fill(2), fill(3)], [anchor], 0, 16),
        step(
            1, [fill(9), *map(fill, range(4, 8))], [anchor, branch(1, 0.75, fill(9)), branch(2, 0.25, fill(12))], 1, 16
        ),
        step(2, [fill(p) for p in range(8, 16) if p != 9], [anchor], 0, 16, committed=8),
        done(14, 3),
    ]


def drafts() -> list[dict[str, Any]]:
    """A block of 8 drafted in one pass, of which the next accepts three tokens and writes a fourth."""
    anchor = branch(0, 0.5, None)
    drafted = [fill(position, 0.9) for position in range(8)]
    return [
        START,
        {**step(0, [], [anchor], 0, 8), "drafted": drafted, "accepted": None},
        {**step(1, [fill(position) for position in range(4)], [anchor], 0, 8), "drafted": drafted, "accepted": 3},
        done(4, 2),
    ]


def large(positions: int, branches: int, fills: int) -> list[dict[str, Any]]:
    """A canvas that is open from the first pass on, filled at random."""
    chance = random.Random(1)
    masked = chance.sample(range(positions), positions)
    events: list[dict[str, Any]] = [{**START, "max_new_tokens": positions, "block_size": 32}]
    for index in range(-(-positions // fills)):
        filled = [fill(masked.pop(), chance.random() ** 0.1) for _ in range(min(fills, len(masked)))]
        others = [branch(rank, chance.random(), fill(chance.randrange(positions))) for rank in range(2, branches)]
        beside = [branch(0, 0.5, None), branch(1, 0.9, filled[0]), *others]
        events.append(step(index, filled, beside, 1, positions))
    return [*events, done(positions, len(events) - 1)]
