"""Blocks and branches: the state that decoding advances (SPEC sections 1 and 2, steps a, b and k)."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import lru_cache

from lopa_ascend.types import Fill


class BlockState(Enum):
    """How far a block is."""

    ACTIVE = "active"
    """It has masks, or waits for an earlier block."""
    TO_CACHE = "to_cache"
    """It is final: the next forward pass commits its keys and values."""
    IN_CACHE = "in_cache"
    """Its keys and values are committed."""


@dataclass(slots=True)
class Block:
    """The positions [start, end) of a branch."""

    start: int
    end: int
    masks: int
    """Positions that are not filled."""
    state: BlockState = BlockState.ACTIVE
    activated: bool = False
    """Fully activated: the block must fill at least one position in every step. Once set it stays set."""

    @property
    def length(self) -> int:
        return self.end - self.start

    @property
    def filled(self) -> int:
        return self.length - self.masks


@lru_cache(maxsize=1024)  # thresholds come from requests
def threshold_count(fraction: float, length: int) -> int:
    """The smallest number of filled positions of ``length`` whose share reaches ``fraction``.

    >>> [threshold_count(0.95, n) for n in (1, 16, 32)]
    [1, 16, 31]
    """
    return next(n for n in range(length + 1) if n / length >= fraction)


@dataclass(slots=True)
class Branch:
    """One candidate state of a sequence."""

    tokens: list[int]
    """Token ids of all generated positions so far, masks included."""
    blocks: list[Block]
    """The first block is the prompt."""
    eos: bool = False
    """An EOS, or another token that ends the answer, has been filled, so no further block is opened."""
    lookahead: Fill | None = None
    """The token that a lookahead branch holds in addition to the anchor."""
    probs: list[float] = field(default_factory=list)
    """For each generated position the probability at which it was filled; 0 for masks."""
    further: tuple[Fill, ...] = ()
    """See ``BranchRecord``."""
    confirmed_by: tuple[int, ...] = ()
    """See ``BranchRecord``."""

    @property
    def own_fills(self) -> tuple[Fill, ...]:
        """All tokens that a lookahead branch holds in addition to the anchor."""
        return () if self.lookahead is None else (self.lookahead, *self.further)

    @property
    def first(self) -> int:
        """The first generated position: the prompt's length."""
        return self.blocks[0].end

    @property
    def end(self) -> int:
        return self.blocks[-1].end

    @property
    def masks(self) -> int:
        """Positions that are not filled."""
        return sum(block.masks for block in self.blocks)

    def active_blocks(self) -> list[Block]:
        return [block for block in self.blocks if block.state is BlockState.ACTIVE]

    def masked_positions(self, mask: int) -> list[int]:
        """Absolute positions that hold the mask, ascending."""
        return [position for block in self.blocks if block.masks for position in self.masked_in(block, mask)]

    def masked_in(self, block: Block, mask: int) -> list[int]:
        """Absolute positions of one of the generated blocks that hold the mask, ascending."""
        first, tokens = self.first, self.tokens
        return [position for position in range(block.start, block.end) if tokens[position - first] == mask]

    def fill(self, fill: Fill, eos: Set[int]) -> None:
        """Puts a token into a masked position."""
        self.tokens[fill.position - self.first] = fill.token
        self.probs[fill.position - self.first] = fill.max_prob
        block = next(block for block in self.blocks if block.start <= fill.position < block.end)
        block.masks -= 1
        if fill.token in eos:
            self.eos = True

    def become_lookahead(self, fills: Sequence[Fill], eos: Set[int]) -> None:
        """Turns a copy of the anchor into a lookahead branch, which holds these tokens in addition to the anchor's."""
        for fill in fills:
            self.fill(fill, eos)
        self.lookahead, self.further = fills[0], tuple(fills[1:])

    def become_anchor(self) -> None:
        """Turns the winner into the anchor of the next branches: its own tokens become ordinary ones."""
        self.lookahead, self.further, self.confirmed_by = None, (), ()

    def confirm(self, confirmed: Sequence[tuple[int, Fill]]) -> None:
        """Replaces the branch's own fills by the predictions that confirm them: the same tokens, with the probabilities
        of this pass.

        Args:
            confirmed: for each of ``own_fills``: the index of the branch whose prediction confirms it, and the
                prediction.
        """
        fills = [fill for _, fill in confirmed]
        for fill in fills:
            self.probs[fill.position - self.first] = fill.max_prob
        self.lookahead, self.further = fills[0], tuple(fills[1:])
        self.confirmed_by = tuple(index for index, _ in confirmed)

    def copy(self) -> Branch:
        """An independent branch in the same state, without tokens of its own."""
        return Branch(list(self.tokens), [replace(block) for block in self.blocks], self.eos, probs=list(self.probs))

    def open_block(self, length: int, mask: int) -> None:
        """Appends a block of ``length`` masks."""
        self.blocks.append(Block(self.end, self.end + length, length))
        self.tokens.extend([mask] * length)
        self.probs.extend([0.0] * length)

    def activate(self, tau_act: float) -> None:
        """Fully activates every block whose predecessor is filled to ``tau_act``."""
        for before, block in zip(self.blocks, self.blocks[1:], strict=False):
            if not block.activated and before.filled >= threshold_count(tau_act, before.length):
                block.activated = True

    def settle(self, finished: Set[int]) -> None:
        """Advances the states of the blocks after a forward pass: TO_CACHE becomes IN_CACHE, and a finished block
        becomes TO_CACHE unless an earlier block is still active.

        Args:
            finished: starts of the blocks whose last mask was filled. A block that only a lookahead token finished is
                not among them, and stays active.
        """
        earlier_is_active = False
        for block in self.blocks:
            if block.state is BlockState.TO_CACHE:
                block.state = BlockState.IN_CACHE
            elif block.state is BlockState.ACTIVE:
                if not earlier_is_active and block.start in finished and not block.masks:
                    block.state = BlockState.TO_CACHE
                else:
                    earlier_is_active = True
