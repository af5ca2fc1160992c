"""What the host writes for a compiled step: the parameters and states of its requests, and the inputs of each launch.

A launch uses nothing that the step before it computes, so the host may launch a step before it has read the last one.
Shapes and dimension letters are declared in ``tensors.py``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as List
from typing import NamedTuple

import torch
from torch import Tensor

from lopa_ascend.config import DecodingParams
from lopa_ascend.graph.buckets import Bucket, MaskLimits
from lopa_ascend.graph.tensors import FIRST_CELL, RequestParams, StepInputs, specs
from lopa_ascend.kv.pages import PAGE_SIZE

NO_TOKEN = -1


class HostView(NamedTuple):
    """What the host knows of a sequence when it launches a step. Blocks are numbered from 0 after the prompt.

    The window must hold all open blocks, and the next one if the step may open it; see ``window.next_window``.
    """

    seat: int
    prompt_length: int = 0
    block_size: int = 0
    max_new_tokens: int = 0
    window_start: int = 0
    """First block of the window. The blocks before it were final before the last launch."""
    last_start: int = 0
    """First block of the last launched window."""
    last_blocks: int = 0
    """Blocks of the bucket in which that window was launched."""
    max_opened_blocks: int = 0
    """The most blocks that can be opened. Once a token that ends the answer is filled, no further block opens."""
    num_shared_pages: int = 0
    """How many of the first pages are the same in all slots."""


# ---- parameters and state of a request -----------------------------------------------------------------------------


def empty_params(num_seats: int, mask: int, shape: Bucket) -> RequestParams:
    """Parameters of seats without a request.

    Args:
        mask: token id of the mask.
        shape: the engine's largest bucket.
    """
    seats = shape._replace(sequences=num_seats)
    values: dict[str, float] = {"marks": NO_TOKEN, "tau_conf": 1.0, "mask_limits": math.inf, "min_rank": math.inf}
    params = RequestParams(
        *(
            torch.full(seats.shape(spec.dims), values.get(name, 0), dtype=spec.dtype)
            for name, spec in specs(RequestParams).items()
        )
    )
    other_than_mask = 0 if mask else 1
    params.blank[:] = torch.tensor([mask, other_than_mask, FIRST_CELL])
    params.marks[:, 0] = mask
    limits = MaskLimits(shape.max_blocks)
    params.mask_limits[:, limits.no_room] = -1.0  # met by no block
    params.mask_limits[:, limits.no_room + 1 :] = 0.0  # of EOS
    return params


def empty_states(num_seats: int, shape: Bucket) -> Tensor:
    """Packed states float32 [num_seats, X] without tokens, blocks and lookahead branches."""
    states = torch.zeros(num_seats, shape.dims["X"], dtype=torch.int32)
    states[:, -shape.branches :] = -1  # State.lookahead_cells: none
    return states.view(torch.float32)


def write_params(
    params: RequestParams,
    seat: int,
    request: DecodingParams,
    ends: List[int],
    mask: int,
    filled_to_add: int,
    filled_to_activate: int,
) -> None:
    """Writes a request's parameters into a seat.

    Args:
        request: graphs support it, see ``support.py``.
        ends: token ids that end the request.
        mask: token id of the mask.
        filled_to_add: filled positions that a whole block must have for another block to be opened.
        filled_to_activate: filled positions that a whole block must have for the next block to be fully activated.
    """
    neither_mask_nor_end = next(token for token in range(len(ends) + 2) if token != mask and token not in ends)
    params.blank[seat, 1] = neither_mask_nor_end
    params.marks[seat, 1:] = NO_TOKEN
    params.marks[seat, 1 : 1 + len(ends)] = torch.tensor(ends, dtype=torch.int32)
    params.tau_conf[seat] = request.tau_conf
    params.activation_masks[seat] = request.block_size - filled_to_activate
    params.min_rank[seat] = math.inf
    params.min_rank[seat, : request.lookaheads] = 1.0
    columns = MaskLimits.of_size(params.mask_limits.shape[1])
    limits = params.mask_limits[seat, : columns.by_distance(columns.max_blocks + 1)]
    limits[:] = math.inf
    limits[columns.by_distance(1)] = request.block_size - filled_to_add
    if request.max_active_blocks is not None:
        limits[columns.by_distance(request.max_active_blocks) :] = 0.0


class Snapshot(NamedTuple):
    """A sequence between two steps: after the decisions of one, before the next one opens blocks."""

    window_start: int
    """Index of the window's first block, which is the number of committed generated blocks."""
    tokens: List[int]
    """Token ids of the anchor's generated positions, masks included."""
    lookaheads: List[tuple[int, int]]
    """For each lookahead branch (generated position, token id)."""


def packed_state(blank: Tensor, request: DecodingParams, snapshot: Snapshot, shape: Bucket) -> Tensor:
    """A sequence's packed state float32 [X], for a window that begins at ``snapshot.window_start``.

    Args:
        blank: the seat's ``RequestParams.blank`` [3].
    """
    size, length = request.block_size, shape.block_length
    offset = torch.arange(length)
    position = (snapshot.window_start + torch.arange(shape.max_blocks)[:, None]) * size + offset
    has_position = (offset < size) & (position < request.max_new_tokens)
    cells = blank[(~has_position).long()]
    is_given = has_position & (position < len(snapshot.tokens))
    cells[is_given] = torch.tensor(snapshot.tokens, dtype=torch.int32)[position[is_given]]
    num_opened_blocks = torch.tensor([-(-len(snapshot.tokens) // size)], dtype=torch.int32)
    lookahead_cells = torch.full((shape.branches,), -1, dtype=torch.int32)
    guesses = torch.zeros_like(cells).flatten()
    for branch, (generated, token) in enumerate(snapshot.lookaheads):
        block, offset_in_block = divmod(generated, size)
        cell = block * length + offset_in_block
        lookahead_cells[branch] = FIRST_CELL + cell
        guesses[cell - snapshot.window_start * length] = token
    return torch.cat([cells.flatten(), guesses, blank, num_opened_blocks, lookahead_cells]).view(torch.float32)


# ---- inputs of a launch --------------------------------------------------------------------------------------------


class _WindowCells:
    """The cells of every sequence's window in a step, int64 [S, W, L] unless stated otherwise."""

    def __init__(self, views: List[HostView], bucket: Bucket) -> None:
        columns: list[Tensor] = list(torch.tensor(views).t()[..., None, None])  # [S, 1, 1] each
        (self.seat, self.prompt_length, self.block_size, self.max_new_tokens, self.start, self.last_start,
         self.last_blocks, self.max_opened_blocks, self.num_shared_pages) = columns  # fmt: skip
        self.block = self.start + torch.arange(bucket.blocks)[:, None]  # [S, W, 1]
        self.offset = torch.arange(bucket.block_length)  # [L]
        generated = self.block * self.block_size + self.offset
        self.has_position = (self.offset < self.block_size) & (generated < self.max_new_tokens)
        # A cell without a position gets one inside the sequence, and is written to a padding position.
        inside = torch.minimum(generated, self.max_new_tokens - 1)
        self.position = (self.prompt_length + inside).clamp_min(0)

    def block_ends(self) -> Tensor:
        """The position after each block [S, W]."""
        end = torch.minimum((self.block + 1) * self.block_size, self.max_new_tokens)
        return (self.prompt_length + end).flatten(1)


def write_inputs(
    inputs: StepInputs,
    bucket: Bucket,
    views: List[HostView],
    page_tables: Tensor,
    params: RequestParams,
    first_padding_position: int,
) -> Tensor:
    """Fills the inputs of a step.

    Args:
        views: one for each of the S sequences; of padding rows only the seat counts.
        page_tables: page ids by slot, int32 [S, R, P]; -1 where there is no page.
        params: of all seats.
        first_padding_position: the T cache positions from here on are never read.

    Returns:
        The ends of the windows' blocks, int64 [S, W]: in a block-causal window the KV lengths of its entries.
    """
    window = _WindowCells(views, bucket)
    for target, values in zip(inputs.params, params, strict=True):
        torch.index_select(values, 0, window.seat.flatten(), out=target)
    inputs.params.min_rank.mul_(bucket.cells)
    _write_launch(inputs, bucket, window, page_tables, first_padding_position)
    first_own_row = len(params.blank) * (1 + bucket.max_blocks)
    _write_model_inputs(inputs, bucket, window, page_tables, first_padding_position, first_own_row)
    return window.block_ends()


def _write_launch(
    inputs: StepInputs, bucket: Bucket, window: _WindowCells, page_tables: Tensor, first_padding_position: int
) -> None:
    state_index, open_base = _state_index(bucket, window), _open_base(bucket, window)
    cells = FIRST_CELL + window.block * bucket.block_length + window.offset
    tau_bits = inputs.params.tau_conf.view(torch.int32)[:, None, None].expand(bucket.shape("S B C"))
    bars = torch.cat([torch.full_like(tau_bits, -1), tau_bits], 2)  # confidences are not negative, so -1 is below them
    slot_mapping = _slot_mapping(bucket, window, page_tables, first_padding_position)
    _copy(inputs.launch, (window.seat, state_index, cells, window.block, open_base, bars, slot_mapping))


def _state_index(bucket: Bucket, window: _WindowCells) -> Tensor:
    """``Launch.state_index``, int64 [G]."""
    S, B, K, L, M, X = (bucket.dims[letter] for letter in "SBKLMX")
    # A packed state holds the cells of the last window as the last step left them; all other cells are blank.
    last_block = window.block - window.last_start
    in_last_window = (last_block >= 0) & (last_block < window.last_blocks)
    cell_column = last_block * L + window.offset
    first_blank = 2 * M * L
    blank_column = first_blank + (~window.has_position).long()
    first_column = window.seat * X
    tokens = first_column + torch.where(in_last_window, cell_column, blank_column)
    guesses = first_column + torch.where(in_last_window, M * L + cell_column, blank_column)
    num_opened_blocks = first_column.view(S, 1) + first_blank + 3
    lookahead_cells = num_opened_blocks + 1 + torch.arange(B)
    before = torch.cat([num_opened_blocks - 1, lookahead_cells[:, :-1]], 1)
    by_limit = num_opened_blocks.expand(-1, K * bucket.blocks)
    parts = [tokens, guesses, by_limit, num_opened_blocks, lookahead_cells, before]
    return torch.cat([part.flatten() for part in parts])


def _open_base(bucket: Bucket, window: _WindowCells) -> Tensor:
    """``Launch.open_base``, int64 [Q]."""
    S, W, K = (bucket.dims[letter] for letter in "SWK")
    limits = MaskLimits(bucket.max_blocks)
    base = limits.base_of_ends(window.start).expand(S, K, W).clone()
    base[:, 0] = limits.base_by_distance(window.block[..., 0])
    # More blocks than a window can reach make no difference, and would lead out of the columns.
    max_open = torch.minimum(window.max_opened_blocks, window.start + bucket.max_blocks + 1)
    base[:, 0, -1] = limits.base_by_room(max_open.view(-1))
    base += torch.arange(S)[:, None, None] * limits.size
    return torch.cat([base.flatten(), torch.ones(S, dtype=torch.int64)])


def _slot_mapping(bucket: Bucket, window: _WindowCells, page_tables: Tensor, first_padding_position: int) -> Tensor:
    """Flat cache positions int64 [S, R, C]. Slot 0 writes the pages that all slots share."""
    position = window.position.flatten(1)[:, None]  # [S, 1, C]
    column = (position // PAGE_SIZE).expand(bucket.shape("S R C"))
    page = page_tables.long().gather(2, column.clamp_max(bucket.pages - 1))
    is_private = (column >= window.num_shared_pages) | (torch.arange(bucket.slots)[:, None] == 0)
    has_page = (column < bucket.pages) & (page >= 0)
    is_written = window.has_position.flatten(1)[:, None] & has_page & is_private
    padding = first_padding_position + torch.arange(bucket.tokens).view(bucket.shape("S R C"))
    mapping: Tensor = torch.where(is_written, page * PAGE_SIZE + position % PAGE_SIZE, padding)
    return mapping


def _write_model_inputs(
    inputs: StepInputs,
    bucket: Bucket,
    window: _WindowCells,
    page_tables: Tensor,
    first_padding_position: int,
    first_own_row: int,
) -> None:
    positions = window.position.flatten(1)[:, None].expand(bucket.shape("S R C"))
    padding_page = first_padding_position // PAGE_SIZE
    tables = torch.where(page_tables < 0, padding_page, page_tables).repeat_interleave(bucket.entries, 1)
    _copy(inputs.model, (positions, *_hidden_rows(bucket, window, first_own_row), tables))


def _hidden_rows(bucket: Bucket, window: _WindowCells, first_own_row: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(``hidden_rows``, ``predicted_by``, ``block_ends``, ``save_rows``) of ModelInputs.

    Args:
        first_own_row: row of ``Storage.hidden`` from which on rows are of this step alone.
    """
    S, R, W, L, M = (bucket.dims[letter] for letter in "SRWLM")
    block, offset, rows_per_seat = torch.arange(W)[:, None], torch.arange(L), 1 + M
    seat, start = window.seat.view(S, 1), window.start.view(S, 1)
    saved = seat * rows_per_seat + (start + torch.arange(1 + W)) % rows_per_seat
    before_window, save_rows = saved[:, 0], saved[:, 1:]
    rows = first_own_row + torch.arange(bucket.tokens).view(S, R, -1)
    last_cell = block[:, 0] * L + (window.block_size.view(S, 1) - 1).clamp_min(0)  # [S, W]
    block_ends = rows[:, 0].gather(1, last_cell)
    if not bucket.full_attention:
        rows[:, 0] = rows[:, 0].scatter(1, last_cell, save_rows)
    # The cell before a block's first cell is the last cell of the previous block that has a position.
    before_in_block = block * L + offset - 1
    last_of_previous_block = (block - 1) * L + window.block_size - 1
    cell_before = torch.where(offset > 0, before_in_block, last_of_previous_block)
    cell_before = cell_before.view(S, 1, -1).clamp_min(0).expand(S, R, -1)
    predicted_by = rows.gather(2, cell_before)
    predicted_by[:, :, 0] = before_window[:, None]
    return rows, predicted_by, block_ends, save_rows


def _copy(targets: List[Tensor], values: List[Tensor]) -> None:
    for target, value in zip(targets, values, strict=True):
        target.copy_(value.reshape(target.shape))
