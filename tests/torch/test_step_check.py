"""How a compiled step's predictions are compared with those of the step op by op."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lopa_ascend.graph.check import EXACT, ROUNDED, fault_of
from lopa_ascend.score.greedy import Scored

BLOCK, ROWS = 8, 32


def sample() -> tuple[Tensor, Tensor, Scored]:
    """The tokens and the probabilities of a graph, and equal predictions; the second best tokens have half of these."""
    ids, probs = torch.arange(ROWS), torch.linspace(0.1, 0.9, ROWS)
    return ids.clone(), probs.clone(), Scored(ids, probs, probs / 2)


@pytest.mark.parametrize("bounds", [EXACT, ROUNDED])
def test_what_rounding_does_is_no_fault(bounds: tuple[float, float]) -> None:
    ids, probs, expected = sample()
    probs[::2] *= 1 + bounds[0] / 2
    probs[5] *= 1 + bounds[1] / 2
    ids[9], expected.confidences[9] = 1, expected.probs[9] * bounds[0] / 4
    probs[3] = expected.probs[3] = torch.nan
    assert fault_of(ids, probs, expected, BLOCK, bounds) is None


@pytest.mark.parametrize("row", [0, ROWS - 1])
def test_one_row_that_is_far_off_is_a_fault(row: int) -> None:
    for wrong in (torch.nan, 0.0, 0.001):
        ids, probs, expected = sample()
        probs[row] = wrong
        assert f"1 of {ROWS} rows differ, row {row} has" in str(fault_of(ids, probs, expected, BLOCK))
    ids, probs, expected = sample()
    ids[row] += 1
    assert fault_of(ids, probs, expected, BLOCK, EXACT) is not None


def test_a_block_that_is_off_as_a_whole_is_a_fault() -> None:
    """However many others are right."""
    ids, probs, expected = sample()
    probs[BLOCK : 2 * BLOCK] *= 1.3
    assert f"{BLOCK} of {ROWS} rows differ, row {BLOCK}" in str(fault_of(ids, probs, expected, BLOCK))
    ids, probs, expected = sample()
    ids[BLOCK : 2 * BLOCK] += 1
    assert fault_of(ids, probs, expected, BLOCK) is not None
