"""The log probabilities of given continuations of a prompt, in the passes that their request makes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lopa_ascend.core import Sequence
from lopa_ascend.model.base import Model
from lopa_ascend.parallel.collectives import Group
from lopa_ascend.runner.alternatives import ROWS_AT_A_TIME
from lopa_ascend.runner.batch import Part
from lopa_ascend.runner.scoring import Job


@dataclass(frozen=True)
class ContinuationScorer:
    model: Model
    bp: Group
    """The ranks that hold the same part of the model."""

    def score(self, sequence: Sequence, part: Part, job: Job) -> tuple[tuple[float, ...], ...]:
        """By continuation, the log probabilities of the tokens known after this pass, in nats, on every rank: with all
        places masked, or in a causal pass behind the tokens before."""
        [row], first = part.share.plan.rows, len(sequence.request.prompt)
        texts = sequence.request.continuations
        known = [list(values) for values in sequence.continuation_logprobs or [()] * len(texts)]
        read = row.tokens[max(0, first - row.start) :] if row.is_causal else ()
        places = [position - first for position in row.masked]
        asked = [
            (index, text[place], values)
            for text, values in zip(texts, known, strict=True)
            for index, place in enumerate(places)
            if len(values) <= place < len(text) and text[: min(place, len(read))] == read[:place]
        ]
        if asked:
            found = torch.zeros(len(asked), device=self.model.head.device)
            if self.bp.rank == 0:  # the row's home
                columns = torch.tensor([(index, token) for index, token, _ in asked], device=found.device).T
                found = self._logprobs(job, torch.from_numpy(part.order), *columns)
            found = self.bp.broadcast(found, 0, "continuations")
            scores = self.model.ops.read_later(found, self.bp.while_waiting)()
            for (*_, values), value in zip(asked, scores.tolist(), strict=True):
                values.append(value)
        return tuple(map(tuple, known))

    def _logprobs(self, job: Job, order: Tensor, places: Tensor, tokens: Tensor) -> Tensor:
        """float32 [n] for the pairs of ``places``, numbered as in the row, and token ids, int64 [n]. ``order``: by
        place, the index of its hidden state in ``job``."""
        columns = tokens - self.model.first_token_id
        logits = torch.full((len(places),), -torch.inf, device=places.device)
        totals = torch.empty(len(places), device=places.device)
        for first in range(0, int(places.max()) + 1, ROWS_AT_A_TIME):
            rows = order[first : first + ROWS_AT_A_TIME].to(job.hidden.device)
            x = self.model.logits(job.hidden[rows]).float()
            here = ((places >= first) & (places < first + len(rows))).nonzero()[:, 0]
            at, column = places[here] - first, columns[here]
            totals[here] = x.logsumexp(-1)[at]
            is_own = (column >= 0) & (column < x.shape[1])  # the others are in other shards of the vocabulary
            logits[here[is_own]] = x[at[is_own], column[is_own]]
        gathered = self.model.tp.all_gather(torch.stack([logits, totals]), "vocabulary")  # [shards, 2, n]
        return gathered[:, 0].amax(0) - gathered[:, 1].logsumexp(0)
