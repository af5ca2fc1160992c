"""The decode policy as tensor functions of fixed shape, for use inside a compiled step.

``decode/`` is the definition; this does the same for S sequences at once and reads no value on the host. A step is
``unpack``, ``lay_out`` (the branches), the forward pass over what ``writes`` gives, ``advance`` (winner, fills, next
branches) and ``pack``. ``step_inputs.py`` is the host's part.

Dimensions as in ``graph/buckets.py``: S sequences, B branches, R slots of a rank, W blocks of the window, L positions a
block, C = W * L >= B cells, P pages of a slot, M blocks of the largest window; E EOS ids. They never change inside a
bucket.

A **cell** is the place of a generated position, numbered block * L + offset from the end of the prompt on. Blocks may
be shorter than L, a sequence's last one shorter still; cells behind their end hold no position. Row i is branch i in
evaluation order, and what follows the anchor repeats it.

An NPU's vector cores decide how things are said: they find maxima of float32 but not of int32, select no bool, sort no
integers and scatter nothing in a GE graph; torchair knows no minimum over a dimension. Ranks are unique before anything
is sorted by them, and sums that can pass 2^31 are int64.

A confidence may be NaN. Nothing here fails then: all indices stay inside their range, and no other sequence notices.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

STEP = 2.0**-16
"""Branch scores are sums of confidences rounded to multiples of it, half to even."""


class Tables(NamedTuple):
    """Constants of a bucket. ``branch`` int32 [B] and ``row`` int64 [S, B] count; ``earlier`` int64 [B, B] is 1 where
    the column's branch comes before the row's; ``later`` bool [C, C]: the column's cell comes after the row's;
    ``before`` and ``upto`` float32 [C, W] are 1 where the cell lies in the block before, and in no later one. ``rest``
    int32 [S, (M - W) * L] fills up a packed state. ``trash`` int32 [S, R, C]: distinct cache positions that nobody
    reads. ``in_block`` int64 [1 + W] is 0 for what comes before the window and 1 for each of its blocks."""

    branch: Tensor
    row: Tensor
    earlier: Tensor
    later: Tensor
    before: Tensor
    upto: Tensor
    rest: Tensor
    trash: Tensor
    in_block: Tensor


class Params(NamedTuple):
    """The requests' parameters.

    ``mask`` is the model's. ``fresh`` int32 [S, 2]: what a cell holds at first, the mask, or without a
    position a token that is neither mask nor EOS. ``eos`` int32 [S, E]. ``tau_conf`` and ``slack`` float32 [S]: how
    many masks a block may have for the next one to be fully activated. ``bounds`` float32 [S, 3 M + 3]: how many a
    block may have for another to be added, by its distance from the end. ``worst`` float32 [S, B]: the rank that
    lookahead b must reach, infinite from k on.
    """

    mask: int
    fresh: Tensor
    eos: Tensor
    tau_conf: Tensor
    slack: Tensor
    bounds: Tensor
    worst: Tensor


class State(NamedTuple):
    """What a step carries on, all int32. ``tokens`` [S, C] are the anchor's; ``ends`` [S, 1] generated blocks are open.
    ``lookaheads`` [S, 1] branches stand before the anchor: branch b fills cell ``position`` [S, B], -1 for none, with
    ``token`` [S, B] on top of the anchor.

    A packed one is a row [M * L + 4 + 2 B]: the tokens of a window that may be wider, ``Params.fresh``, and the rest in
    this order. It is float32 with the bits of int32, for an NPU scatters rows of floats, and none of int32.
    """

    tokens: Tensor
    ends: Tensor
    lookaheads: Tensor
    position: Tensor
    token: Tensor


class Launch(NamedTuple):
    """What the host decides of a step, all int32.

    ``seats`` [S]: which of the packed states are the sequences'. ``origin`` [S * C]: where the window's tokens stand in
    all packed states (flat). ``cells`` [S, C] and ``blocks`` [S, W]: their numbers; ``at`` [S * W]: where ``bounds``
    (flat) have that of an anchor without blocks, so add ``ends``. ``locations`` [S, R, C]: cache positions.
    """

    seats: Tensor
    origin: Tensor
    cells: Tensor
    blocks: Tensor
    at: Tensor
    locations: Tensor


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
    """``tokens`` int32, ``max_probs`` and ``confidences`` float32 [S, B, C], of which those of masked cells count; the
    confidence is NaN where a logit was not finite."""

    tokens: Tensor
    max_probs: Tensor
    confidences: Tensor


def unpack(packed: Tensor, launch: Launch, tables: Tables) -> State:
    """The sequences' states out of all packed ones [N, X]."""
    branches = tables.branch.shape[0]
    tokens = packed.view(-1).index_select(0, launch.origin).view(torch.int32).view(launch.cells.shape)
    rest = packed.shape[1] - 2 - 2 * branches
    rows = packed.index_select(0, launch.seats).view(torch.int32)
    _, ends, lookaheads, position, token = rows.split([rest, 1, 1, branches, branches], 1)
    return State(tokens, ends, lookaheads, position, token)


def pack(state: State, params: Params, tables: Tables) -> Tensor:
    """[S, X]."""
    tokens, *others = state
    return torch.cat([tokens, tables.rest, params.fresh, *others], 1).view(torch.float32)


# ---- in the compiled step ------------------------------------------------------------------------------------------


def lay_out(params: Params, state: State, launch: Launch, tables: Tables) -> Rows:
    """Adds blocks to the branches and says what each of them holds."""
    S, B = state.position.shape
    W = launch.blocks.shape[1]
    here = state.position[:, :, None] == launch.cells[:, None]
    tokens = torch.where(here, state.token[:, :, None], state.tokens[:, None])
    blank = tokens == params.mask
    ones = blank.to(torch.float32).view(S * B, -1)  # counted by matrix products, exact in any format
    previous = (ones @ tables.before).view(S, B, W)
    at = (state.ends + launch.at.view(S, W)).view(-1)
    bounds = params.bounds.view(-1).index_select(0, at).view(S, 1, W)
    closed = (previous > bounds).any(-1)
    ended = (tokens[..., None] == params.eos[:, None, None]).view(S, B, -1).any(-1)
    ends = torch.where(closed | ended, state.ends, state.ends + 1)
    live = tables.branch <= state.lookaheads
    # Blocks that the next commit takes are written in every slot, whether it has a branch or not.
    settled = ((ones @ tables.upto) == 0.0).view(S, B, W)
    exists = settled | (live[..., None] & (launch.blocks[:, None] < ends[..., None]))
    masked = (blank.view(S, B, W, -1) & exists[..., None]).view(S, B, -1)
    return Rows(tokens, masked, ends, exists, previous)


def writes(rows: Rows, launch: Launch, tables: Tables, size: int = 1, group: int = 0) -> tuple[Tensor, Tensor]:
    """(tokens, cache positions) int32 [S, R, C] of the rows of branch-parallel group ``group`` of ``size``: branch i
    has slot i div size of group i mod size. Keys and values of what does not exist go to trash."""
    S, R, _ = launch.locations.shape
    exists, tokens = rows.exists, rows.tokens
    if size > 1:
        exists, tokens = exists[:, group::size], tokens[:, group::size]
    locations, trash = (x.view(S, R, exists.shape[2], -1) for x in (launch.locations, tables.trash))
    return tokens, torch.where(exists[..., None], locations, trash).view(S, R, -1)


def advance(params: Params, launch: Launch, rows: Rows, predicted: Predicted, tables: Tables) -> tuple[State, Tensor]:
    """Picks the winners (int64 [S]: s * B + branch), fills them, and grows the next branches from them."""
    S, B, C = rows.tokens.shape
    W = launch.blocks.shape[1]
    winner = _select(rows, predicted, tables)

    def of_winner(x: Tensor) -> Tensor:
        return x.view(S * B, -1).index_select(0, winner)

    tokens, masked, ends = of_winner(rows.tokens), of_winner(rows.masked), of_winner(rows.ends)
    guesses, probs, confidences = (of_winner(x) for x in predicted)
    # The rank of a cell: C where tau_conf accepts, -1 without a mask. A block fills what reaches its threshold.
    rank = torch.where(probs > params.tau_conf[:, None], float(C), _standing(confidences, tables.later))
    rank = torch.where(masked, rank, -1.0)
    activated = of_winner(rows.previous) <= params.slack[:, None]
    threshold = torch.where(activated, rank.view(S, W, -1).max(-1).values, float(C))
    filled = (rank.view(S, W, -1) >= threshold[..., None]).view(S, C) & masked
    reached, chosen = torch.where(filled, -1.0, rank).topk(B)
    spawned = reached >= params.worst
    state = State(
        tokens=torch.where(filled, guesses, tokens),
        ends=ends,
        lookaheads=spawned.sum(-1, keepdim=True, dtype=torch.int32),
        position=torch.where(spawned, launch.cells.gather(1, chosen), -1),
        token=guesses.gather(1, chosen),
    )
    return state, winner


def _select(rows: Rows, predicted: Predicted, tables: Tables) -> Tensor:
    """The branch with the least mean deficit (1 - confidence), of equal ones the first.

    Means are compared as fractions of integers; float32 holds a cell's deficit exactly up to a confidence of -254. To a
    row without masks, as it counts 0, every later one loses and no earlier one: of the branches only row 0 can be
    without, whose score is 1, and what is no branch comes last. Of two branches one always loses, so of all at most one
    does not, whatever a NaN is as an integer.
    """
    deficit = 1.0 / STEP - (predicted.confidences / STEP).round()
    deficit = torch.where(rows.masked, deficit, 0.0)
    deficits, counts = deficit.to(torch.int64).sum(-1), rows.masked.sum(-1)
    mine = deficits[:, :, None] * counts[:, None, :]
    others = deficits[:, None, :] * counts[:, :, None]
    loses = (others < mine + tables.earlier).any(-1)
    return torch.where(loses, 0, tables.row).sum(-1)


def _standing(confidences: Tensor, later: Tensor) -> Tensor:
    """float32 [S, C]: how many cells each one of [S, C] is ahead of in the order of (-confidence, position)."""
    mine, others = confidences[:, :, None], confidences[:, None, :]
    ahead = (mine > others) | ((mine == others) & later)
    return ahead.sum(-1, dtype=torch.float32)
