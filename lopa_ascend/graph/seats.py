"""The memory of compiled steps: each sequence that graphs decode has a seat for its parameters and state."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

from torch import Tensor

from lopa_ascend.backend.interface import Ops
from lopa_ascend.core import Sequence
from lopa_ascend.decode.strategy import Strategy
from lopa_ascend.graph.buckets import Bucket
from lopa_ascend.graph.inputs import HostView, empty_params, empty_states, packed_state, write_params
from lopa_ascend.graph.tensors import Storage
from lopa_ascend.graph.window import max_opened_blocks, num_blocks


@dataclass
class Seat:
    """A sequence's place in the memory, and the first block of its last launched window. Generated blocks
    count from 0."""

    index: int
    window_start: int
    window_blocks: int
    """Blocks of that window's bucket."""
    in_flight: int | None = None
    """Number of the launch whose result has not been read."""


class Seats:
    """``num_seats`` usable seats, then as many padding seats as the largest bucket has sequences.

    ``params`` of all seats are on the host, ``storage`` with states and hidden states on the device. ``num_taken``
    counts how often a seat was taken, which writes its parameters. ``hidden`` [0, hidden] has the dtype and device of
    hidden states; ``num_tokens`` is the largest step's tokens.
    """

    def __init__(self, num_seats: int, shape: Bucket, mask: int, hidden: Tensor, ops: Ops, num_tokens: int) -> None:
        self.shape, self.ops, self.num_seats = shape, ops, num_seats
        total = num_seats + shape.sequences
        self._rows_per_seat = 1 + shape.max_blocks
        self.params = empty_params(total, mask, shape)
        self.storage = Storage(
            states=empty_states(total, shape).to(ops.device),
            hidden=hidden.new_zeros(total * self._rows_per_seat + num_tokens, hidden.shape[1]),
        )
        self.of: dict[Sequence, Seat] = {}
        self._free = list(range(num_seats - 1, -1, -1))
        self.num_taken = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, sequence: Sequence) -> None:
        """Gives a sequence a seat, with its parameters and its state before the next step opens blocks."""
        strategy, window_start = sequence.strategy, num_blocks(sequence.strategy, sequence.num_committed)
        seat = self._free.pop()
        self.of[sequence] = Seat(seat, window_start, self.shape.max_blocks)
        self.num_taken += 1
        write_params(self.params, seat, strategy.params, sorted(strategy.ends), len(strategy.prompt) - strategy.origin)
        packed = packed_state(strategy, window_start, filler_of(strategy), self.shape)
        on_host = self.ops.host_memory(len(packed)).view(packed.dtype).copy_(packed)
        self.storage.states[seat].copy_(on_host, non_blocking=True)
        if sequence.last_hidden is not None:  # on a grid, the first position may be given
            self.storage.hidden[self.hidden_row(sequence, window_start)].copy_(sequence.last_hidden)

    def release(self, sequence: Sequence) -> None:
        if (seat := self.of.pop(sequence, None)) is not None:
            self._free.append(seat.index)

    def hidden_row(self, sequence: Sequence, block: int) -> int:
        """Row of ``storage.hidden`` for the state that predicts the first position of a block of the last window."""
        return self.of[sequence].index * self._rows_per_seat + block % self._rows_per_seat

    def host_view(self, sequence: Sequence, window_start: int) -> HostView:
        request, seat = sequence.request, self.of[sequence]
        return HostView(
            seat=seat.index,
            origin=request.origin,
            block_size=request.params.block_size,
            num_positions=request.limit - request.origin,
            window_start=window_start,
            last_start=seat.window_start,
            last_blocks=seat.window_blocks,
            max_opened_blocks=max_opened_blocks(sequence.strategy),
            num_shared_pages=sequence.page_tables.num_shared_pages,
            filler=filler_of(sequence.strategy),
        )

    def padding_view(self, row: int) -> HostView:
        return HostView(self.num_seats + row)


def filler_of(strategy: Strategy) -> int:
    return next(token for token in count() if token != strategy.mask and token not in strategy.ends)
