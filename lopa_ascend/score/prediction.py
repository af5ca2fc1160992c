"""The form in which predictions travel between ranks and to the host: 32-bit integers, floats by their bits.

A prediction is valid if its confidence is finite. A logit of NaN or +inf makes it NaN. A logit of -inf is allowed, in
eager and in compiled steps: its token has probability 0. But the confidence is NaN if all logits of a shard are -inf,
or if it is "neg_entropy" over the whole distribution, which multiplies 0 by log 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lopa_ascend.types import RowResult

NOT_FINITE = "the model produced logits that are not finite; the request cannot go on"
NUM_COLUMNS = 3
NUM_WITH_RUNNER_UP = 5


def encode(tokens: Tensor, max_probs: Tensor, confidences: Tensor, *runners_up: Tensor) -> Tensor:
    """Token ids, probabilities and confidences [n] as int32 [n, 3]; with ids and probabilities of runners-up [n, 5]."""
    seconds = [column if column.is_floating_point() else column.int() for column in runners_up]
    return torch.stack(float_bits([tokens.int(), max_probs, confidences, *seconds]), dim=-1)


def decode(encoded: NDArray[np.int32]) -> RowResult | None:
    """The reverse of ``encode``; None as in ``row_result``."""
    tokens, *bits = encoded[:, :NUM_COLUMNS].T
    max_probs, confidences = (np.ascontiguousarray(column).view(np.float32) for column in bits)
    result = row_result(tokens, max_probs, confidences)
    if result is None or encoded.shape[1] == NUM_COLUMNS:
        return result
    ids, probs = encoded[:, NUM_COLUMNS:].T
    probabilities = np.ascontiguousarray(probs).view(np.float32)
    return replace(result, seconds=tuple(zip(ids.tolist(), probabilities.tolist(), strict=True)))


def row_result(
    tokens: NDArray[np.int32], max_probs: NDArray[np.float32], confidences: NDArray[np.float32]
) -> RowResult | None:
    """As Python numbers; None if a prediction is not valid."""
    if not np.isfinite(confidences).all():
        return None
    return RowResult(tuple(tokens.tolist()), tuple(max_probs.tolist()), tuple(confidences.tolist()))


def float_bits(columns: Sequence[Tensor]) -> list[Tensor]:
    """32-bit values as int32 with the same bits."""
    return [column if column.dtype == torch.int32 else column.view(torch.int32) for column in columns]
