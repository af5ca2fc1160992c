"""Whole canvases on several ranks: what one process does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.dist import ranks
from tests.tiny import write_dream

pytestmark = pytest.mark.multirank

FIELDS: dict[str, Any] = {"block_size": 8, "max_new_tokens": 40, "tau_conf": 0.5, "ignore_eos": True, "top_logprobs": 2}
KINDS: list[dict[str, Any]] = [
    {"decoding": "parallel"},
    {"decoding": "vanilla", "steps": 9},
    {"decoding": "vanilla", "alg": "origin", "seed": 1},
    {"decoding": "fast_dllm"},
    {"base": "parallel", "num_branches": 4},
    {"decoding": "fast_dllm", "block_cache": "dual"},
    {"base": "fast_dllm", "num_branches": 4},
    {"base": "fast_dllm", "num_branches": 4, "block_cache": "dual"},
    {"base": "fast_dllm", "num_branches": "auto", "block_cache": "dual"},
]


def test_a_whole_canvas_on_ranks_is_that_of_one_process(tmp_path: Path) -> None:
    model = str(write_dream(tmp_path / "model"))
    requests: list[dict[str, Any]] = [{"prompt": [5, 3, 8, 2, 9], "params": {**FIELDS, **kind}} for kind in KINDS]
    options: dict[str, Any] = {"tensor_parallel_size": 2, "branch_parallel_size": 2}
    alone = ranks.generate(1, [{"model": model, "options": {}, "requests": requests}], tmp_path)[0]
    together = ranks.generate(4, [{"model": model, "options": options, "requests": requests}], tmp_path)[0]
    for ours, expected in zip(together, alone, strict=True):
        assert (ours["tokens"], ours["forwards"]) == (expected["tokens"], expected["forwards"])
        probable = [[[token for token, _ in place] for place in output["alternatives"]] for output in (ours, expected)]
        assert probable[0] == probable[1]
