"""The form in which predictions travel."""

from __future__ import annotations

import torch

from lopa_ascend.score.prediction import NUM_COLUMNS, decode, encode
from lopa_ascend.types import RowResult


def test_they_arrive_as_they_were_sent() -> None:
    encoded = encode(torch.tensor([5, 7, 9]), torch.tensor([0.5, 0.25, 1]), torch.tensor([-1.0, -2.0, 0.0]))
    assert (encoded.shape, encoded.dtype) == ((3, NUM_COLUMNS), torch.int32)
    assert decode(encoded.numpy()) == RowResult((5, 7, 9), (0.5, 0.25, 1.0), (-1.0, -2.0, 0.0))
    assert decode(encoded[[2, 0]].numpy()) == RowResult((9, 5), (1.0, 0.5), (0.0, -1.0))
    assert decode(encoded[1:].numpy()) == RowResult((7, 9), (0.25, 1.0), (-2.0, 0.0))
    assert decode(encoded[:0].numpy()) == RowResult((), (), ())


def test_a_confidence_that_is_not_finite_makes_the_row_invalid() -> None:
    for wrong in (float("nan"), float("inf")):
        encoded = encode(torch.tensor([5, 7]), torch.tensor([0.5, 0.25]), torch.tensor([0.5, wrong]))
        assert decode(encoded.numpy()) is None
