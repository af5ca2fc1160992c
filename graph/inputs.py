"""What the host gives a compiled step: the parameters of its requests, what it knows of them, and constants.

A launch needs nothing of what the step just before it does, so the host may launch a step before it has read the last
one. Dimensions as in ``graph/buckets.py`` and ``policy.py``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lopa_ascend.config import DecodingParams
from lopa_ascend.graph.buckets import Bucket
from lopa_ascend.graph.policy import Launch, Params, Tables
from lopa_ascend.kv.pages import PAGE_SIZE

NO_TOKEN = -1
MAX_EOS = 8
"""E: EOS ids that a request may have in a graph."""


class Kind(NamedTuple):
    """What all graphs of an engine do alike; requests that ask for other values run eager."""

    window_attention: str = "block_causal"
    confidence: str = "max_prob"


def unsupported(request: DecodingParams, num_eos: int, shape: Bucket, kind: Kind) -> str | None:
    """Which field of a request makes its steps run eager; None if graphs of this shape and kind can do all of it.
    Graphs score by the mean of confidences at temperature 0."""
    for name in ("temperature", "branch_score", "creation_weight", "min_new_tokens"):
        if getattr(request, name) != getattr(DecodingParams, name):
            return name
    for name, value in kind._asdict().items():
        if getattr(request, name) != value:
            return name
    room = {
        "num_branches": (1 + request.lookaheads, shape.branches),
        "block_size": (request.block_size, shape.length),
        "eos_token_id": (0 if request.ignore_eos else num_eos, MAX_EOS),
    }
    return next((name for name, (asked, most) in room.items() if asked > most), None)


class Known(NamedTuple):
    """What the host knows of a sequence when it launches a step.

    Its ``seat``, where nobody is one that nobody ever had. Lengths of the prompt, of a block, and of all that may be
    generated. Blocks: the window begins at ``first``, those before it are committed: what had settled before the last
    step; the last step's window had ``held`` blocks and began at ``before``; at most ``caps`` may be open, all of the
    sequence or, once an EOS is known, those that are. ``shared`` pages are the same in all slots.

    A window must reach the block after the open ones, if there may be one; a host that is a step late counts one more.
    """

    seat: int
    prompt: int = 0
    block_size: int = 0
    length: int = 0
    first: int = 0
    before: int = 0
    held: int = 0
    caps: int = 0
    shared: int = 0


class ModelInputs(NamedTuple):
    """What the model gets of a launch, int32, T = S * R * C tokens.

    ``positions`` [T], absolute. The **seen** hidden states are those of the positions before the windows [S] and of all
    tokens [T]: ``source`` [T] says which of them predicts a token's cell. ``last`` [S] are the rows of the kept ones
    that come before the windows; afterwards those that ``keep`` [S * (1 + W)] names are written to the rows ``kept``: a
    seat has 1 + M, for the state before the window and, in slot 0, at the end of each block. ``page_tables`` of the
    entries, [S * R * W, P] or, of full windows, [S * R, P].
    """

    positions: Tensor
    source: Tensor
    keep: Tensor
    last: Tensor
    kept: Tensor
    page_tables: Tensor


class Inputs(NamedTuple):
    """Everything that changes from step to step but the entries' lengths. They lie in one piece of memory."""

    launch: Launch
    params: tuple[Tensor, ...]
    model: ModelInputs


def _shapes(bucket: Bucket) -> list[tuple[int, ...]]:
    """Of a bucket's inputs, in their order: launch, parameters, model."""
    S, W, P, B, R, L, M, _ = bucket
    C, E = W * L, bucket.entries
    shapes: list[tuple[int, ...]] = [(S,), (S * C,), (S, C), (S, W), (S * W,), (S, R, C)]
    shapes += [(S, 2), (S, MAX_EOS), (S,), (S,), (S, 3 * M + 3), (S, B)]
    return [*shapes, (S * R * C,), (S * R * C,), (S * (1 + W),), (S,), (S * (1 + W),), (S * R * E, P)]


def views(memory: Tensor, bucket: Bucket) -> Inputs:
    """A bucket's inputs, contiguous in the ``input_size`` elements of ``memory`` int32."""
    shapes = _shapes(bucket)
    parts = memory.split([math.prod(shape) for shape in shapes])
    pieces = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
    fresh, eos, *numbers = pieces[6:12]
    return Inputs(
        Launch(*pieces[:6]), (fresh, eos, *(piece.view(torch.float32) for piece in numbers)), ModelInputs(*pieces[12:])
    )


def input_size(bucket: Bucket) -> int:
    """Elements that ``views`` takes."""
    return sum(map(math.prod, _shapes(bucket)))


def packed_size(shape: Bucket) -> int:
    """X: elements of a packed state."""
    return shape.capacity * shape.length + 4 + 2 * shape.branches


def tables_for(bucket: Bucket, trash: int) -> Tables:
    """S * R * C cache positions from ``trash`` on are nobody's."""
    S, W, _, B, R, L, M, _ = bucket
    branch, cell, block = torch.arange(B, dtype=torch.int32), torch.arange(W * L), torch.arange(W)
    mine = (cell // L)[:, None]
    return Tables(
        branch=branch,
        row=torch.arange(S * B).view(S, B),
        earlier=(branch < branch[:, None]).long(),
        later=cell > cell[:, None],
        before=(mine == block - 1).float(),
        upto=(mine <= block).float(),
        rest=torch.zeros(S, (M - W) * L, dtype=torch.int32),
        trash=trash + torch.arange(S * R * W * L, dtype=torch.int32).view(S, R, W * L),
        in_block=(torch.arange(1 + W) > 0).long(),
    )


# ---- of a request --------------------------------------------------------------------------------------------------


def nobody(seats: int, mask: int, shape: Bucket) -> Params:
    """Parameters of ``seats`` seats without a request."""
    bounds = torch.full((seats, 3 * shape.capacity + 3), math.inf)
    bounds[:, -1] = -1.0
    return Params(
        mask=mask,
        fresh=torch.tensor([mask, 0 if mask else 1], dtype=torch.int32).repeat(seats, 1),
        eos=torch.full((seats, MAX_EOS), NO_TOKEN, dtype=torch.int32),
        tau_conf=torch.ones(seats),
        slack=torch.zeros(seats),
        bounds=bounds,
        worst=torch.full((seats, shape.branches), math.inf),
    )


def no_states(seats: int, shape: Bucket) -> Tensor:
    """Packed states [seats, X] of nobody."""
    states = torch.zeros(seats, packed_size(shape), dtype=torch.int32)
    states[:, -2 * shape.branches : -shape.branches] = -1
    return states.view(torch.float32)


def admit(params: Params, seat: int, request: DecodingParams, eos: Sequence[int], add: int, act: int) -> None:
    """Writes a request's parameters, which ``unsupported`` has passed, into a seat. ``add`` and ``act``: how many
    positions of a whole block must be filled for another one to be added, and for the next to be fully activated."""
    eos = () if request.ignore_eos else eos
    M = params.bounds.shape[1] // 3 - 1
    params.fresh[seat, 1] = next(t for t in range(len(eos) + 2) if t != params.mask and t not in eos)
    params.eos[seat] = NO_TOKEN
    params.eos[seat, : len(eos)] = torch.tensor(eos, dtype=torch.int32)
    params.tau_conf[seat] = request.tau_conf
    params.slack[seat] = request.block_size - act
    params.worst[seat] = math.inf
    params.worst[seat, : request.lookaheads] = 0.0
    bounds = params.bounds[seat, : 2 * M + 1]  # at M + d: of the d-th block from the end
    bounds[:] = math.inf
    bounds[M + 1] = request.block_size - add
    if request.max_active_blocks is not None:
        bounds[M + request.max_active_blocks :] = 0.0


def packed_state(
    params: Params,
    seat: int,
    request: DecodingParams,
    first: int,
    tokens: Sequence[int],
    lookaheads: Sequence[tuple[int, int]],
    shape: Bucket,
) -> Tensor:
    """[X]: a sequence as it is before blocks are added. ``tokens`` are the anchor's generated ids, masks
    included, ``first`` of its blocks are committed, and each of ``lookaheads`` is (generated position, token)."""
    size, length = request.block_size, shape.length
    offset = torch.arange(length)
    at = (first + torch.arange(shape.capacity)[:, None]) * size + offset
    inside = (offset < size) & (at < request.max_new_tokens)
    cells = params.fresh[seat][(~inside).long()]
    given = inside & (at < len(tokens))
    cells[given] = torch.tensor(tokens, dtype=torch.int32)[at[given]]
    counts = torch.tensor([-(-len(tokens) // size), len(lookaheads)], dtype=torch.int32)
    branches = torch.stack([torch.full((shape.branches,), -1), torch.zeros(shape.branches)]).to(torch.int32)
    for branch, (position, token) in enumerate(lookaheads):
        branches[0, branch] = position // size * length + position % size
        branches[1, branch] = token
    return torch.cat([cells.flatten(), params.fresh[seat], counts, branches.flatten()]).view(torch.float32)


# ---- of a step -----------------------------------------------------------------------------------------------------


def write_inputs(
    inputs: Inputs, bucket: Bucket, known: Sequence[Known], pages: Tensor, params: Params, trash: int
) -> Tensor:
    """Fills the inputs of a step of ``known`` [S] sequences, whose slots have the page tables ``pages`` int32
    [S, R, P], -1 where there is none; ``trash`` as in ``tables_for``. Returns the ends of the windows' blocks, int64
    [S, W]: as many positions are seen from each in a block-causal window."""
    S, W, P, _, R, L, M, _ = bucket
    columns = torch.tensor(known).t()[..., None, None]  # [S, 1, 1] each
    seat, prompt, size, length, first, before, held, caps, shared = columns
    block, offset = first + torch.arange(W)[:, None], torch.arange(L)  # [S, W, 1], [L]
    at = block * size + offset
    inside = (offset < size) & (at < length)
    old = block - before
    origin = torch.where((old >= 0) & (old < held), old * L + offset, M * L + (~inside).long())
    bound = M + 1 - block[..., 0]
    bound[:, 0] = 3 * M + 2 - torch.minimum(caps, first + M + 1).view(S)  # nothing stands before the window
    bound += torch.arange(S)[:, None] * (3 * M + 3)
    _copy(inputs.launch[:5], (seat, origin + seat * packed_size(bucket), block * L + offset, block, bound))
    for target, values in zip(inputs.params, params[1:], strict=True):
        torch.index_select(values, 0, seat.flatten(), out=target)

    positions = (prompt + torch.minimum(at, length - 1)).clamp_min(0).view(S, 1, -1)
    column = (positions // PAGE_SIZE).expand(S, R, -1)
    page = pages.long().gather(2, column.clamp_max(P - 1))
    own = (column >= shared) | (torch.arange(R)[:, None] == 0)
    writable = inside.view(S, 1, -1) & (column < P) & (page >= 0) & own
    nowhere = trash + torch.arange(S * R * W * L).view(S, R, -1)
    inputs.launch.locations.copy_(torch.where(writable, page * PAGE_SIZE + positions % PAGE_SIZE, nowhere))
    tables = torch.where(pages < 0, trash // PAGE_SIZE, pages).repeat_interleave(bucket.entries, 1)
    last = seat * (1 + M) + first - before
    kept = seat.view(S, 1) * (1 + M) + torch.arange(1 + W)
    _copy(inputs.model, (positions.expand(S, R, -1), *_seen(bucket, size), last, kept, tables))
    edges: Tensor = prompt + torch.minimum((block + 1) * size, length)
    return edges.view(S, W)


def _seen(bucket: Bucket, size: Tensor) -> tuple[Tensor, Tensor]:
    """(source, keep) of ModelInputs for blocks of ``size`` [S, 1, 1]."""
    S, W, _, _, R, L, *_ = bucket
    sequence, block, offset = torch.arange(S)[:, None], torch.arange(W)[:, None], torch.arange(L)
    before_it = torch.where(offset > 0, block * L + offset, (block - 1) * L + size) - 1
    source = S + (torch.arange(S * R) * W * L).view(S, R, 1) + before_it.view(S, 1, -1)
    source[:, :, 0] = sequence
    ends = S + sequence * R * W * L + block[:, 0] * L + (size.view(S, 1) - 1).clamp_min(0)
    return source, torch.cat([sequence, ends], 1)


def _copy(targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for target, value in zip(targets, values, strict=True):
        target.copy_(value.reshape(target.shape))
