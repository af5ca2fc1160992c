"""Which block-rows a packed step computes.

In a block-causal window the blocks of a lookahead branch before the one with its own cell are the anchor's: they have
the same tokens and see the same keys. So are all blocks of a slot without a branch. A packed step computes them once,
as the anchor's, and every slot takes keys, values and predictions from there. It computes no block that is not open.

The host says how many slots may compute each block. Which ones, the device finds out, for it alone knows the lookahead
cells when a step is launched ahead. A sequence's slots are in **order** of how many blocks they compute, the anchor's
first. So those that compute a block come first, and a block-row is the block and a place in the order. KV lengths
depend on the block alone, so the host knows them.

Of several branch-parallel groups only one has the anchor, so there every slot computes its open blocks.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from lopa_ascend.graph.policy.rows import Constants, Launch, Rows
from lopa_ascend.graph.spec import float32, int32


class Packing(NamedTuple):
    """What the host writes for a packed step beside the inputs of any step. Block-rows that nobody needs are copies of
    the first one. A block is counted through all slots of all sequences."""

    places: Annotated[Tensor, int32("rows")]
    """Place of each block-row's slot in the orders of all sequences, one after the other."""
    first_slots: Annotated[Tensor, int32("rows")]
    """First slot of its sequence."""
    first_blocks: Annotated[Tensor, int32("rows")]
    """Its block in the first slot of its sequence."""
    starts: Annotated[Tensor, float32("sequences blocks")]
    """First block-row of each block, which is the anchor's; for a block without one, the sequence's first."""
    others: Annotated[Tensor, float32("sequences blocks")]
    """Block-rows of the block behind that one."""
    end_rows: Annotated[Tensor, int32("rows")]
    """Row of ``Storage.hidden`` with the state at the end of each block-row."""
    rows_before: Annotated[Tensor, int32("sequences")]
    """Row of ``Storage.hidden`` with the state before each window."""
    token_numbers: Annotated[Tensor, int32("rows block_length")]
    """The numbers from 0 on."""


class Layout(NamedTuple):
    """Where the blocks of all slots of all sequences are computed."""

    slots: Tensor
    """Of each block-row, int32 [rows]."""
    blocks: Tensor
    """Of each block-row, int32 [rows]."""
    rows: Tensor
    """The block-row that each block takes its values from, int32 [S * R * W]."""


def layout(rows: Rows, launch: Launch, packing: Packing, constants: Constants, num_groups: int) -> Layout:
    (S, W), R = launch.blocks.shape, launch.slot_mapping.shape[1]
    if num_groups == 1:
        place, order, computes = _order(rows, constants, W)
        offset = place[..., None] * computes
    else:
        order = constants.branches[:R].expand(S, R)
        offset = order.float()[..., None]
    row = packing.starts[:, None] + torch.minimum(offset, packing.others[:, None])
    slot = order.reshape(-1).index_select(0, packing.places)
    return Layout(slot + packing.first_slots, slot * W + packing.first_blocks, row.int().view(-1))


def _order(rows: Rows, constants: Constants, num_blocks: int) -> tuple[Tensor, Tensor, Tensor]:
    """The place of each slot in its sequence's order, float32 [S, R]; the slots in that order, int32 [S, R]; and 1.0
    for the blocks that a slot computes, otherwise 0.0 [S, R, W]."""
    S, R, _ = rows.own.shape
    is_anchor = rows.is_anchor.float()
    own = rows.own.view(S, R, num_blocks, -1).sum(-1, dtype=torch.float32)
    computes = own.cumsum(-1) + is_anchor[..., None]
    amount = computes.sum(-1) + is_anchor
    mine, others = amount[:, :, None], amount[:, None]
    precedes = (mine > others) | ((mine == others) & constants.branch_precedes)
    order = precedes.sum(2, dtype=torch.float32).topk(R).indices  # by how many others each one precedes: all differ
    return precedes.sum(1, dtype=torch.float32), order.int(), computes
