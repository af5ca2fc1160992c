"""After the forward pass: the winner, its fills, and the next branches (SPEC sections 3 to 6).

``decode/d2f.py``, ``decode/lopa.py`` and ``decode/verified.py`` are the definition.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lopa_ascend.decode.branch_scores import SCALE
from lopa_ascend.graph.policy.rows import Constants, Launch, RequestParams, Rows, State, count_masks, opens_block


class Predicted(NamedTuple):
    """Predictions for every cell of every branch; only the masked cells count."""

    tokens: Tensor
    """int32 [S, B, C]."""
    max_probs: Tensor
    """float32 [S, B, C]."""
    confidences: Tensor
    """float32 [S, B, C]; NaN if a logit was not finite."""


def advance(
    rows: Rows,
    predicted: Predicted,
    launch: Launch,
    params: RequestParams,
    constants: Constants,
    branch_acceptance: str = "published",
) -> tuple[State, Tensor]:
    """The state after the step, and each sequence's winning branch, int64 [S]. ``branch_acceptance``: see
    ``DecodingParams``; each lookahead branch has one token of its own."""
    filled = fills(rows, predicted, params, constants)
    beats = _scores_higher(rows, predicted, constants)
    if branch_acceptance != "published":
        progress = _progress(rows, predicted, filled, launch, params, constants, branch_acceptance)
        mine, others = progress[:, :, None], progress[:, None]
        beats = (mine > others) | ((mine == others) & beats)
    winner = beats.sum(-1, dtype=torch.float32).argmax(-1)  # it beats all others
    tokens, guesses, masked, confidences, is_filled = (
        _of_branch(x, winner) for x in (rows.tokens, predicted.tokens, rows.masked, predicted.confidences, filled)
    )
    after = torch.where(is_filled, guesses, tokens)
    lookahead_cells = _candidates(masked & ~is_filled, confidences, launch, params, constants)
    num_opened_blocks = rows.num_opened_blocks.gather(1, winner[:, None])
    num_opened_blocks = num_opened_blocks + _opens(
        after, guesses, lookahead_cells, num_opened_blocks, launch, params, constants
    )
    return State(after, guesses, num_opened_blocks, lookahead_cells), winner


def _opens(
    tokens: Tensor,
    guesses: Tensor,
    lookahead_cells: Tensor,
    num_opened_blocks: Tensor,
    launch: Launch,
    params: RequestParams,
    constants: Constants,
) -> Tensor:
    """Whether each branch of the next pass opens another block, bool [S, B]. ``tokens`` are the anchor's after its
    fills, int32 [S, C]; ``num_opened_blocks`` the winner's, int32 [S, 1]."""
    own = lookahead_cells[..., None] == launch.cells[:, None]
    branch_tokens = torch.where(own, guesses[:, None], tokens[:, None])
    masks = count_masks(branch_tokens == params.mask[:, None, None], launch.blocks.shape[1])
    return opens_block(branch_tokens, masks, num_opened_blocks, launch, params, constants)


def fills(rows: Rows, predicted: Predicted, params: RequestParams, constants: Constants) -> Tensor:
    """The cells that each branch fills, bool [S, B, C]: those that ``tau_conf`` accepts, and in a fully activated block
    without such a cell the most confident one, the earliest among equals."""
    S, B, W = rows.masks.shape
    accepted = (rows.masked & (predicted.max_probs > params.tau_conf[:, None, None])).view(S, B, W, -1)
    masks_before = torch.cat([constants.no_masks.expand(S, B, 1), rows.masks[..., :-1]], 2)
    is_activated = masks_before <= params.masks_to_activate[:, None, None]
    falls_back = is_activated & ~accepted.any(-1)
    masked = rows.masked.view(S, B, W, -1)
    confidences = torch.where(masked, predicted.confidences.view(S, B, W, -1), constants.no_confidence)
    is_best = masked & (confidences == confidences.max(-1, keepdim=True).values)
    is_first_best = is_best & (is_best.cumsum(-1, dtype=torch.float32) == 1.0)
    return (accepted | (is_first_best & falls_back[..., None])).view(S, B, -1)


def _progress(
    rows: Rows,
    predicted: Predicted,
    filled: Tensor,
    launch: Launch,
    params: RequestParams,
    constants: Constants,
    branch_acceptance: str,
) -> Tensor:
    """What decides before the score with "verified" and "exact", float32 [S, B]. ``filled``: bool [S, B, C]."""
    anchor = rows.is_anchor.float().argmax(-1)
    anchor_fills = _of_branch(filled, anchor)
    after_anchor = torch.where(anchor_fills, _of_branch(predicted.tokens, anchor), _of_branch(rows.tokens, anchor))
    if branch_acceptance == "exact":
        can_win = rows.is_lookahead & _is_next(rows, after_anchor, anchor, launch, params, constants)
        progress = can_win.float()
    else:
        is_confirmed = (rows.own & anchor_fills[:, None] & (rows.tokens == after_anchor[:, None])).any(-1)
        can_win = rows.is_lookahead & is_confirmed
        progress = filled.sum(-1, dtype=torch.float32) + rows.is_lookahead
    return torch.where(can_win | rows.is_anchor, progress, constants.no_rank)


def _is_next(
    rows: Rows, after_anchor: Tensor, anchor: Tensor, launch: Launch, params: RequestParams, constants: Constants
) -> Tensor:
    """Whether a row is what D2F would compute in its next pass, while nothing is committed in between, bool [S, B].

    The window begins with the first block that was not final before the last step's fills. So there is no commit in
    this pass, nor in D2F's next one, as long as that block has masks. ``after_anchor``: the anchor's token ids with its
    fills, int32 [S, C]; ``anchor``: its number in each sequence, int64 [S].
    """
    num_opened = rows.num_opened_blocks.gather(1, anchor[:, None])
    has_its_tokens = ~(rows.tokens != after_anchor[:, None]).any(-1)
    # Rows with the same tokens have the same masks, so each can tell for itself what a next pass opens.
    num_opened_next = num_opened + opens_block(rows.tokens, rows.masks, num_opened, launch, params, constants)
    return has_its_tokens & (rows.num_opened_blocks == num_opened_next) & (rows.masks[:, :, 0] > 0.0)


def _scores_higher(rows: Rows, predicted: Predicted, constants: Constants) -> Tensor:
    """Whether a row has a higher branch score than another, or an equal one and comes first; bool [S, row, other].

    A score is the mean of the confidences in units of 1 / ``SCALE``, compared as a fraction of integers. A row without
    masks has the fraction 0 / 0, which equals all others. It is the first row, whose score of 1 should win, or padding
    at the end, which should not.
    """
    confidences = torch.where(rows.masked, predicted.confidences, constants.no_masks)
    sums = (confidences * SCALE).round().sum(-1, dtype=torch.int64)
    mine = sums[:, :, None] * rows.masked.sum(-1)[:, None]  # the row's sum, over the other row's cells
    others = mine.transpose(1, 2)
    return (mine > others) | ((mine == others) & constants.branch_precedes)


def _of_branch(x: Tensor, branch: Tensor) -> Tensor:
    """One branch [S, C] of each sequence of ``x`` [S, B, C]."""
    return x.gather(1, branch[:, None, None].expand(-1, 1, x.shape[2]))[:, 0]


def _candidates(
    is_open: Tensor, confidences: Tensor, launch: Launch, params: RequestParams, constants: Constants
) -> Tensor:
    """The cells that the next lookahead branches fill, int32 [S, B]: the most confident of the masked cells ``is_open``
    [S, C] by the winner's ``confidences`` [S, C], the earlier one among equals; -1 for the anchor and for padding."""
    confidences = torch.where(is_open, confidences, constants.no_confidence)
    mine, others = confidences[:, :, None], confidences[:, None]
    is_ahead = (mine > others) | ((mine == others) & constants.cell_precedes)
    # How many cells each one is ahead of. All ranks differ, because kernels take equal values in any order.
    rank = torch.where(is_open, is_ahead.sum(-1, dtype=torch.float32), constants.no_rank)
    best, cells = rank.topk(len(constants.branches))
    is_lookahead = (best > constants.no_rank) & (constants.branches < params.num_branches[:, None])
    return torch.where(is_lookahead, launch.cells.gather(1, cells), constants.no_cell)
