"""Log-likelihoods of texts under a diffusion model, estimated by Monte-Carlo masking as Dream's evaluation does.

A random share t of the target's tokens is masked, and the cross entropy of those tokens, each divided by t, is summed.
The mean over many draws is an upper bound of the negative log-likelihood. All positions attend to all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lopa_ascend.backend.interface import Entries
from lopa_ascend.config import ParameterError
from lopa_ascend.kv.pages import PAGE_SIZE
from lopa_ascend.model.base import ForwardInputs

if TYPE_CHECKING:
    from lopa_ascend.engine.engine import Engine

EPSILON = 1e-3
"""The smallest share of the target that is masked."""


class MaskedLikelihood:
    """Estimates log-likelihoods with the model of an engine.

    Args:
        engine: it has one rank.
        num_samples: draws for each text.
        batch_size: draws in one forward pass.
        seed: of the draws; the same texts in any order get the same ones.

    Raises:
        ParameterError: the engine has several ranks.
    """

    def __init__(self, engine: Engine, *, num_samples: int, batch_size: int, seed: int = 0) -> None:
        if engine.config.tensor_parallel_size * engine.config.branch_parallel_size > 1:
            raise ParameterError("tensor_parallel_size", "must be 1 for log-likelihoods, and so branch_parallel_size")
        self._model, self._pool = engine.runner.model, engine.runner.pool
        self._mask = engine.model_config.mask_token_id
        self._num_samples, self._batch_size, self._seed = num_samples, min(batch_size, num_samples), seed
        self._caches: list[list[Tensor]] = [[], []]  # keys and values by layer, as in the pool; empty until needed

    @torch.inference_mode()
    def estimate(self, context: Sequence[int], target: Sequence[int]) -> float:
        """The estimated log-likelihood of the target behind the context, in nats.

        As published, the very last position is never masked: there the caller puts an EOS.

        Args:
            context: at least one token id.
            target: at least one token id.
        """
        generator = torch.Generator().manual_seed(self._seed)
        tokens = torch.tensor([*context, *target])
        losses = []
        for _ in range(-(-self._num_samples // self._batch_size)):
            noisy, share = self.draw(tokens, len(context), generator)
            losses.append(float(self.masked_loss(noisy, tokens, share)))
        return -sum(losses) / len(losses)

    def draw(self, tokens: Tensor, num_context: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """A batch of draws: token ids with masks [batch, n], and the share of each that is masked [batch]. The shares
        are spread evenly over (0, 1) from a random one on."""
        batch, n = self._batch_size, len(tokens)
        start = torch.rand(1, generator=generator)
        share = (1 - EPSILON) * ((start + torch.arange(batch) / batch) % 1) + EPSILON
        masked = torch.rand((batch, n), generator=generator) < share[:, None]
        masked[:, :num_context] = False
        masked[:, -1] = False
        return tokens.masked_fill(masked, self._mask), share

    def masked_loss(self, noisy: Tensor, tokens: Tensor, share: Tensor) -> Tensor:
        """The mean over a batch of draws of the sum of cross entropies by share.

        Args:
            noisy: token ids with masks, int64 [batch, n]; the first of each row is no mask.
            tokens: the true token ids, int64 [n].
            share: the masked share of each draw, float32 [batch].
        """
        batch, n = noisy.shape
        rows, columns = (noisy == self._mask).nonzero(as_tuple=True)
        if not len(rows):
            return torch.zeros(())
        shift = self._model.properties.logit_shift
        hidden = self.hidden_states(noisy, rows * n + columns - shift)
        logits = torch.cat([self._model.logits(part).float() for part in hidden.split(1024)])
        logprobs = logits.log_softmax(-1).gather(1, tokens[columns].to(logits.device)[:, None])[:, 0].cpu()
        return -(logprobs / share[rows]).sum() / batch

    def hidden_states(self, noisy: Tensor, wanted: Tensor) -> Tensor:
        """Hidden states [wanted, hidden] of the flat positions ``wanted`` of a batch [batch, n]."""
        batch, n = noisy.shape
        pages = -(-n // PAGE_SIZE)
        self._grow(batch * pages)
        device = self._pool.caches.device
        positions = torch.arange(n).repeat(batch)
        first_slots = torch.arange(batch).repeat_interleave(n) * pages * PAGE_SIZE
        inputs = ForwardInputs(
            tokens=noisy.flatten().to(device),
            positions=positions.to(device),
            slot_mapping=(first_slots + positions).to(device),
            source=None,
            entries=Entries(
                lengths=(n,) * batch,
                kv_lengths=(n,) * batch,
                page_tables=torch.arange(batch * pages, dtype=torch.int32).view(batch, pages).to(device),
                prefix_groups=tuple(range(batch)),
                prefixes=(0,) * batch,
            ).divided(self._model.ops.max_queries),
            rows=wanted.to(device),
        )
        return self._model.forward(inputs, *self._caches)

    def _grow(self, pages: int) -> None:
        """Makes room for keys and values, apart from those of requests."""
        if not self._caches[0] or len(self._caches[0][0]) < pages:
            size = (pages, *self._pool.k[0].shape[1:])
            self._caches = [[half.new_zeros(size) for half in halves] for halves in (self._pool.k, self._pool.v)]
