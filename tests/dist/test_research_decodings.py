"""Decodings of another package on several ranks: what one process does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.dist import ranks
from tests.tiers import slow_but
from tests.tiny import write_dream

pytestmark = pytest.mark.multirank

FIELDS: dict[str, Any] = {"block_size": 8, "max_new_tokens": 40, "tau_conf": 0.5, "ignore_eos": True}
PIVOT: dict[str, Any] = {**FIELDS, "decoding": "pivot", "own": {"pivot_mass": 0.0, "pivot_weight": 0.01}}


def job(model: str, **options: Any) -> dict[str, Any]:
    """Requests of several decodings in one batch. Branches over tokens need lists from the group of the winner."""
    variants: list[dict[str, Any]] = [
        {**PIVOT, "num_branches": 5, "top_logprobs": 5},
        {**FIELDS, "num_branches": 3},
        {**PIVOT, "num_branches": 2, "top_logprobs": 4, "window_attention": "full"},
        {**FIELDS, "decoding": "entropy_bound", "num_branches": 3, "own": {"acceptance_gamma": 0.5}},
    ]
    prompts = ([5, 3, 8, 2, 9], [7, 7], [4, 30, 12], [1])
    return {
        "model": model,
        "options": {"dtype": "float32", **options},
        "requests": [{"prompt": prompt, "params": fields} for prompt, fields in zip(prompts, variants, strict=True)],
        "together": True,
        "research": True,
    }


@pytest.mark.parametrize(("tp", "bp"), slow_but([(1, 2), (2, 1), (2, 2)], [(2, 2)]))
def test_ranks_do_what_one_process_does(tp: int, bp: int, tmp_path: Path) -> None:
    model = str(write_dream(tmp_path / "model"))
    alone = ranks.generate(1, [job(model)], tmp_path)[0]
    outputs = ranks.generate(tp * bp, [job(model, tensor_parallel_size=tp, branch_parallel_size=bp)], tmp_path)[0]
    for output, expected in zip(outputs, alone, strict=True):
        # The last bits of probabilities depend on the shards of the vocabulary.
        assert {**output, "alternatives": expected["alternatives"]} == expected
        listed, others = ([[token for token, _ in ranked] for ranked in o["alternatives"]] for o in (output, expected))
        assert listed == others
    assert any(winner < 5 for winner in alone[0]["winners"][1:]), "a lookahead branch wins"
