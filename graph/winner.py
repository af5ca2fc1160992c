"""Which branch of a step wins, as tensor functions of fixed shape; see ``policy.py``, also for how they are written.

``decode/lopa.py`` and ``decode/verified.py`` are the definition. The winner is, with ``branch_acceptance`` "published",
the row with the best score; with "verified" that with the most progress, and among equals the best score; with "exact"
the branch that is what D2F would compute next, or else the anchor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lopa_ascend.graph.tensors import NO_CONFIDENCE, Constants, RequestParams

SCORE_UNIT = 2.0**-16
"""Branch scores are sums of confidences rounded to multiples of this, half to even (``decode/branch_scores.py``)."""
ROUNDING_BASE = -NO_CONFIDENCE
"""Added to a confidence to round it to a multiple of ``SCORE_UNIT``.

float32 numbers from 128 to 256 are multiples of ``SCORE_UNIT``. So for a confidence from -64 to 64, the bits of the sum
are an integer: the bits of ``ROUNDING_BASE`` plus the confidence in units of ``SCORE_UNIT``. The means of these
integers are in the same order as the means of the confidences. ``NO_CONFIDENCE`` plus ``ROUNDING_BASE`` is 0.0, whose
bits are 0: cells without a mask add nothing."""


class Rows(NamedTuple):
    """The branches of a step."""

    tokens: Tensor
    """Token ids, int32 [S, B, C]."""
    masked: Tensor
    """Cells to predict, bool [S, B, C]."""
    num_opened_blocks: Tensor
    """int32 [S, B]."""
    masks: Tensor
    """Masks in each block, float32 [S, B, W]."""
    own: Tensor
    """The cell that a lookahead branch fills in addition to the anchor, bool [S, B, C]."""
    cells_before: Tensor
    """See ``State``."""


class Predicted(NamedTuple):
    """What the model predicts for every cell of every branch; only the masked cells count."""

    tokens: Tensor
    """Token ids, int32 [S, B, C]."""
    max_probs: Tensor
    """float32 [S, B, C]."""
    confidences: Tensor
    """float32 [S, B, C]; NaN where a logit was not finite."""


class Chosen(NamedTuple):
    """One branch of each sequence, and what it fills."""

    tokens: Tensor
    """Token ids, int32 [S, C]."""
    guesses: Tensor
    """Token ids that the model predicts, int32 [S, C]."""
    row: Tensor
    """Number of the branch: sequence * B + branch, int32 [S, 1]."""
    num_opened_blocks: Tensor
    """int32 [S, 1]."""
    rank: Tensor
    """Rank of each cell, float32 [S, C]: below C without a mask, from 2 C on where tau_conf accepts the prediction,
    otherwise from C to 2 C. Of these the more confident cell has the higher rank, the earlier one among equals."""
    filled: Tensor
    """Cells that the fill rule fills, bool [S, C]."""
    taken: Tensor
    """All columns of the branch, int32 [S, V], in the order that ``policy._choose`` gives."""


def losers(
    rows: Rows,
    predicted: Predicted,
    confidences: Tensor,
    params: RequestParams,
    constants: Constants,
    choose: Callable[[Tensor], Chosen],
    branch_acceptance: str,
) -> Tensor:
    """All rows but the winners, bool [S, B].

    Args:
        confidences: [S, B, C], ``Constants.no_confidence`` in cells without a mask.
        choose: takes the branches that are not left out, one of each sequence, and applies the fill rule to them.
        branch_acceptance: see ``DecodingParams``.
    """
    if branch_acceptance == "published":
        return _scores_lower(rows.masked, confidences, constants).any(-1)
    is_lookahead = rows.own.any(-1)
    is_anchor = (rows.cells_before >= 0) & ~is_lookahead
    anchor = choose(~is_anchor)
    is_same = rows.tokens == anchor.guesses[:, None]
    is_confirmed = (rows.own & is_same & anchor.filled[:, None]).any(-1)
    if branch_acceptance == "exact":
        can_win = is_anchor | (is_confirmed & _is_next(rows, anchor))
        progress = torch.where(can_win, is_lookahead.float(), constants.no_rank)
        return (progress[:, None] > progress[:, :, None]).any(-1)
    num_filled = _num_filled(rows, predicted, params, constants) + is_lookahead
    progress = torch.where(is_anchor | is_confirmed, num_filled, constants.no_rank)
    mine, others = progress[:, :, None], progress[:, None]
    scores_lower = _scores_lower(rows.masked, confidences, constants)
    return ((others > mine) | ((others == mine) & scores_lower)).any(-1)


def _scores_lower(masked: Tensor, confidences: Tensor, constants: Constants) -> Tensor:
    """Whether a row loses by its score to another, which has a larger mean confidence over its masks, or an equal one
    and comes first; bool [S, row, other row].

    Means are compared as fractions of integers; see ``ROUNDING_BASE``. A row without masks has the sum 0 over 0 cells,
    so it beats all later rows and no earlier one. It can only be branch 0, which should win with its score of 1, or a
    padding row at the end, which should lose. Of two rows exactly one loses to the other, so at most one row loses
    to none, whatever integer a NaN becomes.
    """
    sums = (confidences + ROUNDING_BASE).view(torch.int32).sum(-1, dtype=torch.int64)
    counts = masked.sum(-1)
    products = sums[:, None, :] * counts[:, :, None]  # the other row's sum, over the row's cells
    return products + constants.earlier > products.transpose(1, 2)


def _num_filled(rows: Rows, predicted: Predicted, params: RequestParams, constants: Constants) -> Tensor:
    """How many positions the fill rule fills in each row, float32 [S, B]: those that tau_conf accepts, and one in each
    fully activated block that has masks but none such."""
    S, B, W = rows.masks.shape
    is_accepted = rows.masked & (predicted.max_probs > params.tau_conf[:, None, None])
    num_accepted = is_accepted.view(S, B, W, -1).sum(-1, dtype=torch.float32)
    masks_before = torch.cat([constants.row[..., 1:].view(torch.float32), rows.masks[..., :-1]], 2)
    is_activated = masks_before <= params.activation_masks[:, None, None]
    falls_back = rows.masked.view(S, B, W, -1).any(-1) & is_activated
    return torch.maximum(num_accepted, falls_back.float()).sum(-1)


def _is_next(rows: Rows, anchor: Chosen) -> Tensor:
    """Whether a branch that the anchor confirms is what D2F would compute in its next pass, bool [S, B]; see
    ``ExactLopa``.

    D2F's next pass computes the anchor with all that it fills now, so this must be the branch's own cell alone. If the
    anchor opened a block in this pass, so must the branch. D2F would open no other in its next pass: that block would
    have no filled position, and ``tau_add`` is above 0 (``support.unsupported``). If the anchor opened none, D2F's next
    pass would open one where the branch did in this pass.

    The window begins with the first block that was not final before the last step's fills. So there is no commit in
    this pass, nor in D2F's next one, as long as the branch has masks in that block.
    """
    is_only_fill = anchor.filled.sum(-1, keepdim=True, dtype=torch.float32) <= 1.0
    commits_nothing = rows.masks[:, :, 0] > 0
    has_blocks = rows.num_opened_blocks >= anchor.num_opened_blocks
    return is_only_fill & commits_nothing & has_blocks
