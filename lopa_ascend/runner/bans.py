"""The tokens that ``bad_words`` ban from the rows of one sequence's forward pass."""

from __future__ import annotations

import numpy as np
import torch

from lopa_ascend.core import Sequence
from lopa_ascend.parallel.placement import Share
from lopa_ascend.score.shards import Bans
from lopa_ascend.types import RowPlan


def bans_for(sequence: Sequence, share: Share, device: torch.device) -> Bans | None:
    """What may not be chosen at the positions that a sequence predicts; None if nothing is banned there."""
    if sequence.bad_words is None or not len(share.positions):
        return None
    prompt_length = len(sequence.request.prompt)
    places = (share.positions - prompt_length).tolist()
    first = min(places)
    banned_by_row = [
        sequence.bad_words.banned_tokens(_answer(sequence, row, prompt_length), first) for row in share.rows
    ]
    banned = [banned_by_row[row][place - first] for place, row in zip(places, share.predicted_rows, strict=True)]
    indices = {ids: index for index, ids in enumerate(dict.fromkeys(filter(None, banned)))}
    lists = tuple(torch.tensor(ids, device=device) for ids in indices)
    return Bans(lists, np.array([indices.get(ids, -1) for ids in banned]))


def _answer(sequence: Sequence, row: RowPlan, prompt_length: int) -> list[int]:
    """The answer of one branch. Positions that are predicted count as masked, although with ``editing_threshold`` they
    may have tokens: these may change too."""
    tokens, start = list(row.tokens), row.start - prompt_length
    for position in row.masked:
        tokens[position - row.start] = sequence.scoring.mask
    if start <= 0:
        return tokens[-start:]
    return [*sequence.strategy.anchor.tokens[:start], *tokens]
