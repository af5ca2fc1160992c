"""How a diffusion model was trained to decode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class ModelProperties:
    """What differs between diffusion models beside their weights and their forward pass."""

    logit_shift: Literal[0, 1]
    """The logits at position q - logit_shift predict the token at q."""
    attention: Literal["full", "block_causal"]
    """What a position saw in training. "full": all positions; blocks are counted from the prompt's end. "block_causal":
    the blocks up to its own, on a grid from position 0, the prompt included. There the keys and values of final blocks
    depend on nothing behind them, and the first block to decode may begin with the last tokens of the prompt."""
    fills_as_llada: bool = False
    """On a whole canvas a pass fills what the code for LLaDA fills, where that for Dream fills less: with "factor" a
    block's last mask as soon as the rule comes to it (Fast-dLLM), and in a window of several blocks one position at
    least beside the first block's (d3LLM)."""

    @property
    def is_block_causal(self) -> bool:
        return self.attention == "block_causal"

    def origin(self, prompt_length: int, block_size: int) -> int:
        """Where the first block to decode begins. The positions before it are the prompt, or its whole blocks."""
        return prompt_length // block_size * block_size if self.is_block_causal else prompt_length

    def limit(self, prompt_length: int, max_new_tokens: int, block_size: int) -> int:
        """Positions of a sequence that is decoded to its end. On a grid the last block is whole: its positions see one
        another, so the tokens of a shorter block would be others."""
        length = prompt_length + max_new_tokens
        return -(-length // block_size) * block_size if self.is_block_causal else length

    def room(self, max_length: int, prompt_length: int, block_size: int) -> int:
        """The largest ``max_new_tokens`` for which ``limit`` is at most ``max_length``."""
        return self.origin(max_length, block_size) - prompt_length


DREAM = ModelProperties(logit_shift=1, attention="full")
"""The properties of Dream, and of a model in plain torch, which states none."""
