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

    @property
    def is_block_causal(self) -> bool:
        return self.attention == "block_causal"


DREAM = ModelProperties(logit_shift=1, attention="full")
"""The properties of Dream, and of a model in plain torch, which states none."""
