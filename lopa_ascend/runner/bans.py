"""The tokens that ``bad_words`` ban from the rows of one sequence's forward pass."""

from __future__ import annotations

import torch

from lopa_ascend.decode.bad_words import Word, banned_tokens
from lopa_ascend.runner.layout import Part
from lopa_ascend.score.shards import Bans
from lopa_ascend.sequence import Sequence


def bans_for(sequence: Sequence, part: Part, device: torch.device) -> Bans | None:
    """What may not be chosen at the positions that a sequence predicts; None if its request bans nothing."""
    words = _words(sequence)
    if not words:
        return None
    first = len(sequence.request.prompt)
    answers = [_answer(sequence, row.start - first, row.tokens) for row in part.share.rows]
    rows, ids = [], []
    predictions = part.predictions
    for index, (position, row) in enumerate(zip(predictions.positions, predictions.rows, strict=True)):
        banned = banned_tokens(words, answers[row], int(position) - first, sequence.scoring.mask)
        rows += [index] * len(banned)
        ids += banned
    as_tensor = [torch.tensor(column, dtype=torch.long, device=device) for column in (rows, ids)]
    return Bans(*as_tensor)


def _words(sequence: Sequence) -> list[Word]:
    words = sequence.request.params.bad_words
    assert not any(isinstance(word, str) for word in words), "the engine knows no text"
    return [word for word in words if not isinstance(word, str)]


def _answer(sequence: Sequence, start: int, tokens: tuple[int, ...]) -> list[int]:
    """The answer of one branch, masks included.

    Args:
        start: index in the answer of the first of ``tokens``; negative if that belongs to the prompt.
        tokens: of the branch's row.
    """
    if start <= 0:
        return list(tokens[-start:])
    return [*sequence.strategy.winner.tokens[:start], *tokens]
