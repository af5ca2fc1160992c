"""What a batch's answers look like in training, and what the model has to predict of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from scripts.demo_tokenizer import EOS, MASK
from scripts.training.batches import Batch
from scripts.training.noise import BLOCKS, block_causal, causal, noise

FIRST_WEIGHT = 0.25
"""Weight of an answer's first token in the loss. It tells the style of the answer, which is drawn by chance: two thirds
of an autoregressive loss are this chance, and a quarter of the noise in its gradient."""
OPENED_BLOCK = min(BLOCKS)
"""Positions of the blocks that follow an autoregressive answer."""
SYMBOLS = "0123456789+-*/="
"""Tokens that must be predicted for a problem to count as solved."""
LOWEST_FILLED, HIGHEST_FILLED = 0.5, 0.95
"""Range of a threshold that is drawn for each batch's second step: tokens predicted with a higher probability are
filled in it. Decoding fills tokens above tau_conf, and with branches less probable ones too."""


@dataclass
class Answer:
    """What the model sees of a batch's answers, and what it learns from them; l positions an answer."""

    ids: torch.Tensor
    """Token ids that the model sees [n, l]."""
    truth: torch.Tensor
    """Token ids without noise [n, l]."""
    wanted: torch.Tensor
    """Positions to predict [n, l] bool."""
    weight: torch.Tensor
    """Weight of each position in the loss [n, l]."""
    mask: torch.Tensor
    """Which positions of the answer see which [l, l] bool."""
    offsets: torch.Tensor | None = None
    """Distance of each position from the end of the prompt [l]; None if they are in order."""


def weighted_mean(losses: torch.Tensor, answers: list[Answer]) -> torch.Tensor:
    """The mean of the wanted positions' losses [m] with their weights."""
    wanted = torch.cat([answer.wanted for answer in answers], 1)
    weight = torch.cat([answer.weight for answer in answers], 1)[wanted]
    return (losses * weight).sum() / weight.sum()


class Answers:
    """Makes the answers of batches.

    Args:
        vocab: ids of the tokens.
        generator: draws the noise.
    """

    def __init__(self, vocab: Mapping[str, int], generator: torch.Generator):
        self._eos, self._mask = vocab[EOS], vocab[MASK]
        self._symbols = torch.tensor([vocab[symbol] for symbol in SYMBOLS])
        self._generator = generator

    def clean(self, batch: Batch) -> Answer:
        """Answers to predict autoregressively: every position up to the first EOS."""
        ids = batch.answer
        length = ids.shape[1]
        wanted = torch.arange(length) <= ids.ne(self._eos).sum(1, keepdim=True)
        weight = torch.ones(ids.shape)
        weight[:, 0] = FIRST_WEIGHT
        return Answer(ids, ids, wanted, weight, causal(length))

    def with_opened_blocks(self, batch: Batch) -> Answer:
        """Answers to predict autoregressively, followed by two masked blocks: the first one and a random one.

        A block sees the prompt, the answer before it, and itself, as decoding opens it. Some of its first positions are
        filled. The two blocks add few positions, so a batch can still have many problems, and the model learns to read
        them while later positions are masked.
        """
        clean = self.clean(batch)
        length, block = batch.answer.shape[1], OPENED_BLOCK
        num_blocks = (batch.answer.ne(self._eos).sum(1) // block) + 1  # [n], the first EOS included
        later = int(torch.randint(int(num_blocks.median()), (), generator=self._generator))
        starts = torch.tensor([0, later * block])
        offsets = (starts[:, None] + torch.arange(block)).flatten()  # [2 * block]
        truth = F.pad(batch.answer, (0, block * (later + 1)), value=self._eos)[:, offsets]
        num_filled = (block * torch.rand(len(truth), 2, 1, generator=self._generator) ** 2).long()
        masked = (torch.arange(block) >= num_filled).flatten(1)
        wanted = masked & (offsets % block > 0) & (offsets < block * num_blocks[:, None])
        sees_answer = torch.arange(length) < starts.repeat_interleave(block)[:, None]
        sees_block = torch.block_diag(torch.ones(block, block), torch.ones(block, block)).bool()
        sees_opened = torch.cat([sees_answer, sees_block], 1)
        return Answer(
            ids=torch.cat([clean.ids, torch.where(masked, self._mask, truth)], 1),
            truth=torch.cat([clean.truth, truth], 1),
            wanted=torch.cat([clean.wanted, wanted], 1),
            weight=torch.cat([clean.weight, torch.ones(truth.shape)], 1),
            mask=torch.cat([F.pad(clean.mask, (0, 2 * block)), sees_opened]),
            offsets=torch.cat([torch.arange(length), offsets]),
        )

    def noisy(self, batch: Batch, *, is_full: bool = False) -> Answer:
        """Answers of masked diffusion: block-causal, or with full attention and a random number of blocks."""
        truth = batch.answer
        masked, weight = noise(truth, batch.block, self._eos, self._generator)
        weight[:, 0] *= FIRST_WEIGHT
        ids = torch.where(masked, self._mask, truth)
        length = truth.shape[1]
        if not is_full:
            return Answer(ids, truth, masked, weight, block_causal(length, batch.block))
        end = batch.block * (1 + int(torch.randint(length // batch.block, (), generator=self._generator)))
        mask = torch.ones(end, end, dtype=torch.bool)
        return Answer(ids[:, :end], truth[:, :end], masked[:, :end], weight[:, :end], mask)

    def solved(self, batch: Batch, answers: list[Answer], losses: torch.Tensor) -> list[bool]:
        """Whether each digit and sign of a problem's answer was predicted, autoregressively; for each problem.

        Args:
            batch: the problems.
            answers: the first one begins with the answer to predict autoregressively.
            losses: cross entropy of each wanted position of all answers [m].
        """
        wanted = torch.cat([answer.wanted for answer in answers], 1)
        is_missed = torch.zeros_like(wanted)
        is_missed[wanted] = torch.exp(-losses) < 0.5
        is_wrong = is_missed[:, : batch.answer.shape[1]] & torch.isin(batch.answer, self._symbols)
        return [not any_wrong for any_wrong in is_wrong.any(1).tolist()]

    def filled(self, answers: list[Answer], losses: torch.Tensor) -> list[Answer]:
        """The answers as a step of decoding leaves them: filled where the model is confident, and right.

        Random masks leave easy and hard positions alike. In decoding the easy ones are filled first, and a position
        that the model is sure of, and wrong, spoils the answer.

        Args:
            answers: what the model saw.
            losses: cross entropy of each wanted position of all answers [m].
        """
        threshold = LOWEST_FILLED + (HIGHEST_FILLED - LOWEST_FILLED) * torch.rand((), generator=self._generator)
        wanted = torch.cat([answer.wanted for answer in answers], 1)
        is_filled = torch.zeros_like(wanted)
        is_filled[wanted] = torch.exp(-losses) > threshold
        return [
            replace(answer, ids=torch.where(now, answer.truth, answer.ids), wanted=answer.wanted & ~now)
            for answer, now in zip(answers, is_filled.chunk(len(answers), 1), strict=True)
        ]
