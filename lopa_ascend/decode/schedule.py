"""How many positions of a block each pass fills at least, with ``denoising_steps``."""

from __future__ import annotations

import struct
from functools import lru_cache

from lopa_ascend.types import ModelProperties


def wanted(properties: ModelProperties, number: int, steps: int, length: int, masks: int) -> int:
    """How many positions pass ``number``, from 0, fills at least in a block that began with ``masks``."""
    if properties.schedule == "linear":
        plan = linear(masks, steps)
        return plan[number] if number < len(plan) else 1
    share, remainder = divmod(length if properties.schedule == "length" else masks, steps)
    return share + (number < remainder)


@lru_cache(maxsize=1024)
def linear(masks: int, steps: int) -> tuple[int, ...]:
    """The linear schedule of dLLM: each step fills its share of the masks that are left, rounded half to even. Steps
    that fill nothing are left out. Shares are rounded to float32 at every operation, as published.

    >>> linear(32, 6)
    (5, 5, 6, 5, 6, 5)
    """
    left, plan = masks, []
    for step in range(steps):
        now, after = _float32((steps - step) / steps), _float32((steps - step - 1) / steps)
        kept = _float32(_float32(1 - _float32(1 - after)) / _float32(1 - _float32(1 - now)))
        count = min(round(left * (1 - kept)), left)
        left -= count
        if count:
            plan.append(count)
    return tuple(plan)


def _float32(value: float) -> float:
    found: float = struct.unpack("f", struct.pack("f", value))[0]
    return found
