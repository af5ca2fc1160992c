"""Before the forward pass: what each branch holds, and what this rank computes (SPEC section 2, steps a and b)."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from lopa_ascend.graph.spec import boolean, float32, int32


class Launch(NamedTuple):
    """What the host says of each sequence when it launches a step, with the numbers of the window's cells
    and blocks."""

    seats: Annotated[Tensor, int32("sequences")]
    """Rows in the packed states; padding rows have seats that are never assigned."""
    kept_at: Annotated[Tensor, int32("sequences cells")]
    """Where each cell of the window lies among the last window's tokens, in the flat packed states; anywhere for a new
    cell."""
    new_tokens: Annotated[Tensor, int32("sequences cells")]
    """Content of cells that the last window did not have: the mask, or for a cell without a position a token that is
    neither the mask nor an end. -1 for all other cells."""
    cells: Annotated[Tensor, int32("sequences cells")]
    blocks: Annotated[Tensor, int32("sequences blocks")]
    max_opened_blocks: Annotated[Tensor, int32("sequences")]
    slot_mapping: Annotated[Tensor, int32("sequences slots cells")]
    """Flat cache position of each cell in each slot; a padding position if the cell must not be written."""


class RequestParams(NamedTuple):
    mask: Annotated[Tensor, int32("sequences")]
    ends: Annotated[Tensor, int32("sequences max_ends")]
    """Token ids that end the answer; unused places hold -1."""
    num_branches: Annotated[Tensor, int32("sequences")]
    """Lookahead branches that the request wants."""
    max_active_blocks: Annotated[Tensor, int32("sequences")]
    masks_to_open: Annotated[Tensor, float32("sequences")]
    """Another block may be opened once the last block has at most so many masks (``tau_add``)."""
    masks_to_activate: Annotated[Tensor, float32("sequences")]
    """A block is fully activated once the block before it has at most so many masks (``tau_act``)."""
    tau_conf: Annotated[Tensor, float32("sequences")]
    num_given: Annotated[Tensor, int32("sequences")]
    """Cells of the first block that hold tokens of the prompt, which end no answer."""


class Constants(NamedTuple):
    """Tensors that never change in a bucket. A number in the code of a step would be a kernel that fills a tensor."""

    branches: Annotated[Tensor, int32("branches")]
    """The numbers from 0 on."""
    branch_precedes: Annotated[Tensor, boolean("branches branches")]
    """Whether the row's branch comes before the column's."""
    cell_precedes: Annotated[Tensor, boolean("cells cells")]
    """Whether the row's cell comes before the column's."""
    padding_positions: Annotated[Tensor, int32("sequences slots cells")]
    """Distinct flat cache positions that are written and never read."""
    no_cell: Annotated[Tensor, int32("one")]
    no_masks: Annotated[Tensor, float32("one")]
    no_limit: Annotated[Tensor, float32("one")]
    no_confidence: Annotated[Tensor, float32("one")]
    no_rank: Annotated[Tensor, float32("one")]


class State(NamedTuple):
    """What the device keeps of each sequence between two steps, int32. Packed, it is one row of ``Storage.states``."""

    tokens: Tensor
    """The anchor's window [S, C]."""
    guesses: Tensor
    """The last winner's predictions for these cells [S, C]."""
    num_opened_blocks: Tensor
    """Generated blocks that each branch has opened, finished ones included [S, B]."""
    lookahead_cells: Tensor
    """The cell that each branch fills in addition to the anchor [S, B]; -1 for the anchor and for padding."""


class Rows(NamedTuple):
    tokens: Tensor
    """int32 [S, B, C]."""
    masked: Tensor
    """Cells to predict, bool [S, B, C]."""
    masks: Tensor
    """Masks in each block, opened or not, float32 [S, B, W]."""
    num_opened_blocks: Tensor
    """int32 [S, B]."""
    own: Tensor
    """The cell that a lookahead branch fills in addition to the anchor, bool [S, B, C]."""
    is_anchor: Tensor
    """bool [S, B]."""
    is_lookahead: Tensor
    """bool [S, B]; rows that are neither this nor the anchor are padding."""


def unpack_state(states: Tensor, launch: Launch, max_cells: int) -> State:
    """The state of the launched sequences, in the cells of this window. ``states`` [seats, state size]; ``max_cells``:
    cells of the largest window of any bucket."""
    packed = states.view(torch.int32)
    kept_at = launch.kept_at.view(-1)
    kept, guesses = (packed.view(-1).index_select(0, at).view_as(launch.cells) for at in (kept_at, kept_at + max_cells))
    tokens = torch.where(launch.new_tokens < 0, kept, launch.new_tokens)
    num_opened_blocks, lookahead_cells = packed.index_select(0, launch.seats)[:, 2 * max_cells :].chunk(2, 1)
    return State(tokens, guesses, num_opened_blocks, lookahead_cells)


def pack_state(state: State, max_cells: int) -> Tensor:
    """A row for each sequence, float32 with the bits of int32, because an NPU scatters rows of floats only. The columns
    are the tokens and the guesses of the window, each filled up to ``max_cells``, the numbers of opened blocks, and the
    lookahead cells."""
    num_cells = state.tokens.shape[1]
    filler = state.tokens[:, :1].expand(-1, max_cells - num_cells)
    parts = [state.tokens, filler, state.guesses, filler, state.num_opened_blocks, state.lookahead_cells]
    return torch.cat(parts, 1).view(torch.float32)


def branch_rows(state: State, launch: Launch, params: RequestParams, constants: Constants) -> Rows:
    S, B = state.lookahead_cells.shape
    W = launch.blocks.shape[1]
    own = state.lookahead_cells[..., None] == launch.cells[:, None]
    tokens = torch.where(own, state.guesses[:, None], state.tokens[:, None])
    is_mask = tokens == params.mask[:, None, None]
    is_open = launch.blocks[:, None] < state.num_opened_blocks[..., None]  # [S, B, W]
    is_lookahead = state.lookahead_cells >= 0
    num_lookaheads = is_lookahead.sum(-1, keepdim=True, dtype=torch.int32)
    is_branch = constants.branches <= num_lookaheads
    masked = is_mask.view(S, B, W, -1) & (is_open & is_branch[..., None])[..., None]
    return Rows(
        tokens=tokens,
        masked=masked.view(S, B, -1),
        masks=count_masks(is_mask, W),
        num_opened_blocks=state.num_opened_blocks,
        own=own,
        is_anchor=constants.branches == num_lookaheads,
        is_lookahead=is_lookahead,
    )


def count_masks(is_mask: Tensor, num_blocks: int) -> Tensor:
    """Masks in each block, float32 [S, B, W], from the cells that hold one, bool [S, B, C]."""
    return is_mask.view(*is_mask.shape[:2], num_blocks, -1).sum(-1, dtype=torch.float32)


def opens_block(
    tokens: Tensor,
    masks: Tensor,
    num_opened_blocks: Tensor,
    launch: Launch,
    params: RequestParams,
    constants: Constants,
) -> Tensor:
    """Whether each branch opens another block, bool [S, B]: it has no end, its last block is filled to ``tau_add``, and
    neither the canvas nor ``max_active_blocks``, counted from the first block with masks on, is used up.

    ``tokens`` [S, B, C]; ``masks``: in each block, opened or not, float32 [S, B, W]; ``num_opened_blocks``: int32
    [S, 1].
    """
    block = launch.blocks[:, None]  # [S, 1, W]
    num_opened = num_opened_blocks[..., None]
    first_active = num_opened - params.max_active_blocks[:, None, None] + 1  # if another block were opened now
    most_masks = torch.where(block == num_opened - 1, params.masks_to_open[:, None, None], constants.no_limit)
    most_masks = torch.where(block < first_active, constants.no_masks, most_masks)
    has_too_many_masks = (masks > most_masks).any(-1)
    is_end = tokens[..., None] == params.ends[:, None, None]
    is_generated = launch.cells >= params.num_given[:, None]
    has_end = (is_end & is_generated[:, None, :, None]).flatten(2).any(-1)
    may_open = num_opened_blocks < launch.max_opened_blocks[:, None]
    return may_open & ~(has_too_many_masks | has_end)


def rows_of_group(
    rows: Rows,
    launch: Launch,
    constants: Constants,
    num_groups: int,
    group: int,
    *,
    full_attention: bool,
) -> tuple[Tensor, Tensor]:
    """(token ids, flat cache positions) int32 [S, R, C] of the branches that one branch-parallel group computes: branch
    i has slot i div num_groups of group i mod num_groups.

    Open blocks are written in every slot, since the next pass may commit them; a slot without a branch has a copy of
    the anchor. Blocks that are not open are written too, into pages of their own sequence: no open block sees them, and
    once they are open they are written anew. With full attention every block is seen, so they go to padding positions.
    """
    S, R, _ = launch.slot_mapping.shape
    tokens = rows.tokens[:, group::num_groups] if num_groups > 1 else rows.tokens
    if not full_attention:
        return tokens, launch.slot_mapping
    W = launch.blocks.shape[1]
    is_open = launch.blocks[:, None] < rows.num_opened_blocks[:, group::num_groups, None]
    kept, padding = (x.view(S, R, W, -1) for x in (launch.slot_mapping, constants.padding_positions))
    return tokens, torch.where(is_open[..., None], kept, padding).view(S, R, -1)
