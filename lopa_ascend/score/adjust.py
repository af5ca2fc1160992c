"""Changes to the logits of some tokens that a request asks for: penalties for repetition, and biases.

In parallel filling there is no order in which tokens come. So penalties count what is committed: the prompt and the
blocks whose keys and values are final. It is the same for all branches, and for all positions of a forward pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lopa_ascend.config import DecodingParams


class Adjustment(NamedTuple):
    """What is done to the logits of n tokens."""

    ids: Tensor
    """Token ids int64 [n], each once."""
    divisor: Tensor
    """float32 [n]: positive logits are divided by it, negative ones multiplied."""
    bias: Tensor
    """float32 [n]: what is added then."""

    def apply(self, logits: Tensor, first: int) -> Tensor:
        """The adjusted logits float32 [R, m].

        Args:
            logits: [R, m]; may be overwritten.
            first: token id of the first column.
        """
        x = logits.float()
        is_here = (self.ids >= first) & (self.ids < first + x.shape[1])
        columns, divisor = self.ids[is_here] - first, self.divisor[is_here]
        picked = x[:, columns]
        x[:, columns] = torch.where(picked > 0, picked / divisor, picked * divisor) + self.bias[is_here]
        return x


def adjustment_for(
    params: DecodingParams, prompt: Sequence[int], answer: Sequence[int], device: torch.device
) -> Adjustment | None:
    """What a request asks for in its next forward pass; None: nothing.

    Args:
        prompt: token ids of the prompt.
        answer: token ids of the committed part of the answer.
    """
    counts = Counter(answer)
    divisors: dict[int, float] = {}
    biases: dict[int, float] = dict(params.logit_bias)
    if params.repetition_penalty != 1:
        divisors = dict.fromkeys((*prompt, *counts), params.repetition_penalty)
    if params.presence_penalty or params.frequency_penalty:
        for token, count in counts.items():
            penalty = params.presence_penalty + count * params.frequency_penalty
            biases[token] = biases.get(token, 0.0) - penalty
    ids = sorted(divisors.keys() | biases.keys())
    if not ids:
        return None
    return Adjustment(
        ids=torch.tensor(ids, device=device),
        divisor=torch.tensor([divisors.get(token, 1.0) for token in ids], device=device),
        bias=torch.tensor([biases.get(token, 0.0) for token in ids], device=device),
    )
