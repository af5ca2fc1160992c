"""The decode policy as tensor functions of fixed shape, for use inside a compiled step.

``decode/`` is the definition; this does the same for S sequences at once and reads no value on the host. A step is
``unpack_state``, ``open_blocks`` (what each branch holds), ``rows_of_group`` (what this rank computes), the forward
pass, ``advance`` (winner, fills, next branches) and ``pack_state``. ``winner.py`` picks the winner; ``inputs.py`` is
the host's part. Dimensions as in ``tensors.py``; they never change inside a bucket.

Row i of a sequence is branch i in evaluation order: lookahead branches by rank, then the anchor. The rows after the
anchor are padding copies of it.

An NPU's vector cores decide how the functions are written: each op is a kernel, so the fewest ops win, whatever they
compute; the cores find maxima of float32 but not of int32, select no bool, sort no integers and scatter nothing in a GE
graph; torchair has no minimum over a dimension. Ranks are unique before anything is sorted by them, and sums that can
exceed 2^31 are int64.

A confidence may be NaN. All indices stay inside their range then, and other sequences are not affected.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lopa_ascend.graph.tensors import Constants, Launch, RequestParams
from lopa_ascend.graph.winner import Chosen, Predicted, Rows, losers
from lopa_ascend.score.prediction import float_bits


class State(NamedTuple):
    """The state of the sequences before a step, all int32, as a step takes it out of ``Storage.states``.

    Packed, a state is a row [X]: the tokens of a window of M blocks, what the last winner predicted for them,
    ``RequestParams.blank``, the number of open blocks, and the lookahead cells. It is float32 with the bits of int32,
    because an NPU scatters rows of floats only.
    """

    tokens: Tensor
    """Token ids of the anchor's window [S, C]."""
    guesses: Tensor
    """Token ids that the last step predicted for these cells [S, C]."""
    num_opened_blocks: Tensor
    """Number of generated blocks that each sequence has opened, finished ones included, repeated in the order of
    ``Launch.open_base`` [Q]: for each sequence K * W times, one for each limit, and at the end once for each
    sequence."""
    lookahead_cells: Tensor
    """The cell that each branch fills in addition to the anchor [S, B]; -1: none."""
    cells_before: Tensor
    """``lookahead_cells`` of the row before [S, B]; ``FIRST_CELL`` for the first row. It is -1 in padding rows alone:
    the row before them is the anchor or padding, while a row with a branch is the first one or follows a lookahead
    branch."""


class NextState(NamedTuple):
    """The state of the sequences after a step, all int32; fields as in ``State``."""

    tokens: Tensor
    guesses: Tensor
    num_opened_blocks: Tensor
    """[S, 1]."""
    lookahead_cells: Tensor


def unpack_state(packed: Tensor, launch: Launch, constants: Constants) -> State:
    """The state of the launched sequences.

    Args:
        packed: ``Storage.states`` [N, X].
    """
    taken = packed.view(-1).index_select(0, launch.state_index).view(torch.int32)
    S, B, _ = constants.row.shape
    num_cells = launch.cells.numel()
    tokens, guesses, num_opened_blocks, lookahead_cells, cells_before = taken.split_with_sizes(
        [num_cells, num_cells, launch.open_base.numel(), S * B, S * B]
    )
    return State(
        tokens.view(S, -1), guesses.view(S, -1), num_opened_blocks, lookahead_cells.view(S, B), cells_before.view(S, B)
    )


def pack_state(state: NextState, params: RequestParams, constants: Constants) -> Tensor:
    """float32 [S, X], the inverse of ``unpack_state``."""
    tokens, guesses, *others = state
    padding = constants.padding_tokens
    return torch.cat([tokens, padding, guesses, padding, params.blank, *others], 1).view(torch.float32)


def open_blocks(params: RequestParams, state: State, launch: Launch) -> Rows:
    """Opens a block in every branch that may open one, and says what each branch holds (SPEC section 2, steps a and
    b)."""
    S, B = state.lookahead_cells.shape
    W, K = launch.blocks.shape[1], params.marks.shape[1]
    is_lookahead = state.lookahead_cells[:, :, None] == launch.cells[:, None]
    tokens = torch.where(is_lookahead, state.guesses[:, None], state.tokens[:, None])
    marked = tokens[:, :, None] == params.marks[:, None, :, None]  # [S, B, K, C]: masks, then each EOS
    counts = marked.view(S, B, K, W, -1).sum(-1, dtype=torch.float32)
    opened = state.num_opened_blocks + launch.open_base
    limits = params.mask_limits.view(-1).index_select(0, opened[:-S]).view(S, 1, K, W)
    opens_none = (counts > limits).view(S, B, -1).any(-1)
    num_opened_blocks = torch.where(opens_none, state.num_opened_blocks[-S:, None], opened[-S:, None])
    # In a row with a branch, cells_before is a cell number, which is higher than any number of blocks. In a padding row
    # it is -1, so nothing is predicted there.
    num_predicted_blocks = torch.minimum(num_opened_blocks, state.cells_before)
    is_predicted = (launch.blocks[:, None] < num_predicted_blocks[..., None])[..., None]
    masked = (marked[:, :, 0].view(S, B, W, -1) & is_predicted).view(S, B, -1)
    return Rows(tokens, masked, num_opened_blocks, counts[:, :, 0], is_lookahead, state.cells_before)


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

    Open blocks are written in every slot, also where the slot has no branch, whose row is a copy of the anchor: the
    next pass may commit them. Blocks that are not open are written too, into pages of their own sequence: no open block
    sees them, and once they are open they are written anew. With full attention every block is seen, so there they go
    to padding positions.
    """
    S, R, _ = launch.slot_mapping.shape
    tokens = rows.tokens[:, group::num_groups] if num_groups > 1 else rows.tokens
    if not full_attention:
        return tokens, launch.slot_mapping
    W = launch.blocks.shape[1]
    is_open = launch.blocks[:, None] < rows.num_opened_blocks[:, group::num_groups, None]
    kept, padding = (x.view(S, R, W, -1) for x in (launch.slot_mapping, constants.padding_positions))
    return tokens, torch.where(is_open[..., None], kept, padding).view(S, R, -1)


def advance(
    params: RequestParams,
    launch: Launch,
    rows: Rows,
    predicted: Predicted,
    constants: Constants,
    branch_acceptance: str = "published",
) -> tuple[NextState, Tensor, Tensor]:
    """Picks the winners, fills them, and grows the next branches from them (SPEC sections 3 to 6).

    Args:
        branch_acceptance: see ``DecodingParams``; the lookahead branches have one token of their own.

    Returns:
        The next state; the numbers of the winners' rows, sequence * B + branch, int32 [S]; and ``Chosen.taken`` of the
        winners, int32 [S, V].
    """
    B = rows.tokens.shape[1]
    is_probability = predicted.max_probs is predicted.confidences
    confidences = torch.where(rows.masked, predicted.confidences, constants.no_confidence)
    if is_probability:
        compared = [confidences, launch.bars]
    else:
        compared = [confidences, torch.where(rows.masked, predicted.max_probs, constants.no_confidence)]
    # The 0 at the end of ``constants.row``, with all but the last column of ``rows.masks``, gives for each block the
    # masks of the block before it, and 0 for the first block.
    own = [constants.row, rows.masks, rows.num_opened_blocks[..., None]]
    columns = torch.cat(float_bits([rows.tokens, predicted.tokens, *own, *compared]), 2)

    def choose(is_left_out: Tensor) -> Chosen:
        return _choose(columns, is_left_out, params, launch, constants, is_probability=is_probability)

    is_left_out = losers(rows, predicted, confidences, params, constants, choose, branch_acceptance)
    won = choose(is_left_out)
    # Among the masks that are left, the best cells become the lookahead cells of the next branches.
    candidate_rank, candidate = torch.where(won.filled, constants.no_rank, won.rank).topk(B)
    lookahead_cells = torch.where(
        candidate_rank >= params.min_rank, launch.cells.gather(1, candidate), constants.no_cell
    )
    tokens = torch.where(won.filled, won.guesses, won.tokens)
    after = NextState(tokens, won.guesses, won.num_opened_blocks, lookahead_cells)
    return after, won.row.view(-1), won.taken


def _choose(
    columns: Tensor,
    is_left_out: Tensor,
    params: RequestParams,
    launch: Launch,
    constants: Constants,
    *,
    is_probability: bool,
) -> Chosen:
    """Takes one branch of each sequence, and applies the fill rule to it.

    A block fills the cells whose rank is at least the block's threshold. This is 2 C, the lowest rank that tau_conf
    accepts. In a fully activated block without an accepted cell it is the highest rank of the block, but at least C,
    because cells without a mask have lower ranks.

    Args:
        columns: int32 [S, B, V]: token ids [C], predicted ones [C], number of the row, masks before each block [W],
            masks of the last block, number of opened blocks, and what ``_ranks_of_probabilities`` takes, or confidences
            and probabilities [2 C].
        is_left_out: all branches but one, bool [S, B].
        is_probability: whether confidences are probabilities.
    """
    S, W = launch.blocks.shape
    C = launch.cells.shape[1]
    taken = torch.where(is_left_out[..., None], constants.nothing, columns).sum(1, dtype=torch.int32)
    sizes = [C, C, 1, W, 1, 1]
    tokens, guesses, row, masks_before, _, num_opened_blocks, bits = taken.split_with_sizes(
        [*sizes, taken.shape[1] - sum(sizes)], 1
    )
    if is_probability:
        rank = _ranks_of_probabilities(bits, constants)
    else:
        ranking, probs = bits.view(torch.float32).split(C, 1)
        is_accepted = probs > params.tau_conf[:, None]
        rank = torch.where(is_accepted, constants.accepted_rank, _ranks(ranking, constants))
    by_block = rank.view(S, W, -1)
    is_activated = masks_before.view(torch.float32) <= params.activation_masks[:, None]
    threshold = torch.where(is_activated, by_block.max(-1).values, constants.accepted_rank).clamp(C, 2 * C)
    filled = (by_block >= threshold[..., None]).view(S, C)
    return Chosen(tokens, guesses, row, num_opened_blocks, rank, filled, taken)


def _ranks(confidences: Tensor, constants: Constants) -> Tensor:
    """How many cells each cell is ahead of in the order of (-confidence, position), and C more for a mask; float32
    [S, C]."""
    C = confidences.shape[1]
    mine, others = confidences[:, :, None], torch.cat([confidences, constants.no_confidence.expand_as(confidences)], 1)
    is_ahead = (mine > others[:, None]) | ((mine == others[:, None]) & (constants.later[:, : 2 * C] > 0))
    return is_ahead.sum(-1, dtype=torch.float32)


def _ranks_of_probabilities(bits: Tensor, constants: Constants) -> Tensor:
    """``_ranks`` where the confidences are probabilities, and C more where tau_conf accepts them, with fewer kernels.

    Floats that are not negative are in the same order as their bits, read as int32. Of two cells with equal bits the
    earlier one is ahead. For integers, a >= b is a + 1 > b, so ``Constants.later`` is 1 where the other cell comes
    later.

    Args:
        bits: of the probabilities of C cells, then ``Launch.bars``; int32 [S, Y].
    """
    mine = bits[:, : constants.later.shape[0], None]
    return (mine + constants.later > bits[:, None]).sum(-1, dtype=torch.float32)
