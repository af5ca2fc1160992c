"""A family of another package on several ranks: Kestrel gives what SDAR gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.dist import ranks
from tests.dist.test_block_causal import EXACT, GOLDEN, VARIANTS, job
from tests.kestrel import as_kestrel

MODES: list[dict[str, Any]] = [
    {},
    {"quantization": "w8a8"},
    {"graph_mode": "inductor", "graph_params": {**EXACT, "block_size": 8}, "max_num_seqs": 2},
]


@pytest.mark.multirank
def test_it_is_split_as_sdar_is(tmp_path: Path) -> None:
    model = as_kestrel(GOLDEN / "sdar" / "model_a", tmp_path / "kestrel")
    of_sdar = [job("sdar", VARIANTS[:2], tensor_parallel_size=2, **options) for options in MODES]
    of_kestrel = [{**each, "model": str(model), "kestrel": True} for each in of_sdar]
    for each in (of_sdar[-1], of_kestrel[-1]):
        each["eager_steps"] = {}
    outputs = ranks.generate(2, [*of_sdar, *of_kestrel], tmp_path)
    assert outputs[: len(MODES)] == outputs[len(MODES) :]
