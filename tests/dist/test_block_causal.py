"""Block-causal models and LLaDA on several ranks: tokens, winners and passes are those of one process, eager and in
graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.dist import ranks
from tests.tiers import slow_but

pytestmark = pytest.mark.multirank

GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "models"
FIELDS: dict[str, Any] = {"block_size": 8, "max_new_tokens": 40, "tau_conf": 0.5, "tau_add": 1.0, "ignore_eos": True}
EXACT = {"num_branches": 3, "branch_acceptance": "exact"}
VARIANTS: list[dict[str, Any]] = [{"decoding": "d2f"}, EXACT, {"num_branches": 3, "branch_acceptance": "verified"}]
V2: list[dict[str, Any]] = [
    {"decoding": "fast_dllm_v2"},
    {"base": "fast_dllm_v2", "num_branches": 3},
    {"decoding": "s2d2", "base": "fast_dllm_v2"},
]
S2D2: list[dict[str, Any]] = [
    {"decoding": "s2d2", "window_attention": "causal", "top_logprobs": 2},
    {"decoding": "s2d2", "routing": "score", "temperature": 0.8, "seed": 1},
]
CANVAS: list[dict[str, Any]] = [
    {"decoding": "parallel", "tau_conf": 1.0, "denoising_steps": 3},
    {"decoding": "fast_dllm", "block_cache": "dual", "acceptance": "factor"},
    {"base": "fast_dllm", "num_branches": 3},
    {"base": "parallel", "num_branches": 3},
    {"num_branches": 3, "window_attention": "full"},
]
EDITING: list[dict[str, Any]] = [{**variant, "editing_threshold": 0.3} for variant in VARIANTS]
FAMILIES: dict[str, list[dict[str, Any]]] = {"sdar": S2D2, "fastdllm2": V2, "llada": CANVAS, "llada2": EDITING}


def job(family: str, variants: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
    return {
        "model": str(GOLDEN / family / "model_a"),
        "options": options,
        "requests": [{"prompt": [5, 3, 8, 2, 9] * 4, "params": {**FIELDS, **variant}} for variant in variants],
    }


@pytest.mark.parametrize(
    ("family", "tp", "bp"),
    slow_but(
        [(family, *size) for family in FAMILIES for size in ((1, 2), (2, 2))],
        [("sdar", 2, 2), ("llada", 2, 2), ("llada2", 2, 2)],
    ),
)
def test_ranks_decode_as_one_process(family: str, tp: int, bp: int, tmp_path: Path) -> None:
    variants = [*VARIANTS, *FAMILIES[family]]
    alone = ranks.generate(1, [job(family, variants)], tmp_path)[0]
    size = {"tensor_parallel_size": tp, "branch_parallel_size": bp}
    compiled = {"graph_mode": "inductor", "graph_params": {**EXACT, "block_size": 8}, "max_num_seqs": 2}
    jobs = [job(family, variants, **size), job(family, VARIANTS[:2], **size, **compiled) | {"eager_steps": {}}]
    eager, graphs = ranks.generate(tp * bp, jobs, tmp_path)
    for output, expected in zip([*eager, *graphs], [*alone, *alone[:2]], strict=True):
        assert [output[name] for name in ("tokens", "winners", "forwards")] == [
            expected[name] for name in ("tokens", "winners", "forwards")
        ]
    d2f, exact, *_ = eager
    assert exact["tokens"] == d2f["tokens"]
    assert exact["forwards"] < d2f["forwards"]
