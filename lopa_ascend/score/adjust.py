"""Changes to the logits of some tokens that a request asks for: penalties for repetition, and biases. Parallel filling
has no order of tokens, so penalties count what is committed: the prompt and blocks with final keys and values. That is
the same for all branches and positions of a pass; a causal pass over drafts counts what is before each position."""

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
    """int64 [n], each once."""
    divisor: Tensor
    """float32 [R, n], or [1, n] for any number of rows: positive logits are divided by it, negative ones multiplied."""
    bias: Tensor
    """The same, added then."""

    def of_rows(self, rows: Tensor) -> Adjustment:
        """Of some rows, int64. Rows beyond the last count as the last."""
        rows = rows.clamp(max=len(self.bias) - 1)
        return self._replace(divisor=self.divisor[rows], bias=self.bias[rows])

    def apply(self, logits: Tensor, first: int) -> Tensor:
        """The adjusted logits float32 [R, m]; ``logits`` may be overwritten. ``first``: the first column's token id."""
        x = logits.float()
        is_here = (self.ids >= first) & (self.ids < first + x.shape[1])
        columns, divisor = self.ids[is_here] - first, self.divisor[:, is_here]
        picked = x[:, columns]
        x[:, columns] = torch.where(picked > 0, picked / divisor, picked * divisor) + self.bias[:, is_here]
        return x


def adjustment_for(
    params: DecodingParams, prompt: Sequence[int], answers: Sequence[Sequence[int]], device: torch.device
) -> Adjustment | None:
    """What a request asks for in its next forward pass; None: nothing. ``answers``: for each row, or once for all,
    token ids of what is known of the answer."""
    repetition, presence, frequency = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
    counts = [Counter(answer) for answer in answers]
    ids = {token for token, _ in params.logit_bias}
    if presence or frequency or repetition != 1:
        ids.update(*counts)
    if repetition != 1:
        ids.update(prompt)
    if not ids:
        return None
    column = {token: number for number, token in enumerate(sorted(ids))}
    divisor, bias = torch.ones(len(counts), len(column)), torch.zeros(len(counts), len(column))
    for token, number in params.logit_bias:
        bias[:, column[token]] = number
    if repetition != 1:
        divisor[:, [column[token] for token in {*prompt}]] = repetition
    for row, counted in enumerate(counts if repetition != 1 or presence or frequency else ()):
        columns = [column[token] for token in counted]
        divisor[row, columns] = repetition
        bias[row, columns] -= torch.tensor([presence + count * frequency for count in counted.values()])
    return Adjustment(torch.tensor(list(column), device=device), divisor.to(device), bias.to(device))
