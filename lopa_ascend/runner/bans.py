"""What may not be chosen at the positions of a sequence's forward pass: what its grammar does not allow, and what its
filters ban unless the grammar allows nothing else."""

from __future__ import annotations

from functools import lru_cache, partial
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from lopa_ascend.core import Sequence
from lopa_ascend.runner.batch import Part
from lopa_ascend.score.shards import Bans, PerRow
from lopa_ascend.types import RowPlan

Banned = tuple[frozenset[int], ...]
"""What each filter bans at one position. Filters that ban nothing there are left out."""


def bans_for(sequence: Sequence, part: Part, device: torch.device) -> Bans | None:
    """What may not be chosen at the positions that a sequence predicts; None if nothing is banned there. Raises
    GrammarError if the grammar has no way on in a branch of any group, so that all ranks find the same."""
    if not sequence.strategy.grammar.binds and not sequence.filters:
        return None
    num_token_ids, sets, lists = sequence.scoring.num_token_ids, list[int](), list[Banned]()
    keeping, excluding = (_banned(sequence, part, keeps_share=keeps_share) for keeps_share in (True, False))
    for allowed, kept, excluded in zip(_allowed(sequence, part), keeping, excluding, strict=True):
        if allowed and not _without(allowed, kept + excluded):
            kept, excluded = (), ()
        lists.append(kept)
        sets.append(_without(allowed or (1 << num_token_ids) - 1, excluded) if allowed or excluded else 0)
    if not (any(sets) or any(lists)):
        return None
    make_set = partial(_complement, num_token_ids=num_token_ids, device=device)
    return Bans(PerRow.of(lists, partial(_token_ids, device=device)), PerRow.of(sets, make_set))


def _allowed(sequence: Sequence, part: Part) -> list[int]:
    """By position, what the grammar allows; 0: all tokens. It speaks of each branch's first masked position, and of
    those behind drafts that fit."""
    strategy, share = sequence.strategy, part.share
    if not strategy.grammar.binds:
        return [0] * len(part.positions)
    allowed = [strategy.grammar.allowed_along(strategy.anchor, row) if row.masked else [] for row in share.plan.rows]
    # The hidden state of a position that several rows share is listed with the first of them. They have the same tokens
    # before it.
    rows = enumerate(zip(share.rows, share.branches, strict=True))
    allowed_at = {
        (number, position): tokens
        for number, (row, branch) in rows
        for position, tokens in zip(row.masked, allowed[branch], strict=False)
    }
    places = zip(part.predicted_rows.tolist(), part.positions.tolist(), strict=True)
    return [allowed_at.get(place, 0) for place in places]


def _banned(sequence: Sequence, part: Part, *, keeps_share: bool) -> list[Banned]:
    filters = [filter_ for filter_ in sequence.filters if filter_.keeps_share is keeps_share]
    if not filters or not len(part.positions):
        return [()] * len(part.positions)
    prompt_length = len(sequence.request.prompt)
    places = (part.positions - prompt_length).tolist()
    first, banned_by_row = min(places), []
    for row in part.share.rows:
        answer = _answer(sequence, row, prompt_length)
        by_filter = [filter_.banned(answer, first) for filter_ in filters]
        banned_by_row.append([tuple(filter(None, banned)) for banned in zip(*by_filter, strict=True)])
    return [banned_by_row[row][place - first] for place, row in zip(places, part.predicted_rows, strict=True)]


def _without(tokens: int, banned: Banned) -> int:
    for some in banned:
        tokens &= ~_as_set(some)
    return tokens


@lru_cache(maxsize=32)
def _as_set(tokens: frozenset[int]) -> int:
    packed = bytearray(max(tokens) // 8 + 1)
    for token in tokens:
        packed[token // 8] |= 1 << token % 8
    return int.from_bytes(packed, "little")


@lru_cache(maxsize=32)
def _token_ids(banned: Banned, device: torch.device) -> Tensor:
    """Int64 [n]."""
    return torch.tensor(list(chain.from_iterable(banned)), device=device)


@lru_cache(maxsize=32)  # 600 KB each; inside a string, say, most requests allow the same
def _complement(allowed: int, num_token_ids: int, device: torch.device) -> Tensor:
    """The complement of a set of tokens, float32 [num_token_ids]: 1 for its members."""
    packed = np.frombuffer(allowed.to_bytes(-(-num_token_ids // 8), "little"), dtype=np.uint8)
    bits = np.unpackbits(packed, count=num_token_ids, bitorder="little")
    return torch.from_numpy((bits == 0).astype(np.float32)).to(device)


def _answer(sequence: Sequence, row: RowPlan, prompt_length: int) -> list[int]:
    """Predicted positions count as masked, even if they have tokens (``editing_threshold``), which may change.
    Positions before ``causal_end`` keep theirs, which those behind see."""
    tokens, start = list(row.tokens), row.start - prompt_length
    for index in (position - row.start for position in row.masked if position >= row.causal_end):
        tokens += [sequence.scoring.mask] * (index + 1 - len(tokens))  # Fast-dLLM v2 predicts before it computes
        tokens[index] = sequence.scoring.mask
    if start <= 0:
        return tokens[-start:]
    return [*sequence.strategy.anchor.tokens[:start], *tokens]
