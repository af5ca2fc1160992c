"""Compiled forward passes of a causal model on several ranks: the tokens and passes of one eager process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.dist import ranks

pytestmark = pytest.mark.multirank

MODEL = Path(__file__).parents[1] / "data" / "golden" / "models" / "nemotron" / "model_a"
BLOCKS: dict[str, Any] = {"block_size": 8, "sub_block_size": 8, "tau_conf": 0.3, "ignore_eos": True}
WAYS: list[dict[str, Any]] = [
    {"decoding": "lopa", "base": "causal_blocks", "num_branches": 3, "max_new_tokens": 40, **BLOCKS},
    {"decoding": "causal_blocks", "max_new_tokens": 40, "temperature": 0.7, "seed": 3, **BLOCKS},
    {"decoding": "ar", "max_new_tokens": 6, "ignore_eos": True},
]


def job(**options: Any) -> dict[str, Any]:
    prompts = [5, 33, 18, 24, 39] * 4, [7, 30, 41] * 50, [60, 61]
    return {
        "model": str(MODEL),
        "options": {"dtype": "float32", "max_model_len": 256, **options},
        "requests": [{"prompt": prompt, "params": way} for prompt, way in zip(prompts, WAYS, strict=True)],
    }


@pytest.mark.parametrize(("tp", "bp"), [(2, 2)])
def test_ranks_decode_as_one_eager_process(tp: int, bp: int, tmp_path: Path) -> None:
    alone = ranks.generate(1, [job()], tmp_path)[0]
    compiled = {"graph_mode": "inductor", "graph_params": {"num_branches": 3, "block_size": 8}, "max_num_seqs": 3}
    size = {"tensor_parallel_size": tp, "branch_parallel_size": bp}
    together = job(**size, **compiled) | {"eager_steps": {"block_size": 5}}  # those of "ar" behind the prompt
    (found,) = ranks.generate(tp * bp, [together], tmp_path)
    for output, expected in zip(found, alone, strict=True):
        assert [output[name] for name in ("tokens", "winners", "forwards")] == [
            expected[name] for name in ("tokens", "winners", "forwards")
        ]
