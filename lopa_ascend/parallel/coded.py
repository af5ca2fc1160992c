"""Tests the exchanges of a group: each rank sends values that identify it, and the sum is known exactly."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from lopa_ascend.parallel.collectives import CapturedGroup, Group

EXACT = 256
"""Integers up to this one are exact in every dtype of sums."""
STEP = 5
"""Shift of a rank's values against those of the rank before."""
COLUMNS = 4
"""Values of a row that ranks gather."""
PURPOSE = "start"
Replayed = Callable[[Callable[[], Tensor]], Tensor]


class ExchangeError(ValueError):
    """An exchange between ranks gives something else than it must."""


def wrong_exchange(
    group: Group, name: str, num_rows: int, like: Tensor, width: int, replayed: Replayed | None
) -> str | None:
    """What a group's sum or gather of ``num_rows`` rows gets wrong; None if nothing. All ranks of the group must call
    it.

    ``like`` has the dtype and device of sums; ``replayed`` computes a function in a captured graph, if there are any.
    """
    if group.size == 1:
        return None
    values = max(2, EXACT // group.size)
    by_rank = (torch.arange(values) + STEP * torch.arange(group.size)[:, None]) % values

    def rows(pattern: Tensor, dtype: torch.dtype, columns: int) -> Tensor:
        size = num_rows * columns
        return pattern.to(like.device, dtype).repeat(size // len(pattern) + 1)[:size].view(num_rows, columns)

    own_ids = by_rank + values * torch.arange(group.size)[:, None]
    total = rows(by_rank.sum(0), like.dtype, width)
    of_all = torch.stack([rows(pattern, torch.int32, COLUMNS) for pattern in own_ids])
    summed, gathered = rows(by_rank[group.rank], like.dtype, width), of_all[group.rank]
    fault: str | None = None
    in_graph = CapturedGroup(group.rank, group.size, group.process_group)
    for ranks in (group, in_graph)[: 1 + (replayed is not None)]:
        reduce, gather = partial(ranks.all_reduce, purpose=PURPOSE), partial(ranks.all_gather, purpose=PURPOSE)
        for kind, exchange, given, expected in (("sum", reduce, summed, total), ("gather", gather, gathered, of_all)):
            with group.ledger.paused():
                found = exchange(given.clone())  # the first launch of a kind, which may not be in a capture
                if ranks is in_graph:
                    assert replayed is not None
                    found = replayed(partial(exchange, given.clone()))
            count = int((found != expected).sum())
            if count and fault is None:  # the other ranks go on
                where = ", in a captured graph" if ranks is in_graph else ""
                fault = (
                    f"the {kind} over {group.size} {name} ranks is wrong in {count} of {expected.numel()} values "
                    f"({num_rows} rows, {given.dtype}{where}); this is a fault of the devices' communication or of "
                    "its software"
                )
    return fault
