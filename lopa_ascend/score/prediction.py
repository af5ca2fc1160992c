"""The form in which predictions travel between ranks and from the device to the host: 32-bit integers.

A float travels as its bits. A prediction is valid if its confidence is finite.

- Where a logit is NaN or +inf, the confidence is NaN.
- A logit of -inf is allowed, in eager and in compiled steps: its token has the probability 0. But the confidence is NaN
  if it is "neg_entropy" over the whole distribution, which multiplies 0 by the logarithm of 0, or if all logits of a
  shard of the vocabulary are -inf.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lopa_ascend.types import RowResult

NOT_FINITE = "the model produced logits that are not finite; the request cannot go on"
"""The error of a request with predictions that are not valid."""
NUM_COLUMNS = 3
"""Integers of an encoded prediction."""


class Predictions(NamedTuple):
    """What the model predicts for some positions, on the host; arrays of one shape."""

    tokens: NDArray[np.int32]
    """Token ids."""
    max_probs: NDArray[np.float32]
    """Probabilities of these tokens."""
    confidences: NDArray[np.float32]

    @classmethod
    def decode(cls, encoded: NDArray[np.int32]) -> Predictions:
        """The predictions of int32 [..., 3], as ``encode`` gave them."""
        tokens, *bits = np.moveaxis(encoded, -1, 0)
        max_probs, confidences = (np.ascontiguousarray(column).view(np.float32) for column in bits)
        return cls(tokens, max_probs, confidences)

    def encode(self) -> NDArray[np.int32]:
        """int32 [..., 3]."""
        return np.stack([self.tokens, self.max_probs.view(np.int32), self.confidences.view(np.int32)], axis=-1)

    def take(self, index: NDArray[np.int64] | slice) -> Predictions:
        """The predictions at some places of the last dimension."""
        return Predictions(self.tokens[..., index], self.max_probs[..., index], self.confidences[..., index])

    @property
    def valid(self) -> bool:
        """Whether all predictions are valid."""
        return bool(np.isfinite(self.confidences).all())

    def row_result(self) -> RowResult:
        """The predictions as Python numbers; their arrays must be one-dimensional."""
        return RowResult(
            tokens=tuple(self.tokens.tolist()),
            max_probs=tuple(self.max_probs.tolist()),
            confidences=tuple(self.confidences.tolist()),
        )


NO_PREDICTIONS = Predictions(np.empty(0, np.int32), np.empty(0, np.float32), np.empty(0, np.float32))


def float_bits(columns: Sequence[Tensor]) -> list[Tensor]:
    """Tensors of 32-bit values as int32 with the same bits."""
    return [column if column.dtype == torch.int32 else column.view(torch.int32) for column in columns]
