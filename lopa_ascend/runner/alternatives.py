"""Records the most probable tokens of positions as they are filled, for requests that ask for ``top_logprobs``.

The lists belong to the forward pass that predicted the filled token. A lookahead branch that wins brings a token which
the pass before predicted, so the lists of lookahead positions are recorded as well when their branches begin.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lopa_ascend.model.base import Model
from lopa_ascend.parallel.collectives import Group
from lopa_ascend.parallel.placement import Placement
from lopa_ascend.runner.scoring import Job
from lopa_ascend.score.most_probable import most_probable
from lopa_ascend.sequence import Sequence
from lopa_ascend.types import SequencePlan, StepRecord


def note_alternatives(
    sequence: Sequence,
    plan: SequencePlan,
    record: StepRecord,
    job: Job | None,
    placement: Placement,
    model: Model,
    bp: Group,
) -> None:
    """Records the lists of one forward pass in ``sequence.alternatives``, on every rank.

    Args:
        plan: what was computed.
        record: what the pass did; the sequence's next branches have begun.
        job: what this rank's group predicted, branch by branch.
    """
    winner = plan.rows[record.winner]
    lookaheads = {branch.lookahead.position for branch in sequence.strategy.branches if branch.lookahead is not None}
    wanted = sorted({fill.position for fill in record.fills} | lookaheads)
    if not wanted:
        return
    count = sequence.request.params.top_logprobs
    group, _ = placement.home(record.winner)
    message = torch.zeros(len(wanted), 2 * count, device=model.head.device)
    if bp.rank == group:
        assert job is not None
        num_before = sum(len(plan.rows[branch].masked) for branch in range(group, record.winner, placement.size))
        index = num_before + np.searchsorted(winner.masked, wanted)
        message = _lists(job, index, count, model)
    message = bp.broadcast(message, group, "top_logprobs")
    ids, probs = message.cpu().split(count, dim=1)
    for position, tokens, values in zip(wanted, ids.long().tolist(), probs.tolist(), strict=True):
        pairs = zip(tokens, values, strict=True)
        sequence.alternatives[position] = tuple((token, prob) for token, prob in pairs if prob > 0)


def _lists(job: Job, index: NDArray[np.int64], count: int, model: Model) -> Tensor:
    """Token ids, which float32 holds exactly up to 2^24, and probabilities, float32 [n, 2 * count].

    Args:
        index: of the hidden states in ``job``.
    """
    logits = model.logits(job.hidden[torch.from_numpy(index).to(job.hidden.device)])
    if job.adjustment is not None:
        logits = job.adjustment.apply(logits, model.first_token_id)
    found = most_probable(logits, job.scoring, count, model.first_token_id, model.tp)
    return torch.cat([found.ids.float(), found.probs], -1)
