"""The schedule of Dream's own decoding against Dream's arithmetic."""

from __future__ import annotations

import pytest
import torch

from lopa_ascend.config import DecodingParams
from lopa_ascend.decode import begin
from lopa_ascend.decode.strategy import SequenceStart
from lopa_ascend.types import RowResult


def counts(positions: int, steps: int) -> list[int]:
    """How many positions each pass fills."""
    params = DecodingParams(decoding="vanilla", max_new_tokens=positions, steps=steps)
    strategy = begin(SequenceStart([1], params, 9, frozenset()))
    out: list[int] = []
    while (plan := strategy.plan()) is not None:
        values = (0.5,) * len(plan.rows[0].masked)
        out.append(len(strategy.absorb(plan, [RowResult((1,) * len(values), values, values)], 0, 0).fills))
    return out


def published_counts(positions: int, steps: int) -> list[int]:
    """The steps that fill anything, as Dream counts them in float32."""
    times, masks, out = torch.linspace(1, 1e-3, steps + 1), torch.tensor(positions), []
    for step in range(steps):
        share = 1 - times[step + 1] / times[step]
        out.append(int(masks * share) if step < steps - 1 else int(masks))
        masks -= out[-1]
    return [count for count in out if count]


@pytest.mark.parametrize("positions", [1, 2, 7, 31, 64, 100, 256])
def test_the_schedule_is_dreams(positions: int) -> None:
    for steps in {1, 2, 3, 5, 8, 13, max(1, positions // 2), positions, positions + 1, 2 * positions}:
        assert counts(positions, steps) == published_counts(positions, steps)
