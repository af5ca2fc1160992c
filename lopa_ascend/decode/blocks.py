"""Blocks and branches: the state of a sequence, as values (SPEC sections 1 and 2, steps a, b and k)."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache
from typing import Any

from lopa_ascend.types import Fill


class BlockState(Enum):
    ACTIVE = "active"
    """It has masks, or waits for an earlier block."""
    TO_CACHE = "to_cache"
    """It is final: the next forward pass commits its keys and values."""
    IN_CACHE = "in_cache"


@dataclass(frozen=True, slots=True)
class Block:
    """The positions [start, end) of a branch, ``masks`` of them not filled."""

    start: int
    end: int
    masks: int
    state: BlockState = BlockState.ACTIVE
    activated: bool = False
    """Fully activated: it must fill at least one position in every step. Once set it stays set."""
    passes: int = 0
    """Forward passes that computed the block since it was fully activated; on a whole canvas since it was begun."""
    checks_left: int = 0
    """Passes without masks that it has left at most before it is final; 0 if filled positions stay as they are."""

    @property
    def is_open(self) -> bool:
        """Whether tokens may still change."""
        return self.masks > 0 or self.checks_left > 0

    @property
    def length(self) -> int:
        return self.end - self.start

    @property
    def filled(self) -> int:
        return self.length - self.masks


@lru_cache(maxsize=1024)  # thresholds come from requests
def threshold_count(fraction: float, length: int) -> int:
    """The fewest filled positions of ``length`` that reach ``fraction``.

    >>> [threshold_count(0.95, n) for n in (1, 16, 32)]
    [1, 16, 31]
    """
    return next(n for n in range(length + 1) if not length or n / length >= fraction)


@dataclass(frozen=True, slots=True)
class Branch:
    """One candidate state of a sequence. Its methods return the branch that follows from it."""

    tokens: tuple[int, ...]
    """Of all generated positions so far, masks included."""
    blocks: tuple[Block, ...]
    """The first block is the prompt, or on a grid from position 0 the whole blocks of the prompt."""
    first: int
    """The first generated position: the prompt's length. On a grid the second block may begin before it."""
    eos: bool = False
    """A token that ends the answer has been filled, so no further block is opened."""
    own_fills: tuple[Fill, ...] = ()
    """What a lookahead branch holds beside the anchor's tokens."""
    probs: tuple[float, ...] = ()
    """By generated position, the probability at which it was filled; 0 for masks."""
    confirmed_by: tuple[int, ...] = ()
    """See ``BranchRecord``."""

    @property
    def lookahead(self) -> Fill | None:
        return self.own_fills[0] if self.own_fills else None

    @property
    def end(self) -> int:
        return self.blocks[-1].end

    @property
    def masks(self) -> int:
        return sum(block.masks for block in self.blocks)

    def token_at(self, position: int) -> int:
        return self.tokens[position - self.first]

    def active_blocks(self) -> list[Block]:
        return [block for block in self.blocks if block.state is BlockState.ACTIVE]

    def masked_positions(self, mask: int) -> list[int]:
        return [position for block in self.blocks if block.masks for position in self.masked_in(block, mask)]

    def masked_in(self, block: Block, mask: int) -> list[int]:
        first, tokens = self.first, self.tokens
        begin = max(block.start, first)
        return [position for position in range(begin, block.end) if tokens[position - first] == mask]

    def fill(self, fills: Sequence[Fill], ends: Set[int]) -> Branch:
        """With tokens in masked positions. ``ends``: token ids that end the answer."""
        if not fills:
            return self
        positions = [fill.position for fill in fills]
        blocks = tuple(_less_masks(block, positions) if block.masks else block for block in self.blocks)
        eos = self.eos or any(fill.token in ends for fill in fills)
        return self._with_tokens(fills, blocks=blocks, eos=eos)

    def _with_tokens(self, fills: Sequence[Fill], **changes: Any) -> Branch:
        tokens, probs = list(self.tokens), list(self.probs)
        for fill in fills:
            tokens[fill.position - self.first] = fill.token
            probs[fill.position - self.first] = fill.max_prob
        return replace(self, tokens=tuple(tokens), probs=tuple(probs), **changes)

    def edit(self, edits: Sequence[Fill], ends: Set[int]) -> Branch:
        """With other tokens in filled positions."""
        if not edits:
            return self
        branch = self._with_tokens(edits)
        return replace(branch, eos=any(token in ends for token in branch.tokens))

    def check(self, *, changed: bool) -> Branch:
        """With one check less for the active blocks without masks, or none if the pass has changed nothing."""
        if not any(block.checks_left for block in self.blocks):
            return self
        blocks = [
            replace(block, checks_left=block.checks_left - 1 if changed else 0)
            if block.checks_left and not block.masks
            else block
            for block in self.blocks
        ]
        return replace(self, blocks=tuple(blocks))

    def as_lookahead(self, fills: Sequence[Fill], ends: Set[int]) -> Branch:
        return replace(self.fill(fills, ends), own_fills=tuple(fills))

    def as_anchor(self) -> Branch:
        """The winner as the next anchor: its own tokens become ordinary ones."""
        return replace(self, own_fills=(), confirmed_by=()) if self.own_fills else self

    def confirm(self, confirmed: Sequence[tuple[int, Fill]]) -> Branch:
        """With ``own_fills`` as this pass predicts them: the same tokens, other probabilities. ``confirmed`` has for
        each of them the index of the branch that predicts it, and the prediction."""
        probs = list(self.probs)
        for _, fill in confirmed:
            probs[fill.position - self.first] = fill.max_prob
        indices, fills = zip(*confirmed, strict=True)
        return replace(self, probs=tuple(probs), own_fills=fills, confirmed_by=indices)

    def mask_again(self, index: int, mask: int, ends: Set[int]) -> Branch:
        """With masks from the generated position ``index`` to the end of its block. No position before it is masked."""
        position = self.first + index
        block = next(block for block in self.blocks if block.start <= position < block.end)
        assert block.state is BlockState.ACTIVE, "what the grammar has not passed is not committed"
        tokens, probs = list(self.tokens), list(self.probs)
        count = block.end - position
        tokens[index : index + count], probs[index : index + count] = [mask] * count, [0.0] * count
        return replace(
            self,
            tokens=tuple(tokens),
            probs=tuple(probs),
            blocks=tuple(replace(other, masks=count) if other is block else other for other in self.blocks),
            eos=any(token in ends for token in tokens),
            own_fills=tuple(fill for fill in self.own_fills if not position <= fill.position < block.end),
        )

    def open_block(self, length: int, mask: int, checks: int = 0) -> Branch:
        """With another block, all masks but for tokens of the prompt. ``checks``: see ``Block.checks_left``."""
        start, end = self.end, self.end + length
        num_masks = end - max(start, self.first)
        return replace(
            self,
            tokens=(*self.tokens, *[mask] * num_masks),
            probs=(*self.probs, *[0.0] * num_masks),
            blocks=(*self.blocks, Block(start, end, num_masks, checks_left=checks)),
        )

    def open_given(self, tokens: Sequence[int]) -> Branch:
        end = self.end + len(tokens)
        return replace(
            self,
            tokens=(*self.tokens, *tokens),
            probs=(*self.probs, *[1.0] * len(tokens)),
            blocks=(*self.blocks, Block(self.end, end, 0)),
        )

    def activate(self, tau_act: float) -> Branch:
        """Activates every block behind one that is filled to ``tau_act``."""
        blocks = list(self.blocks)
        for i, (before, block) in enumerate(zip(self.blocks, self.blocks[1:], strict=False), 1):
            if not block.activated and before.filled >= threshold_count(tau_act, before.length):
                blocks[i] = replace(block, activated=True)
        return replace(self, blocks=tuple(blocks))

    def finish_blocks(self) -> Branch:
        """With the states of the blocks after a forward pass: TO_CACHE becomes IN_CACHE, and an active block that is
        not open becomes TO_CACHE unless an earlier one is active. The pass counts for fully activated blocks."""
        blocks = []
        earlier_is_active = False
        for block in self.blocks:
            state = block.state
            if state is BlockState.TO_CACHE:
                state = BlockState.IN_CACHE
            elif state is BlockState.ACTIVE:
                earlier_is_active |= block.is_open
                state = BlockState.ACTIVE if earlier_is_active else BlockState.TO_CACHE
            passes = block.passes + (block.activated and block.masks > 0)
            is_same = state is block.state and passes == block.passes
            blocks.append(block if is_same else replace(block, state=state, passes=passes))
        return replace(self, blocks=tuple(blocks))


def _less_masks(block: Block, filled: Sequence[int]) -> Block:
    num_filled = sum(block.start <= position < block.end for position in filled)
    return replace(block, masks=block.masks - num_filled) if num_filled else block
