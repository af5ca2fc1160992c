"""The tokens that ``bad_words`` and grammars ban from the rows of one sequence's forward pass."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from lopa_ascend.core import Sequence
from lopa_ascend.parallel.placement import Share
from lopa_ascend.score.shards import Bans
from lopa_ascend.types import GrammarError, RowPlan


def bans_for(sequence: Sequence, share: Share, device: torch.device) -> Bans | None:
    """What may not be chosen at the positions that a sequence predicts; None if nothing is banned there."""
    if sequence.strategy.constraint is not None:
        return _grammar_bans(sequence, share, device)
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


def _grammar_bans(sequence: Sequence, share: Share, device: torch.device) -> Bans | None:
    """What the grammar does not allow at the first masked position of each branch, while the device computes. A
    sequence that finds no way on fails, on every rank alike: so all look at all branches."""
    try:
        allowed = [sequence.strategy.allowed(row) if row.masked else 0 for row in share.plan.rows]
    except GrammarError as error:
        sequence.error = str(error)
        return None
    indices = {tokens: index for index, tokens in enumerate(dict.fromkeys(allowed))}
    list_of_row = np.full(len(share.positions), -1)
    for number, row in enumerate(share.rows):
        if row.masked:
            # The hidden state of a position that several rows share is listed with the first of them. They have the
            # same tokens before it.
            is_first = (share.positions == row.masked[0]) & (share.predicted_rows == number)
            list_of_row[is_first] = indices[allowed[share.branches[number]]]
    lists = tuple(_banned(tokens, sequence.scoring.num_token_ids, device) for tokens in indices)
    return Bans(lists, list_of_row, True)


@lru_cache(maxsize=32)  # 600 KB each; inside a string, say, most requests allow the same
def _banned(allowed: int, num_token_ids: int, device: torch.device) -> Tensor:
    """The complement of a set of tokens, float32 [num_token_ids]: 1 for its members."""
    packed = np.frombuffer(allowed.to_bytes(-(-num_token_ids // 8), "little"), dtype=np.uint8)
    bits = np.unpackbits(packed, count=num_token_ids, bitorder="little")
    return torch.from_numpy((bits == 0).astype(np.float32)).to(device)


def _answer(sequence: Sequence, row: RowPlan, prompt_length: int) -> list[int]:
    """The answer of one branch. Positions that are predicted count as masked, although with ``editing_threshold`` they
    may have tokens: these may change too."""
    tokens, start = list(row.tokens), row.start - prompt_length
    for index in (position - row.start for position in row.masked):
        if index < len(tokens):  # Fast-dLLM v2 predicts a block's first position before it computes it
            tokens[index] = sequence.scoring.mask
    if start <= 0:
        return tokens[-start:]
    return [*sequence.strategy.anchor.tokens[:start], *tokens]
