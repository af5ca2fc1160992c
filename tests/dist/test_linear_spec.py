"""Linear self-speculation on several ranks: the tokens, passes and winners of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.dist import ranks

pytestmark = pytest.mark.multirank

GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "models"
WAYS: list[dict[str, Any]] = [
    {"decoding": "linear_spec"},
    {"decoding": "lopa", "base": "linear_spec", "num_branches": 3},
    {"decoding": "lopa", "base": "linear_spec", "num_branches": 2, "temperature": 0.8, "seed": 4, "top_logprobs": 2},
    {"decoding": "lopa", "base": "linear_spec", "num_branches": 3, "branch_rows": "ahead"},
    {"decoding": "ar"},
]


def job(model: str, **options: Any) -> dict[str, Any]:
    """The first and the last requests have the same prompt; so the prefix cache holds what drafts were checked on."""
    first = [5, 33, 18, 24, 39, 7, 30] * 3
    prompts = first, first, [7, 30, 41] * 9, first, first
    ways = [{"max_new_tokens": 30, "block_size": 8, "ignore_eos": True, **way} for way in WAYS]
    return {
        "model": str(GOLDEN / model),
        "options": {"dtype": "float32", "max_model_len": 96, **options},
        "requests": [{"prompt": prompt, "params": way} for prompt, way in zip(prompts, ways, strict=True)],
    }


@pytest.mark.parametrize(("tp", "bp"), [(2, 1), (1, 2)])
def test_ranks_decode_as_one_process(tp: int, bp: int, tmp_path: Path) -> None:
    models = ("nemotron/model_b", "orthrus/model_b")
    alone = ranks.generate(1, [job(model) for model in models], tmp_path)
    size = {"tensor_parallel_size": tp, "branch_parallel_size": bp}
    together = ranks.generate(tp * bp, [job(model, **size) for model in models], tmp_path)
    for found, expected in zip(together, alone, strict=True):
        names = ("tokens", "winners", "forwards", "fills", "cached")
        assert [[each[name] for name in names] for each in found] == [
            [each[name] for name in names] for each in expected
        ]
        assert found[0]["tokens"] == found[1]["tokens"] == found[3]["tokens"] == found[4]["tokens"]
        assert any(found[1]["winners"])
        assert found[3]["forwards"] < found[0]["forwards"]
