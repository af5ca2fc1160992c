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
    if sequence.strategy.grammar.binds:
        return _grammar_bans(sequence, share, device)
    if sequence.bad_words is None or not len(share.positions):
        return None
    banned = _words_bans(sequence, share)
    indices = {ids: index for index, ids in enumerate(dict.fromkeys(filter(None, banned)))}
    lists = tuple(torch.tensor(ids, device=device) for ids in indices)
    return Bans(lists, np.array([indices.get(ids, -1) for ids in banned]))


def _words_bans(sequence: Sequence, share: Share) -> list[tuple[int, ...]]:
    """What ``bad_words`` ban at each position."""
    if sequence.bad_words is None or not len(share.positions):
        return [()] * len(share.positions)
    prompt_length = len(sequence.request.prompt)
    places = (share.positions - prompt_length).tolist()
    first = min(places)
    banned_by_row = [
        sequence.bad_words.banned_tokens(_answer(sequence, row, prompt_length), first) for row in share.rows
    ]
    return [banned_by_row[row][place - first] for place, row in zip(places, share.predicted_rows, strict=True)]


def _grammar_bans(sequence: Sequence, share: Share, device: torch.device) -> Bans | None:
    """What the grammar does not allow at the first masked position of each branch, while the device computes, and what
    ``bad_words`` ban unless the grammar allows nothing else. A sequence that finds no way on fails, on every rank
    alike: so all look at all branches."""
    strategy = sequence.strategy
    try:
        allowed = [strategy.grammar.allowed(strategy.anchor, row) if row.masked else 0 for row in share.plan.rows]
    except GrammarError as error:
        sequence.error = str(error)
        return None
    kinds = [(0, banned) for banned in _words_bans(sequence, share)]
    """By position: what the grammar allows there, 0 for all tokens, and the banned words."""
    for number, row in enumerate(share.rows):
        if row.masked:
            # The hidden state of a position that several rows share is listed with the first of them. They have the
            # same tokens before it.
            is_first = (share.positions == row.masked[0]) & (share.predicted_rows == number)
            for place in np.flatnonzero(is_first):
                kinds[place] = (allowed[share.branches[number]], kinds[place][1])
    indices = {kind: index for index, kind in enumerate(dict.fromkeys(filter(any, kinds)))}
    num_token_ids = sequence.scoring.num_token_ids
    lists = []
    for tokens, banned in indices:
        tokens = tokens or (1 << num_token_ids) - 1
        left = tokens & ~sum(1 << token for token in set(banned))
        lists.append(_banned(left or tokens, num_token_ids, device))
    return Bans(tuple(lists), np.array([indices.get(kind, -1) for kind in kinds], dtype=np.int64), True)


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
        tokens += [sequence.scoring.mask] * (index + 1 - len(tokens))  # Fast-dLLM v2 predicts before it computes
        tokens[index] = sequence.scoring.mask
    if start <= 0:
        return tokens[-start:]
    return [*sequence.strategy.anchor.tokens[:start], *tokens]
