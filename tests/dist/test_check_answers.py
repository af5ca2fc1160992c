"""Answers that several ranks repeat before they serve: rank 0 has read them, and refuses for all."""

from __future__ import annotations

from pathlib import Path

import pytest

from lopa_ascend import ParameterError
from tests.dist import ranks
from tests.e2e.test_check_answers import DIFFERENT, PROMPTS, start, with_a_wrong_weight, write
from tests.tiny import write_dream

pytestmark = pytest.mark.multirank


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dream(tmp_path_factory.mktemp("answers") / "tiny", eos_token_id=3, hidden=64, heads=4, kv_heads=2)


@pytest.fixture(scope="module")
def file(model: Path) -> Path:
    return write(model.parent, model, "--num-branches", "3", "--block-size", "8")


def test_ranks_in_graphs_repeat_the_answers_of_one(model: Path, file: Path, tmp_path: Path) -> None:
    options = {
        "check_answers": str(file),
        "tensor_parallel_size": 2,
        "branch_parallel_size": 2,
        "graph_mode": "inductor",
        "graph_params": {"num_branches": 3, "block_size": 8},
        "max_num_seqs": 2,
        "max_model_len": 512,
    }
    request = {"prompt": PROMPTS[0], "params": {"num_branches": 3, "block_size": 8, "max_new_tokens": 8}}
    job = {"model": str(model), "options": options, "requests": [request], "eager_steps": {}}
    ((output,),) = ranks.generate(4, [job], tmp_path)
    assert len(output["tokens"]) == 8


def test_a_wrong_weight_ends_all_ranks(model: Path, file: Path, tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match=DIFFERENT):
        start(with_a_wrong_weight(model, tmp_path), file, tensor_parallel_size=2)
