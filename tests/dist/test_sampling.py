"""Sampling on ranks that split each forward pass: seeds that all ranks agree on, and the model's distribution."""

from __future__ import annotations

from pathlib import Path

import pytest

from lopa_ascend import LLM
from tests.categorical import SAMPLED, SAMPLED_FIELDS, assert_follows_the_distribution, write_categorical
from tests.dist import ranks
from tests.tiny import VOCAB_SIZE

pytestmark = pytest.mark.multirank

PROMPT = [1, 2, 3]
REQUEST = {"prompt": PROMPT, "params": SAMPLED_FIELDS}


def test_ranks_draw_the_same_seeds_and_sample_the_distribution(tmp_path: Path) -> None:
    """``ranks.generate`` compares what the ranks made, seeds too."""
    model = str(write_categorical(tmp_path / "model", VOCAB_SIZE))
    jobs = [
        {"model": model, "options": {"tensor_parallel_size": 2, **options}, "requests": requests, "together": True}
        for options, requests in (({"seed": 1}, 500 * [REQUEST]), ({}, 8 * [REQUEST]))
    ]
    seeded, unseeded = ranks.generate(2, jobs, tmp_path)
    assert_follows_the_distribution([token for output in seeded for token in output["tokens"]])
    alone = LLM(model, seed=1).generate([PROMPT] * 8, SAMPLED, quiet=True)
    assert [list(output.token_ids) for output in alone] == [output["tokens"] for output in seeded[:8]]
    assert len({output["seed"] for output in unseeded}) == 8
