"""Blocks and branches: the state that decoding advances (SPEC sections 1 and 2, steps a, b and k)."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cache

from lopa_ascend.types import Fill


class BlockState(Enum):
    """active: has masks, or waits for an earlier block; to_cache: its keys and values are written by the next forward
    pass; in_cache: committed."""

    ACTIVE = "active"
    TO_CACHE = "to_cache"
    IN_CACHE = "in_cache"


@dataclass(slots=True)
class Block:
    """Positions [start, end), of which ``masks`` are not filled. ``activated`` (fully activated) blocks must fill at
    least one position a step; it is only ever set."""

    start: int
    end: int
    masks: int
    state: BlockState = BlockState.ACTIVE
    activated: bool = False

    @property
    def length(self) -> int:
        return self.end - self.start

    @property
    def filled(self) -> int:
        return self.length - self.masks


@cache
def threshold_count(fraction: float, length: int) -> int:
    """The smallest number of filled positions of ``length`` whose share reaches ``fraction``.

    >>> [threshold_count(0.95, n) for n in (1, 16, 32)]
    [1, 16, 31]
    """
    return next(n for n in range(length + 1) if n / length >= fraction)


@dataclass(slots=True)
class Branch:
    """One candidate state of a sequence: ``tokens`` [end - first] are the ids of all generated positions so far, masks
    included, and ``probs`` the probabilities at which they were filled; ``blocks`` begin with the prompt's. ``eos``: an
    EOS has been filled, so no block is added any more."""

    tokens: list[int]
    blocks: list[Block]
    eos: bool = False
    lookahead: Fill | None = None
    probs: list[float] = field(default_factory=list)

    @property
    def first(self) -> int:
        """The first generated position: the prompt's length."""
        return self.blocks[0].end

    @property
    def end(self) -> int:
        return self.blocks[-1].end

    @property
    def masks(self) -> int:
        return sum(block.masks for block in self.blocks)

    def active_blocks(self) -> list[Block]:
        return [block for block in self.blocks if block.state is BlockState.ACTIVE]

    def masked_positions(self, mask: int) -> list[int]:
        """Absolute positions that hold the mask, ascending."""
        first, tokens = self.first, self.tokens
        return [
            position
            for block in self.blocks
            if block.masks
            for position in range(block.start, block.end)
            if tokens[position - first] == mask
        ]

    def fill(self, fill: Fill, eos: Set[int]) -> None:
        self.tokens[fill.position - self.first] = fill.token
        self.probs[fill.position - self.first] = fill.max_prob
        next(b for b in self.blocks if b.start <= fill.position < b.end).masks -= 1
        self.eos |= fill.token in eos

    def copy(self) -> Branch:
        return Branch(list(self.tokens), [replace(block) for block in self.blocks], self.eos, probs=list(self.probs))

    def open_block(self, length: int, mask: int) -> None:
        self.blocks.append(Block(self.end, self.end + length, length))
        self.tokens.extend([mask] * length)
        self.probs.extend([0.0] * length)

    def activate(self, tau_act: float) -> None:
        """A block whose predecessor is filled to ``tau_act`` becomes fully activated."""
        for before, block in zip(self.blocks, self.blocks[1:], strict=False):
            if not block.activated and before.filled >= threshold_count(tau_act, before.length):
                block.activated = True

    def settle(self, finished: Set[int]) -> None:
        """After a forward pass: what was written is in the cache, and blocks whose start is in ``finished`` are next,
        unless an earlier block is still active. A block that only a lookahead token finished stays active."""
        waiting = False
        for block in self.blocks:
            if block.state is BlockState.TO_CACHE:
                block.state = BlockState.IN_CACHE
            elif block.state is BlockState.ACTIVE:
                if not waiting and block.start in finished and not block.masks:
                    block.state = BlockState.TO_CACHE
                else:
                    waiting = True
