"""Which positions of an answer are masked in training, and which positions see which."""

from __future__ import annotations

import torch

BLOCKS = (8, 8, 16, 32)
"""Positions of a block; a batch has one of these. The bundled model is decoded in blocks of 8."""
LONGEST_BLOCK = max(BLOCKS)
FRONT_LEVEL = 1.6
"""The front block's masked share is drawn from 0 to this, so three eighths of the front blocks are masked completely,
as decoding opens them."""
FULL_LEVEL = 1.05
"""From block to block the masked share rises by a random part of its distance to this."""
BLOCKWISE_SHARE = 0.5
"""Share of a batch with block-wise noise; the others have a ramp."""
FAR_BEHIND = 20
"""Positions that lie further past the end of a ramp or of the front block than this are mostly guesswork."""
FAR_WEIGHT = 0.2
"""Their weight in the loss."""


def block_causal(length: int, block: int) -> torch.Tensor:
    """Which positions of an answer see which [length, length] bool: those of their block and of earlier ones.

    Args:
        length: positions of the answer.
        block: positions of a block.
    """
    index = torch.arange(length) // block
    return index[:, None] >= index[None, :]


def causal(length: int) -> torch.Tensor:
    """Which positions of an answer see which [length, length] bool: themselves and earlier ones."""
    return torch.ones(length, length, dtype=torch.bool).tril()


def noise(answer: torch.Tensor, block: int, eos: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Which positions of answers are masked, and how much each counts in the loss.

    Args:
        answer: token ids [n, l], whole blocks.
        block: positions of a block.
        eos: id of the EOS, with which answers are padded.
        generator: of all that is random.

    Returns:
        The masked positions [n, l] bool, and the weights [n, l] float32.
    """
    content = (answer != eos).sum(1) + 1
    length = answer.shape[1]
    ramp, ramp_end = ramp_noise(content, block, length, generator)
    blockwise, front_end = blockwise_noise(content, block, length // block, generator)
    is_blockwise = torch.rand(len(answer), 1, generator=generator) < BLOCKWISE_SHARE
    share = torch.where(is_blockwise, blockwise, ramp)
    is_far = torch.arange(length) > torch.where(is_blockwise, front_end, ramp_end) + FAR_BEHIND
    masked = torch.rand(share.shape, generator=generator) < share
    return masked, torch.where(is_far, FAR_WEIGHT, 1.0)


def blockwise_noise(
    content: torch.Tensor, block: int, blocks: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """The masked share of each position [n, l] in D2F's monotone noise, and where the front block ends [n, 1].

    Blocks before a random front block are clean; from there on the share rises from block to block.

    Args:
        content: tokens, the first EOS included [n].
        block: positions of a block.
        blocks: of the answers.
        generator: of all that is random.
    """
    n = content.shape[0]
    num_content_blocks = ((content - 1) // block + 1).clamp(max=blocks)
    front = (torch.rand(n, generator=generator) * num_content_blocks).long()
    share = torch.zeros(n, blocks)
    level = torch.rand(n, generator=generator) * FRONT_LEVEL
    for index in range(blocks):
        is_noisy = index >= front
        share[:, index] = torch.where(is_noisy, level, 0.0)
        rise = (FULL_LEVEL - level).clamp(min=0) * torch.rand(n, generator=generator)
        level = torch.where(is_noisy, level + rise, level)
    return share.repeat_interleave(block, dim=1), ((front + 1) * block)[:, None]


def ramp_noise(
    content: torch.Tensor, block: int, length: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """The masked share of each position [n, length], which rises from 0 to 1, and where the rise ends [n, 1].

    Decoding meets such states: positions are filled from the left, with gaps. The ramp is between a step, as in
    autoregressive decoding, and two blocks wide; its centre is random.

    Args:
        content: tokens, the first EOS included [n].
        block: positions of a block.
        length: positions of an answer.
        generator: of all that is random.
    """
    n = content.shape[0]
    centre = torch.rand(n, generator=generator) * (content + 1)
    width = 1 + 2 * block * torch.rand(n, generator=generator) ** 2
    share = (torch.arange(length) - centre[:, None]) / width[:, None] + 0.5
    return share.clamp(0, 1), (centre + width / 2)[:, None]
