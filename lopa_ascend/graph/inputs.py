"""What the host writes for a compiled step: its requests' parameters and states, and the inputs of each launch.

A launch uses nothing that the step before it computes, so the host may launch a step before it has read the last one.
Shapes are declared in ``tensors.py`` and ``policy/rows.py``; dimensions have the letters of ``policy``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lopa_ascend.config import DecodingParams
from lopa_ascend.decode.blocks import threshold_count
from lopa_ascend.decode.strategy import Strategy
from lopa_ascend.graph.buckets import Bucket
from lopa_ascend.graph.policy import Launch, Packing, RequestParams
from lopa_ascend.graph.spec import specs
from lopa_ascend.graph.tensors import ModelInputs, StepInputs
from lopa_ascend.kv.pages import PAGE_SIZE

NO_TOKEN = -1
NO_LIMIT = 2**30


class BlockRows(NamedTuple):
    """The block-rows of a packed step, int64 [N] each; padding is 0."""

    sequence: Tensor
    """Index in the launch."""
    block: Tensor
    """Index in the window."""
    place: Tensor
    """In the sequence's order; see ``policy/packed.py``."""
    num_used: int


class HostView(NamedTuple):
    """What the host knows of a sequence when it launches a step. Blocks are numbered from 0 at the origin. The window
    must hold all open blocks (``window.next_window``)."""

    seat: int
    origin: int = 0
    block_size: int = 0
    num_positions: int = 0
    """From the origin to the end of the canvas."""
    window_start: int = 0
    """First block of the window. Earlier ones were final before the last launch."""
    last_start: int = 0
    """First block of the last launched window."""
    last_blocks: int = 0
    """Blocks of that window's bucket."""
    max_opened_blocks: int = 0
    """No further block opens once a token that ends the answer is filled."""
    num_shared_pages: int = 0
    """First pages that are the same in all slots."""
    filler: int = 0
    """Content of cells without a position: a token id that is neither the mask nor an end."""


# ---- parameters and state of a request -----------------------------------------------------------------------------


def empty_params(num_seats: int, mask: int, shape: Bucket) -> RequestParams:
    seats = shape._replace(sequences=num_seats)
    declared = specs(RequestParams).values()
    params = RequestParams(*(torch.zeros(seats.shape(spec.dims), dtype=spec.dtype) for spec in declared))
    params.mask[:] = mask
    params.ends[:] = NO_TOKEN
    params.tau_conf[:] = 1.0
    return params


def empty_states(num_seats: int, shape: Bucket) -> Tensor:
    """Packed states float32 [num_seats, state size] without tokens, blocks and lookahead branches."""
    states = torch.zeros(num_seats, shape.state_size, dtype=torch.int32)
    states[:, -shape.branches :] = -1  # State.lookahead_cells: none
    return states.view(torch.float32)


def write_params(
    params: RequestParams, seat: int, request: DecodingParams, ends: Sequence[int], num_given: int = 0
) -> None:
    """Writes into a seat the parameters of a request that graphs support, its ``ends``, and the number of its prompt's
    tokens in the first block."""
    size = request.block_size
    params.ends[seat] = NO_TOKEN
    params.ends[seat, : len(ends)] = torch.tensor(ends, dtype=torch.int32)
    params.num_branches[seat] = request.lookaheads
    params.max_active_blocks[seat] = NO_LIMIT if request.max_active_blocks is None else request.max_active_blocks
    params.masks_to_open[seat] = size - threshold_count(request.tau_add, size)
    params.masks_to_activate[seat] = size - threshold_count(request.tau_act, size)
    params.tau_conf[seat] = request.tau_conf
    params.num_given[seat] = num_given


def packed_state(strategy: Strategy, window_start: int, filler: int, shape: Bucket) -> Tensor:
    """A sequence's packed state float32 [state size] between two steps. ``window_start`` is the window's first block,
    i.e. the number of committed generated blocks; ``filler``: see ``HostView``."""
    origin = strategy.origin
    *lookaheads, anchor = strategy.branches
    window = (*strategy.prompt[origin:], *anchor.tokens)
    size, length = strategy.params.block_size, shape.block_length
    offset = torch.arange(length)
    position = (window_start + torch.arange(shape.max_blocks)[:, None]) * size + offset
    has_position = (offset < size) & (position < strategy.limit - origin)
    tokens = torch.where(has_position, strategy.mask, filler).int()
    is_known = has_position & (position < len(window))
    tokens[is_known] = torch.tensor(window, dtype=torch.int32)[position[is_known]]
    *of_lookaheads, of_anchor = (len(branch.blocks) - 1 for branch in strategy.branches)  # block 0 is the prompt
    num_opened_blocks = torch.full((shape.branches,), of_anchor, dtype=torch.int32)
    num_opened_blocks[: len(of_lookaheads)] = torch.tensor(of_lookaheads, dtype=torch.int32)
    lookahead_cells = torch.full((shape.branches,), -1, dtype=torch.int32)
    guesses = torch.zeros_like(tokens).flatten()
    fills = [fill for branch in lookaheads for fill in branch.own_fills]
    for branch, fill in enumerate(fills):
        block, offset_in_block = divmod(fill.position - origin, size)
        cell = block * length + offset_in_block
        lookahead_cells[branch] = cell
        guesses[cell - window_start * length] = fill.token
    return torch.cat([tokens.flatten(), guesses, num_opened_blocks, lookahead_cells]).view(torch.float32)


# ---- inputs of a launch --------------------------------------------------------------------------------------------


class _WindowCells:
    """The cells of every sequence's window in a step, int64 [S, W, L] unless stated otherwise."""

    def __init__(self, views: Sequence[HostView], bucket: Bucket) -> None:
        columns: list[Tensor] = list(torch.tensor(views).t()[..., None, None])  # [S, 1, 1] each
        (self.seat, self.origin, self.block_size, self.num_positions, self.start, self.last_start,
         self.last_blocks, self.max_opened_blocks, self.num_shared_pages, self.filler) = columns  # fmt: skip
        self.block = self.start + torch.arange(bucket.blocks)[:, None]  # [S, W, 1]
        self.offset = torch.arange(bucket.block_length)  # [L]
        generated = self.block * self.block_size + self.offset
        self.has_position = (self.offset < self.block_size) & (generated < self.num_positions)
        # A cell without a position gets one inside the sequence, and is written to a padding position.
        inside = torch.minimum(generated, self.num_positions - 1)
        self.position = (self.origin + inside).clamp_min(0)

    def block_ends(self) -> Tensor:
        end = torch.minimum((self.block + 1) * self.block_size, self.num_positions)
        return (self.origin + end).flatten(1)


def write_inputs(
    inputs: StepInputs,
    bucket: Bucket,
    views: Sequence[HostView],
    page_tables: Tensor,
    params: RequestParams,
    first_padding_position: int,
    packed: tuple[Packing, BlockRows] | None = None,
) -> Tensor:
    """Fills the inputs of a step. Returns the ends of the windows' blocks, int64 [S, W]: in a block-causal window the
    KV lengths of its entries.

    Args:
        views: one for each of the S sequences; of padding rows only the seat counts.
        page_tables: page ids by slot, int32 [S, R, P]; -1 if there is no page.
        first_padding_position: as many cache positions from here on as the bucket writes are never read.
    """
    window = _WindowCells(views, bucket)
    launch, own_params, model_inputs = inputs
    for target, values in zip(own_params, params, strict=True):
        torch.index_select(values, 0, window.seat.flatten(), out=target)
    _write_launch(launch, own_params.mask, bucket, window, page_tables, first_padding_position)
    first_own_row = len(params.mask) * (1 + bucket.max_blocks)
    tables = torch.where(page_tables < 0, first_padding_position // PAGE_SIZE, page_tables)
    if packed is None:
        _write_model_inputs(model_inputs, bucket, window, tables, first_own_row)
    else:
        _write_packed_inputs(model_inputs, *packed, bucket, window, tables, first_own_row)
    return window.block_ends()


def _write_launch(
    target: Launch,
    mask: Tensor,
    bucket: Bucket,
    window: _WindowCells,
    page_tables: Tensor,
    first_padding_position: int,
) -> None:
    # A packed state holds the cells of the last window as the last step left them.
    last_block = window.block - window.last_start
    is_kept = (last_block >= 0) & (last_block < window.last_blocks)
    column = torch.where(is_kept, last_block * bucket.block_length + window.offset, 0)
    new_tokens = torch.where(window.has_position, mask.view(-1, 1, 1), window.filler)
    launch = Launch(
        seats=window.seat,
        kept_at=window.seat * bucket.state_size + column,
        new_tokens=torch.where(is_kept, NO_TOKEN, new_tokens),
        cells=window.block * bucket.block_length + window.offset,
        blocks=window.block,
        max_opened_blocks=window.max_opened_blocks,
        slot_mapping=_slot_mapping(bucket, window, page_tables, first_padding_position),
    )
    _copy(target, launch)


def _slot_mapping(bucket: Bucket, window: _WindowCells, page_tables: Tensor, first_padding_position: int) -> Tensor:
    """Flat cache positions int64 [S, R, C]. Slot 0 writes the pages that all slots share."""
    position = window.position.flatten(1)[:, None]  # [S, 1, C]
    column = (position // PAGE_SIZE).expand(bucket.shape("sequences slots cells"))
    page = page_tables.long().gather(2, column.clamp_max(bucket.pages - 1))
    is_private = (column >= window.num_shared_pages) | (torch.arange(bucket.slots)[:, None] == 0)
    has_page = (column < bucket.pages) & (page >= 0)
    is_written = window.has_position.flatten(1)[:, None] & has_page & is_private
    padding = first_padding_position + torch.arange(bucket.writes).view(bucket.shape("sequences slots cells"))
    mapping: Tensor = torch.where(is_written, page * PAGE_SIZE + position % PAGE_SIZE, padding)
    return mapping


def _write_model_inputs(
    target: ModelInputs,
    bucket: Bucket,
    window: _WindowCells,
    page_tables: Tensor,
    first_own_row: int,
) -> None:
    positions = window.position.flatten(1)[:, None].expand(bucket.shape("sequences slots cells"))
    tables = page_tables.repeat_interleave(bucket.entries, 1)
    _copy(target, (positions, *_hidden_rows(bucket, window, first_own_row), tables))


def _write_packed_inputs(
    target: ModelInputs,
    packing: Packing,
    given: BlockRows,
    bucket: Bucket,
    window: _WindowCells,
    page_tables: Tensor,
    first_own_row: int,
) -> None:
    S, R, W, N, L = bucket.shape("sequences slots blocks rows block_length")
    sequence, block, place, count = given
    numbers, is_anchor = torch.arange(N), place == 0
    is_anchor[count:] = False
    rows_before, save_rows = _seat_rows(bucket, window)
    token_numbers = torch.arange(N * L).view(N, L)
    rows, last_cell = first_own_row + token_numbers, _last_cell(window)[sequence]
    end_rows = torch.where(is_anchor, save_rows[sequence, block], rows[numbers, last_cell])
    rows[numbers, last_cell] = end_rows
    predicted_by = rows.roll(1, 1) if bucket.logit_shift else rows
    starts, others = torch.full((S, W), -1), torch.full((S, W), -1)
    starts[sequence[:count].flip(0), block[:count].flip(0)] = numbers[:count].flip(0)
    others.index_put_((sequence[:count], block[:count]), torch.ones(count, dtype=torch.int64), accumulate=True)
    starts = torch.where(starts < 0, starts[:, :1], starts)
    positions = window.position.expand(S, W, L)[sequence, block]
    _copy(target, (positions, rows, predicted_by, save_rows, save_rows, page_tables))
    first_slots, first_blocks = R * sequence, R * W * sequence + block
    values = first_slots + place, first_slots, first_blocks, starts, others, end_rows, rows_before, token_numbers
    _copy(packing, [each.clamp_min(0) for each in values])


def block_rows(counts: Sequence[Sequence[int]], num_rows: int) -> BlockRows:
    """The block-rows of a packed step. ``counts``: by sequence and block of its window, how many slots may compute it;
    ``num_rows``: the bucket's, no fewer than these."""
    each = [
        (number, block, place)
        for number, of_sequence in enumerate(counts)
        for block, count in enumerate(of_sequence)
        for place in range(count)
    ]
    padding = [(0, 0, 0)] * (num_rows - len(each))
    sequence, block, place = torch.tensor([*each, *padding]).unbind(1)
    return BlockRows(sequence, block, place, len(each))


def _hidden_rows(bucket: Bucket, window: _WindowCells, first_own_row: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(``hidden_rows``, ``predicted_by``, ``block_ends``, ``save_rows``) of ModelInputs. Rows of ``Storage.hidden``
    from ``first_own_row`` on belong to this step alone."""
    S, R, W, L = bucket.shape("sequences slots blocks block_length")
    before_window, save_rows = _seat_rows(bucket, window)
    rows = first_own_row + torch.arange(bucket.tokens).view(S, R, -1)
    last_cell = torch.arange(W) * L + _last_cell(window)[:, None]  # [S, W]
    block_ends = rows[:, 0].gather(1, last_cell)
    if not bucket.full_attention:
        rows[:, 0] = rows[:, 0].scatter(1, last_cell, save_rows)
    predicted_by = rows
    if bucket.logit_shift:
        predicted_by = rows.gather(2, _cells_before(bucket, window).expand(S, R, -1))
        predicted_by[:, :, 0] = before_window[:, None]
    return rows, predicted_by, block_ends, save_rows


def _seat_rows(bucket: Bucket, window: _WindowCells) -> tuple[Tensor, Tensor]:
    """Rows of ``Storage.hidden`` for the states before the windows [S], and at the ends of their blocks [S, W]."""
    rows_per_seat = 1 + bucket.max_blocks
    seat, start = window.seat.view(-1, 1), window.start.view(-1, 1)
    saved = seat * rows_per_seat + (start + torch.arange(1 + bucket.blocks)) % rows_per_seat
    return saved[:, 0], saved[:, 1:]


def _last_cell(window: _WindowCells) -> Tensor:
    """Of a sequence's blocks, int64 [S]."""
    return (window.block_size.view(-1) - 1).clamp_min(0)


def _cells_before(bucket: Bucket, window: _WindowCells) -> Tensor:
    """The cell before each cell, int64 [S, 1, C]. Before a block's first cell that is the previous block's last cell
    with a position; the first block's value has no meaning."""
    S, W, L = bucket.shape("sequences blocks block_length")
    block, offset = torch.arange(W)[:, None], torch.arange(L)
    before_in_block = block * L + offset - 1
    last_of_previous_block = (block - 1) * L + window.block_size - 1
    return torch.where(offset > 0, before_in_block, last_of_previous_block).view(S, 1, -1).clamp_min(0)


def _copy(targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for target, value in zip(targets, values, strict=True):
        target.copy_(value.reshape(target.shape))
