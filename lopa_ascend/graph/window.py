"""The window of a sequence in a compiled step: which generated blocks it must hold, and where positions lie in it.
Blocks are numbered from 0 at the sequence's origin (``ModelProperties.origin``)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lopa_ascend.core import Sequence
from lopa_ascend.decode.strategy import Strategy


def next_window(sequence: Sequence, *, in_flight: bool) -> range:
    """The smallest safe window of the next step: the blocks that it must be able to hold, at least one. ``in_flight``:
    a launched step has not been read. Its plan is known, but not its winner: the branch with most blocks counts, and
    may open another one."""
    strategy, plan = sequence.strategy, sequence.next_pass
    start = num_blocks(strategy, plan.start + plan.num_new if in_flight else plan.start)
    num_opened = max(num_blocks(strategy, row.end) for row in plan.rows)
    return range(start, max(min(num_opened + in_flight, max_opened_blocks(strategy)), start + 1))


def block_rows(sequence: Sequence, window: range, *, in_flight: bool, slots: int, num_groups: int) -> tuple[int, ...]:
    """For each block of the next step's window (``next_window``), how many of a sequence's ``slots`` on a rank may have
    to compute it; see ``policy/packed.py``.

    While a step is in flight it is unknown which masks the next lookahead branches will fill. But each fills another
    mask, so up to each block they are at most the anchor's masks there now, less the one that the step in flight fills
    at least.
    """
    if num_groups > 1:
        return (slots,) * len(window)
    strategy, (*lookaheads, _) = sequence.strategy, sequence.next_pass.rows
    if not in_flight:
        own_blocks = [num_blocks(strategy, row.compute_from) for row in lookaheads]
        return tuple(1 + sum(own <= block for own in own_blocks) for block in window)
    counts, most, masks = [], min(strategy.params.lookaheads, slots - 1), -1
    blocks = strategy.anchor.blocks[1:]
    for number in window:
        masks += blocks[number].masks if number < len(blocks) else strategy.params.block_size
        counts.append(1 + max(0, min(most, masks)))
    return tuple(counts)


def end_of_blocks(sequence: Sequence, count: int) -> int:
    request = sequence.request
    return min(request.origin + count * request.params.block_size, request.limit)


def cells_of(
    sequence: Sequence, window_start: int, block_length: int, positions: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Cells of some positions, counted from the start of a window."""
    block, offset = np.divmod(positions - sequence.request.origin, sequence.request.params.block_size)
    cells: NDArray[np.int64] = (block - window_start) * block_length + offset
    return cells


def num_blocks(strategy: Strategy, num_positions: int) -> int:
    """Generated blocks in the first ``num_positions`` positions, which end with a block or before the origin."""
    return -(-max(0, num_positions - strategy.origin) // strategy.params.block_size)


def max_opened_blocks(strategy: Strategy) -> int:
    """The most generated blocks that a sequence may have opened. No more open once an EOS has been filled."""
    anchor = strategy.branches[-1]
    if anchor.eos:
        return len(anchor.blocks) - 1
    return num_blocks(strategy, strategy.limit)
