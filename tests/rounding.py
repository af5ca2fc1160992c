"""How far two computations of the same numbers may lie apart, whatever processor and library did them.

A library may add the terms of a sum in any order, with or without fused multiplications. The roundings of ``n`` terms
then differ as a random walk does, by about the square root of ``n`` of them, and those of sums that follow one another
add up. What follows is relative to the largest value, because a sum of large terms may be small.
"""

from __future__ import annotations

import math

import torch

from lopa_ascend.config import ModelConfig

UNIT = 2.0**-24
"""The largest relative error of one rounding in float32."""
ROOM = 4
"""Two computations, each at most twice as wrong as expected."""


def bound(*terms: int) -> float:
    """The largest difference as a share of the largest value.

    Args:
        terms: number of terms of each sum on the way from the arguments to the result.
    """
    return ROOM * UNIT * sum(map(math.sqrt, terms))


def probability_bound(logits: torch.Tensor) -> float:
    """The largest difference of a probability of a softmax, as a share of itself. Its logarithm is a difference of two
    numbers as large as the logits."""
    return ROOM * UNIT * float(logits[logits.isfinite()].abs().max()) + bound(logits.shape[-1])


def forward_bound(config: ModelConfig, positions: int) -> float:
    """``bound`` of the logits of a forward pass in float32 over so many positions."""
    c = config
    inner = max(c.intermediate_size, c.experts.inner if c.experts else 0)
    # The norm, the queries, the scores and the values of attention, its output; the norm, the two layers of the MLP.
    attention = c.hidden_size, c.hidden_size, c.head_dim, positions, c.num_heads * c.head_dim
    mlp = c.hidden_size, c.hidden_size, inner
    return bound(*(attention + mlp) * c.num_layers, c.hidden_size, c.hidden_size)
