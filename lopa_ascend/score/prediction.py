"""The form in which predictions travel between ranks and from the device to the host: 32-bit integers.

A float travels as its bits. A prediction is valid if its confidence is finite; where a logit was not finite, the
confidence is not.
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
"""Integers of an encoded prediction; its candidates have two each."""


class Predictions(NamedTuple):
    """What the model predicts for some positions, on the host; arrays of one shape."""

    tokens: NDArray[np.int32]
    """Token ids."""
    max_probs: NDArray[np.float32]
    """Probabilities of these tokens."""
    confidences: NDArray[np.float32]
    candidates: NDArray[np.int32] | None = None
    """Token ids of the most probable tokens [..., candidates]; None unless these are asked for."""
    candidate_probs: NDArray[np.float32] | None = None
    """Their probabilities [..., candidates]."""

    @classmethod
    def decode(cls, encoded: NDArray[np.int32]) -> Predictions:
        """The predictions of int32 [..., 3], as ``encode`` gave them."""
        tokens, *bits = np.moveaxis(encoded, -1, 0)
        max_probs, confidences = (np.ascontiguousarray(column).view(np.float32) for column in bits)
        return cls(tokens, max_probs, confidences)

    def encode(self) -> NDArray[np.int32]:
        """int32 [..., 3], without the candidates."""
        return np.stack([self.tokens, self.max_probs.view(np.int32), self.confidences.view(np.int32)], axis=-1)

    def with_candidates(self, encoded: NDArray[np.int32]) -> Predictions:
        """The same with the candidates of int32 [..., 2 * candidates], as ``encode_candidates`` gave them."""
        ids, bits = np.split(encoded, 2, -1)
        return self._replace(candidates=ids, candidate_probs=np.ascontiguousarray(bits).view(np.float32))

    def encode_candidates(self) -> NDArray[np.int32]:
        """int32 [..., 2 * candidates]."""
        if self.candidates is None or self.candidate_probs is None:
            return np.empty((*self.tokens.shape, 0), np.int32)
        return np.concatenate([self.candidates, self.candidate_probs.view(np.int32)], -1)

    def take(self, index: NDArray[np.int64] | slice) -> Predictions:
        """The predictions at some places of the last dimension."""
        taken = Predictions(self.tokens[..., index], self.max_probs[..., index], self.confidences[..., index])
        if self.candidates is None or self.candidate_probs is None:
            return taken
        return taken._replace(
            candidates=self.candidates[..., index, :], candidate_probs=self.candidate_probs[..., index, :]
        )

    @property
    def valid(self) -> bool:
        """Whether all predictions are valid."""
        return bool(np.isfinite(self.confidences).all())

    def row_result(self) -> RowResult:
        """The same as Python numbers, for a one-dimensional array."""
        candidates: tuple[tuple[tuple[int, float], ...], ...] = ()
        if self.candidates is not None and self.candidate_probs is not None:
            pairs = zip(self.candidates.tolist(), self.candidate_probs.tolist(), strict=True)
            candidates = tuple(tuple(zip(ids, probs, strict=True)) for ids, probs in pairs)
        return RowResult(
            tokens=tuple(self.tokens.tolist()),
            max_probs=tuple(self.max_probs.tolist()),
            confidences=tuple(self.confidences.tolist()),
            candidates=candidates,
        )


NO_PREDICTIONS = Predictions(np.empty(0, np.int32), np.empty(0, np.float32), np.empty(0, np.float32))


def float_bits(columns: Sequence[Tensor]) -> list[Tensor]:
    """Tensors of 32-bit values as int32 with the same bits."""
    return [column if column.dtype == torch.int32 else column.view(torch.int32) for column in columns]
