"""Causal models on several ranks: tokens, winners and passes of one process, with prompts in pieces beside others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.dist import ranks
from tests.tiers import slow_but

pytestmark = pytest.mark.multirank

GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "models"
BLOCKS: dict[str, Any] = {"block_size": 8, "sub_block_size": 4, "tau_conf": 0.3, "ignore_eos": True}
LOPA = {"decoding": "lopa", "base": "causal_blocks", "num_branches": 3, **BLOCKS}
WAYS: list[dict[str, Any]] = [
    {"decoding": "ar", "ignore_eos": True, "max_new_tokens": 9},
    {"decoding": "causal_blocks", "max_new_tokens": 30, **BLOCKS},
    {**LOPA, "max_new_tokens": 30},
    {**LOPA, "max_new_tokens": 22, "num_branches": 1, "temperature": 0.7, "seed": 3},
]
LENGTHS = 5, 300, 150, 200


def job(family: str, **options: Any) -> dict[str, Any]:
    prompts = [[7 + (seed * n) % 90 for n in range(length)] for seed, length in enumerate(LENGTHS, start=3)]
    requests = [{"prompt": prompt, "params": way} for prompt, way in zip(prompts, WAYS, strict=True)]
    asked = [*requests, {**requests[2], "prompt": prompts[2][:140] + prompts[0]}]  # which shares a beginning
    return {
        "model": str(GOLDEN / family / "model_a"),
        "options": {"dtype": "float32", "graph_mode": "eager", **options},
        "requests": asked,
        "together": bool(options),
    }


def passes(output: dict[str, Any]) -> tuple[Any, ...]:
    """What ranks and one process agree on, however prompts come: a piece of one fills nothing."""
    filling = [(fills, winner) for fills, winner in zip(output["fills"], output["winners"], strict=True) if fills]
    return output["tokens"], output["forwards"], output["reason"], filling


@pytest.mark.parametrize(
    ("family", "tp", "bp"),
    slow_but(
        [(family, *size) for family in ("nemotron", "pangu") for size in ((1, 2), (2, 1), (2, 2), (1, 4))],
        [("nemotron", 1, 2), ("pangu", 2, 2)],
    ),
)
def test_ranks_decode_as_one_process(family: str, tp: int, bp: int, tmp_path: Path) -> None:
    alone = ranks.generate(1, [job(family)], tmp_path)[0]
    size = {"tensor_parallel_size": tp, "branch_parallel_size": bp}
    jobs = [job(family, **size, max_num_batched_tokens=tokens) for tokens in (72, 4096)]
    pieces, whole = ranks.generate(tp * bp, jobs, tmp_path)
    assert [*map(passes, pieces)] == [*map(passes, whole)] == [*map(passes, alone)]
    assert pieces[1]["fills"][:4] == [[]] * 4  # 300 tokens, of which a step takes 72 at most
    assert any(winner > 0 for winner in alone[2]["winners"])
