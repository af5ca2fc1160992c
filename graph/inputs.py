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

from lopa_ascend.config import PIPELINED, DecodingParams, GraphSupport
from lopa_ascend.graph.buckets import MAX_EOS, Bucket, MaskLimits
from lopa_ascend.graph.tensors import RequestParams, StepInputs, specs
from lopa_ascend.kv.pages import PAGE_SIZE

NO_TOKEN = -1


class Kind(NamedTuple):
    """Decoding parameters that are compiled into all graphs of an engine; requests with other values run eagerly."""

    window_attention: str = "block_causal"
    confidence: str = "max_prob"


def unsupported(request: DecodingParams, num_ends: int, shape: Bucket, kind: Kind) -> str | None:
    """The field of a request that no graph of this shape and kind supports; None if graphs can decode the request.

    Which values graphs support is declared with each field of ``DecodingParams``.

    Args:
        num_ends: token ids that end the request.
    """
    sizes: dict[str, tuple[float, int]] = {  # (what the request needs, what the graphs hold)
        # A graph computes the number of its branches itself; the host cannot choose it.
        "num_branches": (math.inf if request.is_auto else 1 + request.lookaheads, shape.branches),
        "block_size": (request.block_size, shape.block_length),
        "eos_token_id": (num_ends, MAX_EOS),
    }
    for name, support in DecodingParams.graph_support().items():
        value = getattr(request, name)
        if support is GraphSupport.PIPELINED and value not in PIPELINED:
            return name
        if support is GraphSupport.DEFAULT and value != getattr(DecodingParams, name):
            return name
        if support is GraphSupport.COMPILED and value != getattr(kind, name):
            return name
        if support is GraphSupport.BUCKET:
            needed, held = sizes[name]
            if needed > held:
                return name
    return None


class HostView(NamedTuple):
    """What the host knows of a sequence when it launches a step. Blocks are numbered from 0 after the prompt.

    The window must hold all open blocks, and the next one if the step may open it; see ``window.next_window``.
    """

    seat: int
    prompt_length: int = 0
    block_size: int = 0
    max_canvas: int = 0
    window_start: int = 0
    """First block of the window. The blocks before it were final before the last launch."""
    last_start: int = 0
    """First block of the last launched window."""
    last_blocks: int = 0
    """Blocks of the bucket in which that window was launched."""
    max_open_blocks: int = 0
    """The most blocks that can be open. Once a token that ends the answer is filled, no further block opens."""
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
    values: dict[str, float] = {"eos": NO_TOKEN, "tau_conf": 1.0, "mask_limits": math.inf, "min_rank": math.inf}
    params = RequestParams(
        *(
            torch.full(seats.shape(spec.dims), values.get(name, 0), dtype=spec.dtype)
            for name, spec in specs(RequestParams).items()
        )
    )
    params.blank[:] = torch.tensor([mask, 0 if mask else 1])
    params.mask_limits[:, -1] = -1.0  # met by no block
    return params


def empty_states(num_seats: int, shape: Bucket) -> Tensor:
    """Packed states float32 [num_seats, X] without tokens, blocks and lookahead branches."""
    states = torch.zeros(num_seats, shape.dims["X"], dtype=torch.int32)
    states[:, -2 * shape.branches : -shape.branches] = -1  # State.lookahead_cells: none
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
        request: graphs support it, see ``unsupported``.
        ends: token ids that end the request.
        mask: token id of the mask.
        filled_to_add: filled positions that a whole block must have for another block to be opened.
        filled_to_activate: filled positions that a whole block must have for the next block to be fully activated.
    """
    neither_mask_nor_end = next(token for token in range(len(ends) + 2) if token != mask and token not in ends)
    params.blank[seat, 1] = neither_mask_nor_end
    params.eos[seat] = NO_TOKEN
    params.eos[seat, : len(ends)] = torch.tensor(ends, dtype=torch.int32)
    params.tau_conf[seat] = request.tau_conf
    params.activation_masks[seat] = request.block_size - filled_to_activate
    params.min_rank[seat] = math.inf
    params.min_rank[seat, : request.lookaheads] = 0.0
    columns = MaskLimits(params.mask_limits.shape[1] // 3 - 1)
    limits = params.mask_limits[seat, : columns.by_distance(columns.max_blocks + 1)]
    limits[:] = math.inf
    limits[columns.by_distance(1)] = request.block_size - filled_to_add
    if request.max_active_blocks is not None:
        limits[columns.by_distance(request.max_active_blocks) :] = 0.0


class Snapshot(NamedTuple):
    """A sequence between two steps: after the decisions of one, before the next one opens blocks."""

    window_start: int
    """Committed blocks."""
    tokens: List[int]
    """Token ids of the anchor's generated positions, masks included."""
    lookaheads: List[tuple[int, int]]
    """For each lookahead branch (generated position, token id)."""


def packed_state(blank: Tensor, request: DecodingParams, snapshot: Snapshot, shape: Bucket) -> Tensor:
    """A sequence's packed state float32 [X], for a window that begins at ``snapshot.window_start``.

    Args:
        blank: the seat's ``RequestParams.blank`` [2].
    """
    size, length = request.block_size, shape.block_length
    offset = torch.arange(length)
    position = (snapshot.window_start + torch.arange(shape.max_blocks)[:, None]) * size + offset
    has_position = (offset < size) & (position < request.max_canvas)
    cells = blank[(~has_position).long()]
    is_given = has_position & (position < len(snapshot.tokens))
    cells[is_given] = torch.tensor(snapshot.tokens, dtype=torch.int32)[position[is_given]]
    num_open_blocks = -(-len(snapshot.tokens) // size)
    counts = torch.tensor([num_open_blocks, len(snapshot.lookaheads)], dtype=torch.int32)
    lookahead_cells = torch.full((shape.branches,), -1, dtype=torch.int32)
    lookahead_tokens = torch.zeros(shape.branches, dtype=torch.int32)
    for branch, (generated, token) in enumerate(snapshot.lookaheads):
        lookahead_cells[branch] = generated // size * length + generated % size
        lookahead_tokens[branch] = token
    return torch.cat([cells.flatten(), blank, counts, lookahead_cells, lookahead_tokens]).view(torch.float32)


# ---- inputs of a launch --------------------------------------------------------------------------------------------


class _WindowCells:
    """The cells of every sequence's window in a step, int64 [S, W, L] unless stated otherwise."""

    def __init__(self, views: List[HostView], bucket: Bucket) -> None:
        columns: list[Tensor] = list(torch.tensor(views).t()[..., None, None])  # [S, 1, 1] each
        (self.seat, self.prompt_length, self.block_size, self.max_canvas, self.start, self.last_start,
         self.last_blocks, self.max_open_blocks, self.num_shared_pages) = columns  # fmt: skip
        self.block = self.start + torch.arange(bucket.blocks)[:, None]  # [S, W, 1]
        self.offset = torch.arange(bucket.block_length)  # [L]
        generated = self.block * self.block_size + self.offset
        self.has_position = (self.offset < self.block_size) & (generated < self.max_canvas)
        # A cell without a position gets one inside the sequence, and is written to a padding slot.
        inside = torch.minimum(generated, self.max_canvas - 1)
        self.position = (self.prompt_length + inside).clamp_min(0)

    def block_ends(self) -> Tensor:
        """The position after each block [S, W]."""
        end = torch.minimum((self.block + 1) * self.block_size, self.max_canvas)
        return (self.prompt_length + end).flatten(1)


def write_inputs(
    inputs: StepInputs,
    bucket: Bucket,
    views: List[HostView],
    page_tables: Tensor,
    params: RequestParams,
    first_padding_slot: int,
) -> Tensor:
    """Fills the inputs of a step.

    Args:
        views: one for each of the S sequences; of padding rows only the seat counts.
        page_tables: page ids by slot, int32 [S, R, P]; -1 where there is no page.
        params: of all seats.
        first_padding_slot: the T cache positions from here on are never read.

    Returns:
        The ends of the windows' blocks, int64 [S, W]: in a block-causal window the KV lengths of its entries.
    """
    window = _WindowCells(views, bucket)
    _write_launch(inputs, bucket, window, page_tables, first_padding_slot)
    for target, values in zip(inputs.params, params, strict=True):
        torch.index_select(values, 0, window.seat.flatten(), out=target)
    _write_model_inputs(inputs, bucket, window, page_tables, first_padding_slot)
    return window.block_ends()


def _write_launch(
    inputs: StepInputs, bucket: Bucket, window: _WindowCells, page_tables: Tensor, first_padding_slot: int
) -> None:
    dims, limits = bucket.dims, MaskLimits(bucket.max_blocks)
    # A packed state holds the cells of the last window as the last step left them; all other cells are blank.
    last_block = window.block - window.last_start
    in_last_window = (last_block >= 0) & (last_block < window.last_blocks)
    cell_column = last_block * dims["L"] + window.offset
    blank_column = dims["M"] * dims["L"] + (~window.has_position).long()
    token_index = window.seat * dims["X"] + torch.where(in_last_window, cell_column, blank_column)
    limit_base = limits.base_by_distance(window.block[..., 0])
    # More blocks than a window can reach make no difference, and would lead out of the columns.
    max_open = torch.minimum(window.max_open_blocks, window.start + bucket.max_blocks + 1)
    limit_base[:, 0] = limits.base_by_room(max_open.view(-1))
    limit_base += torch.arange(bucket.sequences)[:, None] * limits.size
    cells = window.block * dims["L"] + window.offset
    slot_mapping = _slot_mapping(bucket, window, page_tables, first_padding_slot)
    _copy(inputs.launch, (window.seat, token_index, cells, window.block, limit_base, slot_mapping))


def _slot_mapping(bucket: Bucket, window: _WindowCells, page_tables: Tensor, first_padding_slot: int) -> Tensor:
    """Flat cache positions int64 [S, R, C]. Slot 0 writes the pages that all slots share."""
    position = window.position.flatten(1)[:, None]  # [S, 1, C]
    column = (position // PAGE_SIZE).expand(bucket.shape("S R C"))
    page = page_tables.long().gather(2, column.clamp_max(bucket.pages - 1))
    is_private = (column >= window.num_shared_pages) | (torch.arange(bucket.slots)[:, None] == 0)
    has_page = (column < bucket.pages) & (page >= 0)
    is_written = window.has_position.flatten(1)[:, None] & has_page & is_private
    padding = first_padding_slot + torch.arange(bucket.tokens).view(bucket.shape("S R C"))
    mapping: Tensor = torch.where(is_written, page * PAGE_SIZE + position % PAGE_SIZE, padding)
    return mapping


def _write_model_inputs(
    inputs: StepInputs, bucket: Bucket, window: _WindowCells, page_tables: Tensor, first_padding_slot: int
) -> None:
    positions = window.position.flatten(1)[:, None].expand(bucket.shape("S R C"))
    predicted_by, saved = _seen_hidden_states(bucket, window.block_size)
    rows_per_seat = 1 + bucket.max_blocks
    before_window = window.seat * rows_per_seat + window.start - window.last_start
    save_rows = window.seat.view(-1, 1) * rows_per_seat + torch.arange(1 + bucket.blocks)
    padding_page = first_padding_slot // PAGE_SIZE
    tables = torch.where(page_tables < 0, padding_page, page_tables).repeat_interleave(bucket.entries, 1)
    _copy(inputs.model, (positions, predicted_by, saved, before_window, save_rows, tables))


def _seen_hidden_states(bucket: Bucket, block_size: Tensor) -> tuple[Tensor, Tensor]:
    """(``predicted_by``, ``saved``) of ModelInputs.

    Args:
        block_size: int64 [S, 1, 1].
    """
    S, R, W, L, C = (bucket.dims[letter] for letter in "SRWLC")
    sequence, block, offset = torch.arange(S)[:, None], torch.arange(W)[:, None], torch.arange(L)
    # The cell before a block's first one is the last cell with a position of the block before it.
    cell_before = torch.where(offset > 0, block * L + offset, (block - 1) * L + block_size) - 1
    first_token = S + (torch.arange(S * R) * C).view(S, R, 1)
    predicted_by = first_token + cell_before.view(S, 1, -1)
    predicted_by[:, :, 0] = sequence  # the hidden state before the window
    last_cell = block[:, 0] * L + (block_size.view(S, 1) - 1).clamp_min(0)
    block_ends = S + sequence * R * C + last_cell  # in slot 0
    return predicted_by, torch.cat([sequence, block_ends], 1)


def _copy(targets: List[Tensor], values: List[Tensor]) -> None:
    for target, value in zip(targets, values, strict=True):
        target.copy_(value.reshape(target.shape))
