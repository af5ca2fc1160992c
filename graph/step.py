"""One decode step as one function of tensors: forward pass, scores, winners, fills, and the branches of the next step.

It has fixed shapes, reads nothing on the host, and changes three things in place: keys and values, the packed states of
the sequences (``policy.py``), and the hidden states that predict the first position of their next windows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lopa_ascend.backend import Entries
from lopa_ascend.graph import policy
from lopa_ascend.graph.buckets import Bucket
from lopa_ascend.graph.inputs import Inputs, ModelInputs
from lopa_ascend.graph.policy import Launch, Params, Predicted, Tables
from lopa_ascend.graph.score import GreedyScore
from lopa_ascend.model.base import ForwardInputs
from lopa_ascend.model.dream import Dream
from lopa_ascend.parallel.collectives import Group
from lopa_ascend.types import RowResult, Traffic

Caches = tuple[Sequence[Tensor], Sequence[Tensor]]
"""Keys and values of every layer [N, 128, K, D]."""


@dataclass(frozen=True)
class Storage:
    """What outlives a step: ``states`` [N, X], packed, and ``hidden`` [N * (1 + M), hidden]."""

    states: Tensor
    hidden: Tensor


class DecodeStep:
    """The step of one bucket on one rank. ``bp`` connects the ranks that have other branches."""

    def __init__(self, bucket: Bucket, model: Dream, score: GreedyScore, bp: Group):
        self.bucket, self.model, self.score, self.bp = bucket, model, score, bp
        S, R, E = bucket.sequences, bucket.slots, bucket.entries
        self._lengths = (bucket.cells // E,) * (S * R * E)
        self._sequences = tuple(entry // (R * E) for entry in range(S * R * E))
        self._prefixes = (0,) * S

    @staticmethod
    def tensors(inputs: Inputs, tables: Tables, storage: Storage, caches: Caches) -> list[Tensor]:
        """What the step is called with, in its order. A compiled step holds for the shapes of all of them."""
        return [
            *inputs.launch, *inputs.params, *inputs.model, *tables, storage.states, storage.hidden,
            *caches[0], *caches[1],
        ]  # fmt: skip

    def __call__(self, tensors: Sequence[Tensor], kv_lengths: Sequence[int]) -> Tensor:
        """int32 [S * (1 + C + n * B * C)]: the winners (s * B + branch), their windows, and of all branches' cells the
        predicted token ids and the bits of their probabilities and, n is 3 then, of confidences that are not the same.
        ``kv_lengths`` of the entries [S * R * E]."""
        S, C, R = self.bucket.sequences, self.bucket.cells, self.bucket.slots
        launch = Launch(*tensors[:6])
        params = Params(self.model.config.mask_token_id, *tensors[6:12])
        given = ModelInputs(*tensors[12:18])
        tables = Tables(*tensors[18:27])
        states, kept, *caches = tensors[27:]
        layers = len(caches) // 2

        rows = policy.lay_out(params, policy.unpack(states, launch, tables), launch, tables)
        tokens, slots = policy.writes(rows, launch, tables, self.bp.size, self.bp.rank)
        entries = Entries(self._lengths, tuple(kv_lengths), given.page_tables, self._sequences, self._prefixes)
        forward = ForwardInputs(tokens.reshape(-1), given.positions, slots.view(-1), None, entries, None)
        hidden = self.model.forward(forward, caches[:layers], caches[layers:])
        seen = torch.cat([kept.index_select(0, given.last), hidden])
        scored = self.score(self.model.logits(seen.index_select(0, given.source)))
        predicted = self._gather([x.view(S, R, C) for x in scored[: self.score.told]])

        state, winner = policy.advance(params, launch, rows, predicted, tables)
        ops = self.model.ops
        ops.put_rows(states, launch.seats, policy.pack(state, params, tables))
        keep = given.keep
        if self.bucket.full:  # values differ by branch: the winner's
            slots = (winner - tables.row[:, 0])[:, None] * C
            keep = (keep.view(S, -1) + slots * tables.in_block).view(-1)
        ops.put_rows(kept, given.kept, seen.index_select(0, keep))
        told = [winner.to(torch.int32), state.tokens, *_bits(predicted[: self.score.told])]
        return torch.cat([part.view(-1) for part in told])

    def traffic(self) -> list[tuple[Group, Traffic]]:
        """What a launch sends, by the groups that it goes to."""
        tokens = self.bucket.tokens
        sent = [(self.model.tp, traffic) for traffic in (*self.model.traffic(tokens), *self.score.traffic(tokens))]
        if self.bp.size > 1:
            sent.append((self.bp, Traffic("branches", 1, 4 * self.score.told * tokens)))
        return sent

    def _gather(self, scored: Sequence[Tensor]) -> Predicted:
        """Ids, probabilities and, if they are others, confidences [S, R, C] of this group to [S, B, C] of all: branch i
        has slot i div size of group i mod size."""
        ids, *others = scored
        if self.bp.size > 1:
            message = torch.stack(_bits(scored))
            count, S, R, C = message.shape
            gathered = self.bp.all_gather(message, "branches").permute(1, 2, 3, 0, 4).contiguous()
            ids, *bits = gathered.view(count, S, R * self.bp.size, C).unbind()
            others = [x.view(torch.float32) for x in bits]
        return Predicted(ids, others[0], others[-1])


def _bits(scored: Sequence[Tensor]) -> list[Tensor]:
    """As int32."""
    ids, *others = scored
    return [ids, *(x.view(torch.int32) for x in others)]


class Told(NamedTuple):
    """What a step has told, on the host: ``winners`` [S], their windows' ``tokens`` int32 [S, C] afterwards, and what
    was predicted, ``ids`` int32, ``probs`` and ``confidences`` float32 [S, B, C]."""

    winners: list[int]
    tokens: NDArray[np.int32]
    ids: NDArray[np.int32]
    probs: NDArray[np.float32]
    confidences: NDArray[np.float32]

    def result(self, sequence: int, branch: int, cells: NDArray[np.int64]) -> RowResult:
        columns = (x[sequence, branch, cells].tolist() for x in (self.ids, self.probs, self.confidences))
        return RowResult(*map(tuple, columns))


def read(told: Tensor, bucket: Bucket) -> Told:
    S, B, C = bucket.sequences, bucket.branches, bucket.cells
    winners, tokens, predicted = np.split(told.numpy(), np.cumsum([S, S * C]))
    ids, *bits = predicted.reshape(-1, S, B, C)
    branches = (winners - np.arange(S) * B).tolist()
    return Told(branches, tokens.reshape(S, C), ids, bits[0].view(np.float32), bits[-1].view(np.float32))
