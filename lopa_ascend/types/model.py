"""How a diffusion model was trained to decode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class ModelProperties:
    """What differs between diffusion models beside their weights and their forward pass."""

    logit_shift: Literal[0, 1]
    """Logits at position q - logit_shift predict the token at q, if q sees positions behind it."""
    attention: Literal["full", "block_causal", "causal"]
    """What a position saw in training. "full": all positions; blocks are counted from the prompt's end. "block_causal":
    the blocks up to its own, on a grid from position 0, the prompt included; keys and values of final blocks depend on
    nothing behind them, and the first block to decode may begin with the prompt's last tokens. "causal": the positions
    up to its own, and while its block is filled the whole block; final keys and values are a causal pass's, whose
    logits at q predict the token at q + 1."""
    grid: Literal["start", "prompt"] = "start"
    """Where a block-causal grid begins: at position 0, or at the prompt's end in both directions, so that a prompt's
    keys and values depend on its length modulo a block's."""
    ends_on_grid: bool = True
    """Block-causal: the last block is whole, whatever ``max_new_tokens`` is."""
    schedule: Literal["length", "masks", "linear"] = "length"
    """What ``denoising_steps`` divides into shares: "length": a block's length, the first shares with the remainder;
    "masks": so the masks that a block begins with; "linear": see ``decode.schedule``."""
    fills_blocks: bool = True
    """Whether positions that see one another may be filled without verification, not only drafted."""
    drafts_blocks: bool = True
    """Causal: whether positions that see one another may be drafted."""
    fills_as_llada: bool = False
    """A whole canvas is filled as by LLaDA's code, not Dream's: with "factor" a block's last mask once the rule comes
    to it (Fast-dLLM), and in a window of several blocks at least one position beside the first block's (d3LLM)."""

    @property
    def is_block_causal(self) -> bool:
        return self.attention == "block_causal"

    @property
    def is_causal(self) -> bool:
        return self.attention == "causal"

    @property
    def has_blocks(self) -> bool:
        """Whether it was trained with blocks, so that final keys and values depend on nothing behind them."""
        return self.attention != "full"

    def origin(self, prompt_length: int, block_size: int) -> int:
        """Where the first block to decode begins: behind the prompt, or behind its whole blocks."""
        if self.is_block_causal and self.grid == "start":
            return prompt_length // block_size * block_size
        return prompt_length

    def limit(self, prompt_length: int, max_new_tokens: int, block_size: int) -> int:
        """Positions of a sequence at its end. The last block may be whole: tokens of a shorter one would be others."""
        length, is_whole = prompt_length + max_new_tokens, self.is_block_causal and self.ends_on_grid
        return -(-length // block_size) * block_size if is_whole else length

    def room(self, max_length: int, prompt_length: int, block_size: int) -> int:
        """The largest ``max_new_tokens`` with a ``limit`` of at most ``max_length``."""
        is_whole = self.is_block_causal and self.ends_on_grid
        return (max_length // block_size * block_size if is_whole else max_length) - prompt_length


DREAM = ModelProperties(logit_shift=1, attention="full")
"""The properties of Dream, and of a model in plain torch, which states none."""
