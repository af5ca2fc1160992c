"""How a diffusion model was trained to decode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class ModelProperties:
    """What differs between diffusion models beside their weights and their forward pass."""

    logit_shift: Literal[0, 1]
    """The logits at position q - logit_shift predict the token at q, where q sees positions behind it."""
    attention: Literal["full", "block_causal", "causal"]
    """What a position saw in training. "full": all positions; blocks are counted from the prompt's end. "block_causal":
    the blocks up to its own, on a grid from position 0, the prompt included. There the keys and values of final blocks
    depend on nothing behind them, and the first block to decode may begin with the last tokens of the prompt.
    "causal": the positions up to its own, as in an autoregressive model, and while its block is filled the whole
    block. Final keys and values are those of a causal pass, in which the logits at q predict the token at q + 1."""
    grid: Literal["start", "prompt"] = "start"
    """Block-causal: where the grid of blocks begins. "start": at position 0. "prompt": blocks lie before and behind the
    prompt's end, so keys and values of a prompt depend on its length modulo that of a block."""
    ends_on_grid: bool = True
    """Block-causal: the last block is whole, whatever ``max_new_tokens`` is. Otherwise it ends with the answer."""
    schedule: Literal["length", "masks", "linear"] = "length"
    """What ``denoising_steps`` divides: "length": a block's length into shares of which the first ones have the
    remainder; "masks": the masks that a block begins with into such shares; "linear": see ``decode.schedule``."""
    fills_blocks: bool = True
    """Whether positions that see one another may be filled without verification; a causal model may have learnt to
    draft only."""
    drafts_blocks: bool = True
    """Causal: whether positions that see one another may be drafted; the model may have learnt neither."""
    fills_as_llada: bool = False
    """On a whole canvas a pass fills what the code for LLaDA fills, where that for Dream fills less: with "factor" a
    block's last mask as soon as the rule comes to it (Fast-dLLM), and in a window of several blocks one position at
    least beside the first block's (d3LLM)."""

    @property
    def is_block_causal(self) -> bool:
        return self.attention == "block_causal"

    @property
    def is_causal(self) -> bool:
        return self.attention == "causal"

    @property
    def has_blocks(self) -> bool:
        """Whether the model was trained with blocks, so that final keys and values depend on nothing behind them."""
        return self.attention != "full"

    def origin(self, prompt_length: int, block_size: int) -> int:
        """Where the first block to decode begins. The positions before it are the prompt, or its whole blocks."""
        if self.is_block_causal and self.grid == "start":
            return prompt_length // block_size * block_size
        return prompt_length

    def limit(self, prompt_length: int, max_new_tokens: int, block_size: int) -> int:
        """Positions of a sequence that is decoded to its end. On a grid the last block may be whole: its positions see
        one another, so the tokens of a shorter block would be others."""
        length, is_whole = prompt_length + max_new_tokens, self.is_block_causal and self.ends_on_grid
        return -(-length // block_size) * block_size if is_whole else length

    def room(self, max_length: int, prompt_length: int, block_size: int) -> int:
        """The largest ``max_new_tokens`` for which ``limit`` is at most ``max_length``."""
        is_whole = self.is_block_causal and self.ends_on_grid
        return (max_length // block_size * block_size if is_whole else max_length) - prompt_length


DREAM = ModelProperties(logit_shift=1, attention="full")
"""The properties of Dream, and of a model in plain torch, which states none."""
