"""The decode policy as tensor functions of fixed shape, for use inside a compiled step.

``decode/`` is the definition; this does the same for S sequences at once and reads no value on the host. A step is
``unpack_state``, ``open_blocks`` (what each branch holds), ``rows_of_group`` (what this rank computes), the forward
pass, ``advance`` (winner, fills, next branches) and ``pack_state``. ``inputs.py`` is the host's part. Dimensions as in
``tensors.py``; they never change inside a bucket.

Row i of a sequence is branch i in evaluation order: lookahead branches by rank, then the anchor. The rows after the
anchor are padding copies of it.

An NPU's vector cores decide how the functions are written: they find maxima of float32 but not of int32, select no
bool, sort no integers and scatter nothing in a GE graph; torchair has no minimum over a dimension. Ranks are unique
before anything is sorted by them, and sums that can exceed 2^31 are int64.

A confidence may be NaN. All indices stay inside their range then, and other sequences are not affected.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lopa_ascend.graph.tensors import Constants, Launch, RequestParams

STEP = 2.0**-16
"""Branch scores are sums of confidences rounded to multiples of this, half to even."""


class State(NamedTuple):
    """The state of the sequences between two steps, all int32.

    Packed, a state is a row [X] of ``Storage.states``: the tokens of a window of M blocks, ``RequestParams.blank``, and
    the other fields in this order. It is float32 with the bits of int32, because an NPU scatters rows of floats only.
    """

    tokens: Tensor
    """Token ids of the anchor's window [S, C]."""
    num_open_blocks: Tensor
    """Generated blocks that are open [S, 1]."""
    num_lookaheads: Tensor
    """Lookahead branches [S, 1]."""
    lookahead_cells: Tensor
    """The cell that each branch fills in addition to the anchor [S, B]; -1: none."""
    lookahead_tokens: Tensor
    """Id of the token that each branch fills this cell with [S, B]."""


class Rows(NamedTuple):
    """The branches of a step."""

    tokens: Tensor
    """Token ids, int32 [S, B, C]."""
    masked: Tensor
    """Cells to predict, bool [S, B, C]."""
    num_open_blocks: Tensor
    """int32 [S, B]."""
    kept_blocks: Tensor
    """Whether the keys and values of a block are kept, bool [S, B, W]."""
    masks_before: Tensor
    """Masks in the block before each block, float32 [S, B, W]."""


class Predicted(NamedTuple):
    """What the model predicts for every cell of every branch; only the masked cells count."""

    tokens: Tensor
    """Token ids, int32 [S, B, C]."""
    max_probs: Tensor
    """float32 [S, B, C]."""
    confidences: Tensor
    """float32 [S, B, C]; NaN where a logit was not finite."""


def unpack_state(packed: Tensor, launch: Launch, constants: Constants) -> State:
    """The state of the launched sequences.

    Args:
        packed: ``Storage.states`` [N, X].
    """
    num_branches = constants.branch.shape[0]
    tokens = packed.view(-1).index_select(0, launch.token_index).view(torch.int32).view(launch.cells.shape)
    rows = packed.index_select(0, launch.seats).view(torch.int32)
    num_cell_columns = packed.shape[1] - 2 - 2 * num_branches
    _, *others = rows.split([num_cell_columns, 1, 1, num_branches, num_branches], 1)
    return State(tokens, *others)


def pack_state(state: State, params: RequestParams, constants: Constants) -> Tensor:
    """float32 [S, X], the inverse of ``unpack_state``."""
    tokens, *others = state
    return torch.cat([tokens, constants.padding_tokens, params.blank, *others], 1).view(torch.float32)


def open_blocks(params: RequestParams, state: State, launch: Launch, constants: Constants, mask: int) -> Rows:
    """Opens a block in every branch that may open one, and says what each branch holds (SPEC section 2, steps a and b).

    Args:
        mask: token id of the mask.
    """
    S, B = state.lookahead_cells.shape
    W = launch.blocks.shape[1]
    is_lookahead = state.lookahead_cells[:, :, None] == launch.cells[:, None]
    tokens = torch.where(is_lookahead, state.lookahead_tokens[:, :, None], state.tokens[:, None])
    is_mask = tokens == mask
    ones = is_mask.to(torch.float32).view(S * B, -1)  # counted by matrix products, which are exact in any format
    masks_before = (ones @ constants.in_block_before).view(S, B, W)
    limit_index = (state.num_open_blocks + launch.limit_base.view(S, W)).view(-1)
    limits = params.mask_limits.view(-1).index_select(0, limit_index).view(S, 1, W)
    has_too_many_masks = (masks_before > limits).any(-1)
    has_eos = (tokens[..., None] == params.eos[:, None, None]).view(S, B, -1).any(-1)
    num_open_blocks = torch.where(has_too_many_masks | has_eos, state.num_open_blocks, state.num_open_blocks + 1)
    is_branch = constants.branch <= state.num_lookaheads
    # Open blocks are written in every slot, also where the slot has no branch, whose row is a copy of the anchor: the
    # next pass may commit them.
    kept_blocks = launch.blocks[:, None] < num_open_blocks[..., None]
    is_predicted = (kept_blocks & is_branch[..., None])[..., None]
    masked = (is_mask.view(S, B, W, -1) & is_predicted).view(S, B, -1)
    return Rows(tokens, masked, num_open_blocks, kept_blocks, masks_before)


def rows_of_group(
    rows: Rows, launch: Launch, constants: Constants, num_groups: int = 1, group: int = 0
) -> tuple[Tensor, Tensor]:
    """(token ids, flat cache positions) int32 [S, R, C] of the branches that one branch-parallel group computes: branch
    i has slot i div num_groups of group i mod num_groups. Blocks that are not kept go to padding slots."""
    S, R, _ = launch.slot_mapping.shape
    kept_blocks, tokens = rows.kept_blocks, rows.tokens
    if num_groups > 1:
        kept_blocks, tokens = kept_blocks[:, group::num_groups], tokens[:, group::num_groups]
    W = kept_blocks.shape[2]
    kept, padding = (x.view(S, R, W, -1) for x in (launch.slot_mapping, constants.padding_slots))
    return tokens, torch.where(kept_blocks[..., None], kept, padding).view(S, R, -1)


def advance(
    params: RequestParams, launch: Launch, rows: Rows, predicted: Predicted, constants: Constants
) -> tuple[State, Tensor]:
    """Picks the winners, fills them, and grows the next branches from them (SPEC sections 3 to 6).

    Returns:
        The next state, and the winners' rows int32 [S]: sequence * B + branch.
    """
    S, B, C = rows.tokens.shape
    W = launch.blocks.shape[1]
    winner = _winners(rows, predicted, constants)

    def of_winner(x: Tensor) -> Tensor:
        return x.view(S * B, -1).index_select(0, winner)

    tokens, masked, num_open_blocks = of_winner(rows.tokens), of_winner(rows.masked), of_winner(rows.num_open_blocks)
    guesses, probs = of_winner(predicted.tokens), of_winner(predicted.max_probs)
    if predicted.confidences is predicted.max_probs:
        ranks = _ranks_of_probabilities(probs, constants)
    else:
        ranks = _ranks(of_winner(predicted.confidences), constants)
    # A cell's rank: -1 without a mask, C where tau_conf accepts it, otherwise how many cells it is ahead of. A block
    # fills the cells that reach its threshold: C, or if it is fully activated its highest rank.
    accepted, no_rank = constants.accepted_rank, constants.no_rank
    rank = torch.where(probs > params.tau_conf[:, None], accepted, ranks)
    rank = torch.where(masked, rank, no_rank)
    is_activated = of_winner(rows.masks_before) <= params.activation_masks[:, None]
    threshold = torch.where(is_activated, rank.view(S, W, -1).max(-1).values, accepted)
    filled = (rank.view(S, W, -1) >= threshold[..., None]).view(S, C) & masked
    # Among the masks that are left, the best cells become the lookahead cells of the next branches.
    candidate_rank, candidate = torch.where(filled, no_rank, rank).topk(B)
    is_lookahead = candidate_rank >= params.min_rank
    state = State(
        tokens=torch.where(filled, guesses, tokens),
        num_open_blocks=num_open_blocks,
        num_lookaheads=is_lookahead.sum(-1, keepdim=True, dtype=torch.int32),
        lookahead_cells=torch.where(is_lookahead, launch.cells.gather(1, candidate), constants.no_cell),
        lookahead_tokens=guesses.gather(1, candidate),
    )
    return state, winner


def _winners(rows: Rows, predicted: Predicted, constants: Constants) -> Tensor:
    """The row of the branch with the largest mean confidence over its masks, the first one among equals; int32 [S].

    Means are compared as fractions of integers; float32 holds a cell's confidence in units of ``STEP`` exactly down to
    -255. A row without masks has the sum 0 over 0 cells, so every later row loses to it, and no earlier one. That is
    right, because only branch 0, which then has the score 1, and the padding rows at the end can be without masks.
    Of two rows exactly one loses to the other, so at most one row loses to none, whatever integer a NaN becomes.
    """
    units = (predicted.confidences / STEP).round()
    sums = torch.where(rows.masked, units, constants.no_units).sum(-1, dtype=torch.int64)
    counts = rows.masked.sum(-1)
    products = sums[:, None, :] * counts[:, :, None]  # [S, row, other row]: the other row's sum, over the row's cells
    loses = (products + constants.earlier > products.transpose(1, 2)).any(-1)
    return torch.where(loses, constants.no_row, constants.row).sum(-1, dtype=torch.int32)


def _ranks(confidences: Tensor, constants: Constants) -> Tensor:
    """How many cells each cell is ahead of in the order of (-confidence, position), float32 [S, C]."""
    mine, others = confidences[:, :, None], confidences[:, None, :]
    is_ahead = (mine > others) | ((mine == others) & (constants.later > 0))
    return is_ahead.sum(-1, dtype=torch.float32)


def _ranks_of_probabilities(probs: Tensor, constants: Constants) -> Tensor:
    """``_ranks`` of confidences that are not negative, with fewer kernels: the bits of such float32 are in the order of
    their values, and the next larger one has the next bits. So one is added where a tie goes to the row's cell."""
    bits = probs.view(torch.int32)
    is_ahead = bits[:, :, None] + constants.later > bits[:, None, :]
    return is_ahead.sum(-1, dtype=torch.float32)
