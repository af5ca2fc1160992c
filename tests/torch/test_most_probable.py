"""The lists of most probable tokens against a softmax over the whole vocabulary."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from lopa_ascend.parallel.collectives import ALONE, Group
from lopa_ascend.score.most_probable import most_probable
from lopa_ascend.types import Scoring

VOCAB, MASK, NUM_TOKEN_IDS = 40, 17, 37


class Recorded(Group):
    """A rank of several: keeps what it sends, and gets what all have sent."""

    sent: Tensor
    all_sent: Tensor | None = None

    def all_gather(self, x: Tensor, purpose: str) -> Tensor:
        object.__setattr__(self, "sent", x)
        return x[None] if self.all_sent is None else self.all_sent


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("count", [1, 5, 20])
def test_alone_and_in_shards(temperature: float, count: int) -> None:
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(0))
    logits[2, 5] = logits[2, 3] = 9.0  # equal: the lower id first
    logits[3, MASK] = 20.0
    scoring = Scoring("max_prob", MASK, NUM_TOKEN_IDS, temperature=temperature)
    whole = most_probable(logits, scoring, count, 0, ALONE)
    probs = (logits / (temperature or 1)).softmax(-1)
    probs[:, [MASK, *range(NUM_TOKEN_IDS, VOCAB)]] = 0
    for row in range(6):
        expected = sorted(range(VOCAB), key=lambda token: (-float(probs[row, token]), token))[:count]
        assert whole.ids[row].tolist() == expected
        assert torch.allclose(whole.probs[row], probs[row, expected], atol=1e-6)

    cuts = (0, 3, 20, VOCAB)
    ranks = [Recorded(rank, 3) for rank in range(3)]
    for rank, (begin, end) in zip(ranks, pairwise(cuts), strict=True):
        most_probable(logits[:, begin:end], scoring, count, begin, rank)
    together = torch.stack([rank.sent for rank in ranks])
    for rank, (begin, end) in zip(ranks, pairwise(cuts), strict=True):
        object.__setattr__(rank, "all_sent", together)
        found = most_probable(logits[:, begin:end], scoring, count, begin, rank)
        assert torch.equal(found.ids, whole.ids)
        assert torch.allclose(found.probs, whole.probs, atol=1e-6)
