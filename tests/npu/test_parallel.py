"""Tensor parallelism inside a compiled step: ranks that meet by gloo run torchair's FX graph after its passes."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from tests.dist.ranks import finish, start
from tests.npu.rank import STEPS, config_of_two

# The quick tests have a compiled step of ranks in test_parallel_engine.py, its collectives there and in
# test_lowering.py, and the bytes that steps send in tests/dist/test_traffic.py.
pytestmark = [pytest.mark.npu, pytest.mark.multirank, pytest.mark.slow]
MODULE = ("-m", "tests.npu.lab", "--numeric", "tests.npu.rank")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """By the number of ranks, what each of them has found."""
    folder = tmp_path_factory.mktemp("ranks")
    finish([rank for size in (1, 2) for rank in start(size, *MODULE, str(folder / str(size)))])
    return {size: [json.loads((folder / f"{size}.{rank}").read_text()) for rank in range(size)] for size in (1, 2)}


def test_two_ranks_find_the_tokens_of_one(found: dict[int, list[dict[str, Any]]]) -> None:
    (alone,), together = found[1], found[2]
    assert len({token for step in alone["tokens"] for token in step}) > 50
    for rank in together:
        assert rank["tokens"] == alone["tokens"]
        assert rank["probs"] == together[0]["probs"]
        torch.testing.assert_close(torch.tensor(rank["probs"]), torch.tensor(alone["probs"]), rtol=1e-4, atol=0)


def test_a_step_exchanges_twice_a_layer_and_once_at_the_end(found: dict[int, list[dict[str, Any]]]) -> None:
    sums = 2 * config_of_two().num_layers
    for rank in found[2]:
        assert rank["collectives"] == [["lab::all_reduce_"] * sums + ["lab::all_gather_into_tensor"]] * STEPS
    assert found[1][0]["collectives"] == [[]] * STEPS


def test_what_a_step_says_it_sends_is_what_an_eager_one_sends(found: dict[int, list[dict[str, Any]]]) -> None:
    for ranks in found.values():
        for rank in ranks:
            counted, expected = rank["traffic"]
            assert counted == expected
    assert len(found[2][0]["traffic"][0]) == 2


def test_the_self_test_replays_graphs_with_collectives_in_turn(found: dict[int, list[dict[str, Any]]]) -> None:
    for rank in found[2]:
        assert (rank["captured"]["name"], rank["captured"]["verdict"]) == (
            "captured collectives, replayed in 15 graphs",
            "ok",
        )
