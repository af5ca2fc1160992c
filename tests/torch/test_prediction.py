"""The form in which predictions travel."""

from __future__ import annotations

import numpy as np

from lopa_ascend.score.prediction import NUM_COLUMNS, Predictions
from lopa_ascend.types import RowResult

PLAIN = Predictions(
    np.array([5, 7, 9], np.int32), np.array([0.5, 0.25, 1], np.float32), np.array([-1, -2, 0], np.float32)
)
WITH_CANDIDATES = PLAIN._replace(
    candidates=np.array([[5, 6], [7, 8], [9, 0]], np.int32),
    candidate_probs=np.array([[0.5, 0.25], [0.25, 0.125], [1, 0]], np.float32),
)


def test_they_arrive_as_they_were_sent() -> None:
    for sent, width in ((PLAIN, NUM_COLUMNS), (WITH_CANDIDATES, NUM_COLUMNS + 4)):
        encoded = sent.encode()
        assert (encoded.shape, encoded.dtype.name) == ((3, width), "int32")
        assert Predictions.decode(encoded).row_result() == sent.row_result()
        for index in (np.array([2, 0]), slice(1, None)):
            assert Predictions.decode(encoded[index]).row_result() == sent.take(index).row_result()


def test_as_python_numbers() -> None:
    expected = RowResult((5, 7, 9), (0.5, 0.25, 1.0), (-1.0, -2.0, 0.0))
    assert PLAIN.row_result() == expected
    found = WITH_CANDIDATES.row_result()
    assert found.candidates == (((5, 0.5), (6, 0.25)), ((7, 0.25), (8, 0.125)), ((9, 1.0), (0, 0.0)))
    assert (found.tokens, found.max_probs, found.confidences) == (
        expected.tokens, expected.max_probs, expected.confidences,
    )  # fmt: skip
