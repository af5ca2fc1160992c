"""Sequences in the memory of compiled steps: each has a seat, where its state and its parameters are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from lopa_ascend.backend import Ops
from lopa_ascend.config import DecodingParams
from lopa_ascend.decode.blocks import threshold_count
from lopa_ascend.decode.d2f import D2F
from lopa_ascend.graph.buckets import Bucket
from lopa_ascend.graph.inputs import Known, admit, no_states, nobody, packed_state
from lopa_ascend.graph.step import Storage


@dataclass(frozen=True)
class AtRest:
    """A sequence between what a step made of it and the plan of the next one: what a seat is given. ``tokens`` are the
    anchor's generated ids, ``first`` of its blocks are committed, ``lookaheads`` (generated position, token)."""

    first: int
    tokens: tuple[int, ...]
    lookaheads: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, strategy: D2F) -> AtRest:
        *others, anchor = strategy.branches
        fills = [branch.lookahead for branch in others]
        begin = len(strategy.prompt)
        lookaheads = tuple((fill.position - begin, fill.token) for fill in fills if fill is not None)
        return cls(committed_blocks(strategy, strategy.num_committed), tuple(anchor.tokens), lookaheads)


def committed_blocks(strategy: D2F, positions: int) -> int:
    """Generated blocks in the first so many positions, which end with a block or inside the prompt."""
    return -(-max(0, positions - len(strategy.prompt)) // strategy.params.block_size)


@dataclass
class Seat:
    """Number ``index``. The last step's window began at block ``before`` and had ``held`` blocks."""

    index: int
    before: int
    held: int


class Seats:
    """``count`` of them, and behind them as many as the largest bucket has sequences, where nobody ever sits."""

    def __init__(self, count: int, shape: Bucket, mask: int, hidden: Tensor, ops: Ops):
        """``hidden`` [0, hidden] has the dtype and the device of hidden states."""
        self.shape, self.ops, self.count = shape, ops, count
        total = count + shape.sequences
        self.params = nobody(total, mask, shape)
        self.storage = Storage(
            states=no_states(total, shape).to(ops.device),
            hidden=hidden.new_zeros(total * (1 + shape.capacity), hidden.shape[1]),
        )
        self._free = list(range(count - 1, -1, -1))

    def take(self, rest: AtRest, request: DecodingParams, eos: Sequence[int], last: Tensor) -> Seat:
        """Seats a sequence. ``last`` [hidden] predicts the first position of its window."""
        seat = Seat(self._free.pop(), rest.first, self.shape.capacity)
        add, act = (threshold_count(tau, request.block_size) for tau in (request.tau_add, request.tau_act))
        admit(self.params, seat.index, request, eos, add, act)
        packed = packed_state(self.params, seat.index, request, rest.first, rest.tokens, rest.lookaheads, self.shape)
        sent = self.ops.host_memory(len(packed)).view(packed.dtype).copy_(packed)
        self.storage.states[seat.index].copy_(sent, non_blocking=True)
        self.storage.hidden[self.row(seat, rest.first)].copy_(last)
        return seat

    def leave(self, seat: Seat) -> None:
        self._free.append(seat.index)

    def row(self, seat: Seat, first: int) -> int:
        """Where the hidden state is that predicts block ``first``, with which the next window begins."""
        return seat.index * (1 + self.shape.capacity) + first - seat.before

    def nobody(self, index: int) -> Known:
        return Known(self.count + index)

    def known(self, seat: Seat, strategy: D2F, first: int, shared: int) -> Known:
        """What a launch must be told of a sequence whose window begins with block ``first``."""
        request = strategy.params
        return Known(
            seat=seat.index,
            prompt=len(strategy.prompt),
            block_size=request.block_size,
            length=request.max_new_tokens,
            first=first,
            before=seat.before,
            held=seat.held,
            caps=most_blocks(strategy),
            shared=shared,
        )


def most_blocks(strategy: D2F) -> int:
    """Blocks that a sequence may have open, as far as is known: no more of them once an EOS has been filled."""
    anchor = strategy.branches[-1]
    if anchor.eos:
        return len(anchor.blocks) - 1
    return -(-strategy.params.max_new_tokens // strategy.params.block_size)
