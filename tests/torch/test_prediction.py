"""The form in which predictions travel."""

from __future__ import annotations

import numpy as np

from lopa_ascend.score.prediction import NUM_COLUMNS, Predictions
from lopa_ascend.types import RowResult

PLAIN = Predictions(
    np.array([5, 7, 9], np.int32), np.array([0.5, 0.25, 1], np.float32), np.array([-1, -2, 0], np.float32)
)


def test_they_arrive_as_they_were_sent() -> None:
    encoded = PLAIN.encode()
    assert (encoded.shape, encoded.dtype.name) == ((3, NUM_COLUMNS), "int32")
    assert Predictions.decode(encoded).row_result() == PLAIN.row_result()
    for index in (np.array([2, 0]), slice(1, None)):
        assert Predictions.decode(encoded[index]).row_result() == PLAIN.take(index).row_result()


def test_as_python_numbers() -> None:
    assert PLAIN.row_result() == RowResult((5, 7, 9), (0.5, 0.25, 1.0), (-1.0, -2.0, 0.0))
