"""The decode policy as tensor functions of fixed shape, for use inside a compiled step.

``decode/`` is the definition; this does the same for S sequences at once and reads no value on the host. A step is
``lay_out`` (the branches), the forward pass over what ``writes`` gives, and ``advance`` (winner, fills, next branches).
``launch_for`` and ``progress`` are the host's part. A launch needs nothing of what the step just before it does, so the
host may launch a step before it has read the last one.

Dimensions: S sequences, B branches, W blocks of the window, L positions a block, C = W * L cells, E EOS ids, R slots of
a rank, P pages of a slot, M blocks of the largest window. They are a bucket's, and never change inside it.

A **cell** is the place of a generated position, numbered block * L + offset from the end of the prompt on. Blocks may
be shorter than L, a sequence's last one shorter still; cells behind their end hold no position. Row i is branch i in
evaluation order, and what follows the anchor repeats it.

An NPU's vector cores decide how things are said: they find maxima of float32 but not of int32, select no bool, sort no
integers and scatter nothing in a GE graph; torchair knows no minimum over a dimension. Ranks are unique before anything
is sorted by them, and sums that can pass 2^31 are int64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lopa_ascend.config import DecodingParams
from lopa_ascend.pages import PAGE_SIZE

STEP = 2.0**-16
"""Branch scores are sums of confidences rounded to multiples of it, half to even."""
NOT_FINITE = -(2.0**20)
"""The confidence that says that a logit was not finite."""
FAILED = 1 << 35
"""A branch's deficit from which on a logit of it was not finite."""
NO_TOKEN = -1


def unsupported(params: DecodingParams) -> str | None:
    """What a request asks for that only ``decode/`` can do; None if there is nothing."""
    if params.branch_score != "mean":
        return f"branch_score {params.branch_score!r}"
    if params.creation_weight:
        return f"creation_weight {params.creation_weight}"
    return None


# ---- what goes in and out ------------------------------------------------------------------------------------------


class Bucket(NamedTuple):
    """S, B, W, L and M, with C >= B."""

    sequences: int
    branches: int
    blocks: int
    length: int
    capacity: int


class Tables(NamedTuple):
    """Constants of a bucket (``tables_for``). ``branch`` int32 [B] and ``row`` int64 [S, B] count; ``earlier`` int64
    [B, B] is 1 where the column's branch comes before the row's; ``later`` bool [C, C]: the column's cell comes after
    the row's; ``before`` and ``upto`` float32 [C, W] are 1 where the cell lies in the block before, and in no later
    one. ``rest`` int32 [S, (M - W) * L] fills up the state's tokens."""

    branch: Tensor
    row: Tensor
    earlier: Tensor
    later: Tensor
    before: Tensor
    upto: Tensor
    rest: Tensor


class Params(NamedTuple):
    """The requests' parameters (``admit``); ``mask`` is the model's.

    ``fresh`` int32 [S, 2]: what a cell holds at first, the mask, or without a position a token that is neither mask nor
    EOS. ``eos`` int32 [S, E]. ``tau_conf`` and ``slack`` float32 [S]: how many masks a block may have for the next one
    to be fully activated. ``bounds`` float32 [S, 3 M + 3]: how many a block may have for another to be added, by its
    distance from the end. ``worst`` float32 [S, B]: the rank that lookahead b must reach, infinite from k on.
    """

    mask: int
    fresh: Tensor
    eos: Tensor
    tau_conf: Tensor
    slack: Tensor
    bounds: Tensor
    worst: Tensor


class State(NamedTuple):
    """What a step carries on, all int32. ``tokens`` [S, M * L + 2]: the last winner's window, and in the last two
    columns ``Params.fresh``; ``ends`` [S] generated blocks are open. ``lookaheads`` [S] branches stand before the
    anchor: branch b fills cell ``position`` [S, B], -1 for none, with ``token`` [S, B] on top of the anchor."""

    tokens: Tensor
    ends: Tensor
    lookaheads: Tensor
    position: Tensor
    token: Tensor


class Launch(NamedTuple):
    """What the host decides of a step (``launch_for``), all int32.

    ``origin`` [S, C]: where the window's cells stand in the state's tokens (flat); ``cells`` [S, C] and ``blocks``
    [S, W]: their numbers; ``at`` [S, W]: what to add to ``ends`` to find the bounds. ``locations`` [S, R, C]: cache
    positions; ``trash`` [S, R, C]: distinct ones that nobody reads.

    For the model: ``positions`` [S, C], absolute; ``source`` [S, C], whose hidden state predicts a cell: 0 is the
    position before the window, 1 + c is cell c; ``kv_lengths`` [S, W] of block-causal entries.
    """

    origin: Tensor
    cells: Tensor
    blocks: Tensor
    at: Tensor
    locations: Tensor
    trash: Tensor
    positions: Tensor
    source: Tensor
    kv_lengths: Tensor


class Rows(NamedTuple):
    """The branches of a step: ``tokens`` int32 and ``masked`` bool [S, B, C]; ``ends`` int32 [S, B] open blocks;
    ``exists`` bool [S, B, W], blocks whose keys and values are kept; ``previous`` float32 [S, B, W], masks in the block
    before."""

    tokens: Tensor
    masked: Tensor
    ends: Tensor
    exists: Tensor
    previous: Tensor


class Predicted(NamedTuple):
    """``tokens`` int32, ``max_probs`` and ``confidences`` float32 [S, B, C], of which those of masked cells count.
    Where a logit was not finite the confidence is NOT_FINITE and the token any id."""

    tokens: Tensor
    max_probs: Tensor
    confidences: Tensor


class Outcome(NamedTuple):
    """What a step did. ``winner`` int64 [S]: s * B + branch. For the winner's window [S, C]: ``filled`` bool, without
    its lookahead; ``tokens`` int32 after it; ``max_probs`` and ``confidences`` float32 as predicted. ``deficits`` and
    ``counts`` int64 [S, B]: a branch of n masks has the score 1 - STEP * deficit / n, or 1 for none."""

    winner: Tensor
    filled: Tensor
    tokens: Tensor
    max_probs: Tensor
    confidences: Tensor
    deficits: Tensor
    counts: Tensor


# ---- in the compiled step ------------------------------------------------------------------------------------------


def lay_out(params: Params, state: State, launch: Launch, tables: Tables) -> Rows:
    """Adds blocks to the branches and says what each of them holds."""
    S, B = state.position.shape
    W = launch.blocks.shape[1]
    anchor = state.tokens.view(-1).index_select(0, launch.origin.view(-1)).view(S, 1, -1)
    here = state.position[:, :, None] == launch.cells[:, None]
    tokens = torch.where(here, state.token[:, :, None], anchor)
    blank = tokens == params.mask
    ones = blank.to(torch.float32).view(S * B, -1)  # counted by matrix products, exact in any format
    previous = (ones @ tables.before).view(S, B, W)
    at = (state.ends[:, None] + launch.at).view(-1)
    bounds = params.bounds.view(-1).index_select(0, at).view(S, 1, W)
    closed = (previous > bounds).any(-1)
    ended = (tokens[..., None] == params.eos[:, None, None]).view(S, B, -1).any(-1)
    ends = state.ends[:, None]
    ends = torch.where(closed | ended, ends, ends + 1)
    live = tables.branch <= state.lookaheads[:, None]
    # Blocks that the next commit takes are written in every slot, whether it has a branch or not.
    settled = ((ones @ tables.upto) == 0.0).view(S, B, W)
    exists = settled | (live[..., None] & (launch.blocks[:, None] < ends[..., None]))
    masked = (blank.view(S, B, W, -1) & exists[..., None]).view(S, B, -1)
    return Rows(tokens, masked, ends, exists, previous)


def writes(rows: Rows, launch: Launch, size: int = 1, group: int = 0) -> tuple[Tensor, Tensor]:
    """(tokens, cache positions) int32 [S, R, C] of the rows of branch-parallel group ``group`` of ``size``: branch i
    has slot i div size of group i mod size. Keys and values of what does not exist go to trash."""
    S, R, _ = launch.locations.shape
    exists, tokens = rows.exists, rows.tokens
    if size > 1:
        exists, tokens = exists[:, group::size], tokens[:, group::size]
    locations, trash = (x.view(S, R, exists.shape[2], -1) for x in (launch.locations, launch.trash))
    return tokens, torch.where(exists[..., None], locations, trash).view(S, R, -1)


def advance(params: Params, launch: Launch, rows: Rows, predicted: Predicted, tables: Tables) -> tuple[State, Outcome]:
    """Picks the winner, fills it, and grows the next branches from it."""
    S, B, C = rows.tokens.shape
    W = launch.blocks.shape[1]
    winner, deficits, counts = _select(rows, predicted, tables)

    def of_winner(x: Tensor) -> Tensor:
        return x.view(S * B, -1).index_select(0, winner)

    tokens, masked, ends = of_winner(rows.tokens), of_winner(rows.masked), of_winner(rows.ends).view(S)
    guesses, probs, confidences = (of_winner(x) for x in predicted)
    # The rank of a cell: C where tau_conf accepts, -1 without a mask. A block fills what reaches its threshold.
    rank = torch.where(probs > params.tau_conf[:, None], float(C), _standing(confidences, tables.later))
    rank = torch.where(masked, rank, -1.0)
    activated = of_winner(rows.previous) <= params.slack[:, None]
    threshold = torch.where(activated, rank.view(S, W, -1).max(-1).values, float(C))
    filled = (rank.view(S, W, -1) >= threshold[..., None]).view(S, C) & masked
    tokens = torch.where(filled, guesses, tokens)
    reached, chosen = torch.where(filled, -1.0, rank).topk(B)
    spawned = reached >= params.worst
    state = State(
        tokens=torch.cat([tokens, tables.rest, params.fresh], 1),
        ends=ends,
        lookaheads=spawned.sum(-1, dtype=torch.int32),
        position=torch.where(spawned, launch.cells.gather(1, chosen), -1),
        token=guesses.gather(1, chosen),
    )
    return state, Outcome(winner, filled, tokens, probs, confidences, deficits, counts)


def _select(rows: Rows, predicted: Predicted, tables: Tables) -> tuple[Tensor, Tensor, Tensor]:
    """(winner, deficits, counts) as in Outcome: the least mean deficit, of equal ones the first.

    Means are compared as fractions of integers; float32 holds a cell's deficit exactly up to a confidence of -254. To a
    row without masks, as it counts 0, every later one loses and no earlier one: of the branches only row 0 can be
    without, whose score is 1, and what is no branch comes last.
    """
    deficit = 1.0 / STEP - (predicted.confidences / STEP).round()
    deficit = torch.where(rows.masked, deficit, 0.0)
    deficits, counts = deficit.to(torch.int64).sum(-1), rows.masked.sum(-1)
    mine = deficits[:, :, None] * counts[:, None, :]
    others = deficits[:, None, :] * counts[:, :, None]
    loses = (others < mine + tables.earlier).any(-1)
    return torch.where(loses, 0, tables.row).sum(-1), deficits, counts


def _standing(confidences: Tensor, later: Tensor) -> Tensor:
    """float32 [S, C]: how many cells each one of [S, C] is ahead of in the order of (-confidence, position)."""
    mine, others = confidences[:, :, None], confidences[:, None, :]
    ahead = (mine > others) | ((mine == others) & later)
    return ahead.sum(-1, dtype=torch.float32)


# ---- on the host ---------------------------------------------------------------------------------------------------


class Known(NamedTuple):
    """What the host knows of every sequence when it launches a step, int32 [S] each; all 0 where there is none.

    Lengths of the prompt, of a block, and of all that may be generated. Blocks: the window begins at ``first``, those
    before it are committed: what had ``settled`` before the last step; the last step's window began at ``before``; at
    most ``caps`` may be open, all of the sequence or, once an EOS is known, those that are. ``shared`` pages are the
    same in all slots of a sequence.

    A window must reach the block after the open ones, if there may be one; a host that is a step late counts one more.
    """

    prompt: Tensor
    block_size: Tensor
    length: Tensor
    first: Tensor
    before: Tensor
    caps: Tensor
    shared: Tensor


class Progress(NamedTuple):
    """What a step means for the host. bool [S]: ``done``, nothing is left to compute; ``failed``, a logit was not
    finite. ``settled`` int32 [S] blocks are committed by the next forward pass. ``tokens`` int32 [S, C]: the window's,
    with the token of a lookahead branch that has won without one."""

    done: Tensor
    failed: Tensor
    settled: Tensor
    tokens: Tensor


def tables_for(bucket: Bucket) -> Tables:
    S, B, W, L, M = bucket
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
    )


def empty(bucket: Bucket, mask: int, num_eos: int) -> tuple[Params, State]:
    """Parameters and state of no sequence, with room for ``num_eos`` EOS ids each."""
    S, B, _, L, M = bucket
    none = 0 if mask else 1
    fresh = torch.tensor([mask, none], dtype=torch.int32).repeat(S, 1)
    bounds = torch.full((S, 3 * M + 3), math.inf)
    bounds[:, -1] = -1.0
    params = Params(
        mask=mask,
        fresh=fresh,
        eos=torch.full((S, num_eos), NO_TOKEN, dtype=torch.int32),
        tau_conf=torch.ones(S),
        slack=torch.zeros(S),
        bounds=bounds,
        worst=torch.full((S, B), math.inf),
    )
    count, branches = torch.zeros(S, dtype=torch.int32), torch.zeros(S, B, dtype=torch.int32)
    tokens = torch.cat([torch.zeros(S, M * L, dtype=torch.int32), fresh], 1)
    return params, State(tokens, count, count.clone(), branches - 1, branches)


def admit(params: Params, row: int, request: DecodingParams, eos: Sequence[int], add: int, act: int) -> None:
    """Writes a request's parameters into a row. ``add`` and ``act``: how many positions of a whole block must be filled
    for another one to be added, and for the next to be fully activated.

    Raises:
        ValueError: more lookahead branches or EOS ids than there is room for.
    """
    eos = () if request.ignore_eos else eos
    room = {"num_branches": (request.lookaheads, params.worst.shape[1] - 1), "EOS ids": (len(eos), params.eos.shape[1])}
    for name, (asked, most) in room.items():
        if asked > most:
            raise ValueError(f"{asked} {name}; this bucket has room for {most}")
    M = params.bounds.shape[1] // 3 - 1
    params.fresh[row, 1] = next(t for t in range(len(eos) + 2) if t != params.mask and t not in eos)
    params.eos[row] = NO_TOKEN
    params.eos[row, : len(eos)] = torch.tensor(eos, dtype=torch.int32)
    params.tau_conf[row] = request.tau_conf
    params.slack[row] = request.block_size - act
    params.worst[row] = math.inf
    params.worst[row, : request.lookaheads] = 0.0
    bounds = params.bounds[row, : 2 * M + 1]  # at M + d: of the d-th block from the end
    bounds[:] = math.inf
    bounds[M + 1] = request.block_size - add
    if request.max_active_blocks is not None:
        bounds[M + request.max_active_blocks :] = 0.0


def seat(
    params: Params,
    state: State,
    row: int,
    request: DecodingParams,
    first: int,
    tokens: Sequence[int],
    lookaheads: Sequence[tuple[int, int]],
) -> None:
    """Writes a sequence into a row, as it is before blocks are added: ``tokens`` are the anchor's generated ids, masks
    included, ``first`` of its blocks are committed, and each of ``lookaheads`` is (generated position, token)."""
    size, capacity = request.block_size, params.bounds.shape[1] // 3 - 1
    length = state.tokens.shape[1] // capacity
    offset = torch.arange(length)
    at = (first + torch.arange(capacity)[:, None]) * size + offset
    inside = (offset < size) & (at < request.max_new_tokens)
    cells = params.fresh[row][(~inside).long()]
    given = inside & (at < len(tokens))
    cells[given] = torch.tensor(tokens, dtype=torch.int32)[at[given]]
    state.tokens[row] = torch.cat([cells.flatten(), params.fresh[row]])
    state.ends[row] = -(-len(tokens) // size)
    state.lookaheads[row] = len(lookaheads)
    for branch, (position, token) in enumerate(lookaheads):
        state.position[row, branch] = position // size * length + position % size
        state.token[row, branch] = token


def launch_for(bucket: Bucket, known: Known, held: int, pages: Tensor, trash: int) -> Launch:
    """The launch of a step whose slots have the page tables ``pages`` int32 [S, R, P], -1 where there is no page. The
    state holds a window of ``held`` blocks. S * R * C cache positions from ``trash`` on are nobody's."""
    S, _, W, L, M = bucket
    R, P = pages.shape[1:]
    prompt, size, length, first, before, caps, shared = (x[:, None, None].long() for x in known)
    block, offset = first + torch.arange(W)[:, None], torch.arange(L)  # [S, W, 1], [L]
    at = block * size + offset
    inside = (offset < size) & (at < length)
    old = block - before
    origin = torch.where((old >= 0) & (old < held), old * L + offset, M * L + (~inside).long())
    positions = (prompt + torch.minimum(at, length - 1)).clamp_min(0).view(S, 1, -1)
    column = (positions // PAGE_SIZE).expand(S, R, -1)
    page = pages.long().gather(2, column.clamp_max(P - 1))
    own = (column >= shared) | (torch.arange(R)[:, None] == 0)
    writable = inside.view(S, 1, -1) & (column < P) & (page >= 0) & own
    found = page * PAGE_SIZE + positions % PAGE_SIZE
    nowhere = trash + torch.arange(S * R * W * L).view(S, R, -1)
    bound = M + 1 - block[..., 0]
    bound[:, 0] = 3 * M + 2 - torch.minimum(caps, first + M + 1).view(S)  # nothing stands before the window
    local = torch.arange(W)[:, None]
    source = torch.where(offset > 0, local * L + offset, torch.where(local > 0, (local - 1) * L + size, 0))

    def flat(x: Tensor) -> Tensor:
        return x.to(torch.int32).view(S, -1)

    sequence = torch.arange(S)[:, None]
    return Launch(
        origin=flat(origin) + (sequence * (M * L + 2)).to(torch.int32),
        cells=flat(block * L + offset),
        blocks=flat(block),
        at=flat(bound + sequence * (3 * M + 3)),
        locations=torch.where(writable, found, nowhere).to(torch.int32),
        trash=nowhere.to(torch.int32),
        positions=flat(positions),
        source=flat(source),
        kv_lengths=flat(prompt + torch.minimum((block + 1) * size, length)),
    )


def progress(params: Params, finish: Tensor, known: Known, launch: Launch, state: State, outcome: Outcome) -> Progress:
    """What the host makes of a step, from copies of what came out of it. ``finish`` bool [S]: finish_at_eos."""
    S, W = launch.blocks.shape
    tokens = outcome.tokens
    exists = launch.blocks < state.ends[:, None]
    masked = (tokens == params.mask) & exists.repeat_interleave(tokens.shape[1] // W, 1)
    left = masked.sum(-1)
    eos = (tokens[..., None] == params.eos[:, None]).any(-1)
    ended = eos.any(-1) | (state.ends >= known.caps)
    reached = (eos & (masked.cumsum(-1) == 0)).any(-1)
    ends_it = (state.token[:, :1] == params.eos).any(-1)
    won = finish & ~reached & (left == 1) & (state.lookaheads > 0) & (ended | ends_it)
    tokens = torch.where(won[:, None] & masked, state.token[:, :1], tokens)
    gaps = masked.view(S, W, -1).any(-1).cumsum(-1)
    settled = known.first + (exists & (gaps == 0)).sum(-1, dtype=torch.int32)
    failed = (outcome.deficits >= FAILED).any(-1)
    return Progress((left == 0) & ended | won | finish & reached, failed, settled, tokens)
