"""How a diffusion model was trained to decode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class ModelProperties:
    """What differs between diffusion models beside their weights and their forward pass."""

    logit_shift: Literal[0, 1]
    """The logits at position q - logit_shift predict the token at q."""
    prompt_attention: Literal["full", "block_causal", "causal"]
    """What a position of the prompt sees: all of the prompt; the blocks up to its own, on a grid from position 0; the
    positions up to its own."""
    block_grid: Literal["prompt_end", "zero"]
    """Where the first block begins: behind the prompt; at position 0, so that the first block to decode may begin with
    the last tokens of the prompt."""
    commit: Literal["next_pass", "own_pass"]
    """What stores the keys and values of a block that is full: the next pass, beside its other work; a pass that does
    nothing else."""


SERVED = ModelProperties(logit_shift=1, prompt_attention="full", block_grid="prompt_end", commit="next_pass")
"""What the engine can serve."""
