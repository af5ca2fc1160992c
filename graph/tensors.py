"""The tensors of a compiled step, each declared once with its dtype and shape.

Sizes, views into one piece of memory, and the flat list of arguments that a compiler wants are derived from these
declarations. Dimensions, see ``Bucket.dims``:

    S sequences    B branches of a sequence    R slots: branches of a sequence on this rank
    W blocks of the window    L positions of a block    C = W * L cells of the window    M blocks of the largest window
    P pages of a slot    A attention entries    T = S * R * C tokens of the step    K = 1 + E ids of the mask and of EOS
    F columns of mask limits    Q = S * (K * W + 1) numbers of open blocks    X columns of a packed state
    G elements of the packed states that a step takes    Y = 3 * C columns of a comparison of cells
    U = (M - W) * L cells that a packed state has beyond this window
    E ids of EOS that a request may have (``MAX_EOS``)    N seats
    V columns of ``winner.Chosen.taken``: 2 * C + W + 3, and Y or 2 * C, see ``policy._choose``

A **cell** is the place of a generated position, numbered block * L + offset from the end of the prompt on. Blocks may
be shorter than L, and a sequence's last block shorter still; cells after the end of their block hold no position.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Annotated, NamedTuple, TypeVar, get_type_hints

import torch
from torch import Tensor
from torch.nn.functional import pad

from lopa_ascend.graph.buckets import Bucket

FIRST_CELL = 2**24
"""Number of cell 0 on the device. So every cell number is larger than any count of blocks, and ``policy.open_blocks``
can rely on this: min(count, cell number) is the count, and min(count, -1) is -1."""
NO_CONFIDENCE = -192.0
"""In place of the confidence of a cell without a mask: below all confidences, and of no weight in sums; see
``winner.ROUNDING_BASE``."""


class Spec(NamedTuple):
    """The declaration of a tensor."""

    dims: str
    """Dimensions as letters, e.g. "S R C"."""
    dtype: torch.dtype


def int32(dims: str) -> Spec:
    return Spec(dims, torch.int32)


def int64(dims: str) -> Spec:
    return Spec(dims, torch.int64)


def float32(dims: str) -> Spec:
    return Spec(dims, torch.float32)


class Launch(NamedTuple):
    """What the host tells the decode policy about one step."""

    seats: Annotated[Tensor, int32("S")]
    """Row of each sequence in the packed states; padding rows have seats that are never assigned."""
    state_index: Annotated[Tensor, int32("G")]
    """Where the parts of ``policy.State`` stand in the flat packed states, one part after the other."""
    cells: Annotated[Tensor, int32("S C")]
    """Number of each cell of the window, counted from ``FIRST_CELL``."""
    blocks: Annotated[Tensor, int32("S W")]
    """Number of each block of the window."""
    open_base: Annotated[Tensor, int32("Q")]
    """Base values to which the device adds n, a sequence's number of opened blocks. There are two parts:

    [S, K, W]   The sum is an index into the flat ``RequestParams.mask_limits``; see ``MaskLimits``. Index 0 of K stands
                for a block's limit of masks, the others for its limit of each EOS. The place of the window's last
                block, [:, 0, -1], holds another test instead: whether the sequence may open any more blocks. The last
                block needs no limit of its own, because no block can be opened after it.
    [S]         All 1, so the sum is n + 1.
    """
    bars: Annotated[Tensor, int32("S B 2*C")]
    """What ``policy._ranks_of_probabilities`` compares the bits of each cell's confidence with. First C times the
    integer -1: the bits of a masked cell's probability are larger, those of ``NO_CONFIDENCE`` smaller. Then C times the
    bits of ``tau_conf``: those of accepted cells are larger."""
    slot_mapping: Annotated[Tensor, int32("S R C")]
    """Flat cache position of each cell in each slot; of padding positions where a cell must not be written."""


class RequestParams(NamedTuple):
    """Decoding parameters by sequence."""

    blank: Annotated[Tensor, int32("S 3")]
    """What a cell holds before it is filled: the mask, or in a cell without a position a token that is neither the mask
    nor an EOS. Then ``FIRST_CELL``, which stands in ``policy.State.cells_before`` for a first row."""
    marks: Annotated[Tensor, int32("S K")]
    """Id of the mask, and EOS ids; unused places hold -1."""
    tau_conf: Annotated[Tensor, float32("S")]
    activation_masks: Annotated[Tensor, float32("S")]
    """A block is fully activated once the block before it has at most so many masks."""
    mask_limits: Annotated[Tensor, float32("S F")]
    """A branch opens another block if none of its blocks has more masks than its limit; see ``MaskLimits``."""
    min_rank: Annotated[Tensor, float32("S B")]
    """Lowest rank with which a cell becomes the lookahead cell of each branch: C, that of masked cells, or infinity for
    branches that the request did not ask for. A seat has 1 in place of C, which differs between buckets."""


class ModelInputs(NamedTuple):
    """What the model needs to know about one step."""

    positions: Annotated[Tensor, int32("T")]
    """Position of each token in its sequence."""
    hidden_rows: Annotated[Tensor, int32("T")]
    """Row of ``Storage.hidden`` that each token's hidden state goes to. In slot 0 the last position of each block goes
    to a row of the seat, which later steps read; all other tokens go to rows of this step alone. In a bucket with full
    attention all tokens do, and the states at the winner's block ends are copied to the seat afterwards
    (``save_rows``)."""
    predicted_by: Annotated[Tensor, int32("T")]
    """Row of ``Storage.hidden`` that predicts each token's cell."""
    block_ends: Annotated[Tensor, int32("S*W")]
    """With full attention, rows of ``Storage.hidden`` with the hidden states at the ends of blocks, in slot 0."""
    save_rows: Annotated[Tensor, int32("S*W")]
    """With full attention, rows of ``Storage.hidden`` to which the hidden states at the ends of blocks in the winner's
    slot are copied, for later steps."""
    page_tables: Annotated[Tensor, int32("A P")]
    """Page ids of each attention entry."""


class StepInputs(NamedTuple):
    """Everything that the host writes for each step, but for the KV lengths of the attention entries."""

    launch: Launch
    params: RequestParams
    model: ModelInputs


class Constants(NamedTuple):
    """Tensors that never change in a bucket."""

    row: Annotated[Tensor, int32("S B 2")]
    """Number of each branch of each sequence: sequence * B + branch; and 0, the masks before the first block."""
    earlier: Annotated[Tensor, int64("B B")]
    """1 where the column's branch comes before the row's."""
    later: Annotated[Tensor, int32("C Y")]
    """1 where the column's cell comes after the row's; 0 in the columns of ``Launch.bars``."""
    padding_tokens: Annotated[Tensor, int32("S U")]
    """Fills a packed state up to the width of the largest window."""
    padding_positions: Annotated[Tensor, int32("S R C")]
    """Distinct flat cache positions that are written and never read."""
    nothing: Annotated[Tensor, int32("1")]
    """0, in place of what branches hold that do not win. A number in the code of a step would be filled in by a kernel
    each time."""
    no_cell: Annotated[Tensor, int32("1")]
    """-1, the cell of branches that fill none in addition to the anchor."""
    no_rank: Annotated[Tensor, float32("1")]
    """-1, below every rank: that of filled cells, and of branches that cannot win."""
    accepted_rank: Annotated[Tensor, float32("1")]
    """2 C, the lowest rank of cells that tau_conf accepts."""
    no_confidence: Annotated[Tensor, float32("1")]
    """The confidence of cells without a mask; see ``winner.ROUNDING_BASE``."""


class Storage(NamedTuple):
    """What outlives a step, for N seats."""

    states: Tensor
    """Packed states [N, X], see ``policy.State``; float32 with the bits of int32."""
    hidden: Tensor
    """[N * (1 + M) + T, hidden]. Each seat has 1 + M rows for the hidden states at the ends of blocks, that of block b
    in row (b + 1) mod (1 + M). So there is a row for each block of a window of M blocks, and for the block before,
    whose state predicts the window's first position. The last T rows are for the step that runs."""


class StepOutput(NamedTuple):
    """What a step tells the host.

    A step returns one int32 tensor: ``winner.Chosen.taken`` [S, V] of the winners, in which ``winners`` is a column,
    then ``tokens``, then the predictions. An NPU computes these three in their places in the output, because each is
    the whole result of an op. ``winners`` alone would have to be copied there.
    """

    winners: Annotated[Tensor, int32("S")]
    """Row of the winner: sequence * B + branch."""
    tokens: Annotated[Tensor, int32("S C")]
    """Token ids of the anchor's window after the step."""
    ids: Annotated[Tensor, int32("S B C")]
    """Predicted token ids of all branches."""
    max_probs: Annotated[Tensor, float32("S B C")]
    confidences: Annotated[Tensor, float32("S B C")]
    """Left out where they are the probabilities."""


TensorGroup = TypeVar("TensorGroup", Launch, RequestParams, ModelInputs, Constants, StepOutput)
Caches = tuple[Sequence[Tensor], Sequence[Tensor]]
"""Keys and values of every layer [pages, 128, kv_heads, head_dim]."""


@cache
def specs(kind: type) -> dict[str, Spec]:
    """The declarations of the tensors of a ``TensorGroup`` by name."""
    hints = get_type_hints(kind, include_extras=True)
    return {name: hint.__metadata__[0] for name, hint in hints.items()}


def num_elements(kind: type, bucket: Bucket) -> int:
    """32-bit elements of all tensors of a ``TensorGroup``."""
    return sum(math.prod(bucket.shape(spec.dims)) for spec in specs(kind).values())


def input_size(bucket: Bucket) -> int:
    """32-bit elements of a bucket's ``StepInputs``."""
    return sum(num_elements(kind, bucket) for kind in (Launch, RequestParams, ModelInputs))


def view_inputs(memory: Tensor, bucket: Bucket) -> StepInputs:
    """A bucket's inputs, one after the other in the first ``input_size`` elements of ``memory`` int32."""
    params_start = num_elements(Launch, bucket)
    model_start = params_start + num_elements(RequestParams, bucket)
    return StepInputs(
        launch=Launch(*_views(memory, specs(Launch).values(), bucket)),
        params=RequestParams(*_views(memory[params_start:], specs(RequestParams).values(), bucket)),
        model=ModelInputs(*_views(memory[model_start:], specs(ModelInputs).values(), bucket)),
    )


def view_output(memory: Tensor, bucket: Bucket, num_columns: int) -> StepOutput:
    """The output of a step in ``memory`` int32 [n], which the step returned.

    Args:
        num_columns: tensors of predictions: 2 if the confidences are the probabilities, otherwise 3.
    """
    declared = list(specs(StepOutput).values())[1 : 2 + num_columns]
    num_won = len(memory) - sum(math.prod(bucket.shape(spec.dims)) for spec in declared)
    won = memory[:num_won].view(bucket.sequences, -1)
    tokens, ids, max_probs, *others = _views(memory[num_won:], declared, bucket)
    return StepOutput(won[:, winner_row_column(bucket.cells)], tokens, ids, max_probs, *(others or [max_probs]))


def winner_row_column(cells: int) -> int:
    """The column of ``winner.Chosen.taken`` that has the number of the winner's row. Before it are the winner's token
    ids and its predicted token ids, ``cells`` of each."""
    return 2 * cells


def _views(memory: Tensor, declared: Iterable[Spec], bucket: Bucket) -> list[Tensor]:
    """Tensors that lie one after the other in ``memory`` int32."""
    views = []
    for spec in declared:
        shape = bucket.shape(spec.dims)
        size = math.prod(shape)
        views.append(memory[:size].view(shape).view(spec.dtype))
        memory = memory[size:]
    return views


def flatten(inputs: StepInputs, constants: Constants, storage: Storage, caches: Caches) -> list[Tensor]:
    """The arguments of a compiled step in one list. A step is compiled for the shapes of all of them."""
    return [*inputs.launch, *inputs.params, *inputs.model, *constants, *storage, *caches[0], *caches[1]]


def unflatten(tensors: Sequence[Tensor]) -> tuple[StepInputs, Constants, Storage, Caches]:
    """The inverse of ``flatten``."""
    launch, rest = _take(Launch, tensors)
    params, rest = _take(RequestParams, rest)
    model, rest = _take(ModelInputs, rest)
    constants, rest = _take(Constants, rest)
    states, hidden, *caches = rest
    num_layers = len(caches) // 2
    inputs = StepInputs(launch, params, model)
    return inputs, constants, Storage(states, hidden), (caches[:num_layers], caches[num_layers:])


def _take(kind: type[TensorGroup], tensors: Sequence[Tensor]) -> tuple[TensorGroup, Sequence[Tensor]]:
    count = len(kind._fields)
    return kind(*tensors[:count]), tensors[count:]


def make_constants(bucket: Bucket, first_padding_position: int) -> Constants:
    """The constants of a bucket. The T cache positions from ``first_padding_position`` on are never read."""
    branch, cell = torch.arange(bucket.branches), torch.arange(bucket.cells)
    row = torch.arange(bucket.sequences * bucket.branches, dtype=torch.int32).view(bucket.shape("S B"))
    return Constants(
        row=torch.stack([row, torch.zeros_like(row)], -1),
        earlier=(branch < branch[:, None]).long(),
        later=pad((cell > cell[:, None]).int(), (0, 2 * bucket.cells)),
        padding_tokens=torch.zeros(bucket.shape("S U"), dtype=torch.int32),
        padding_positions=first_padding_position
        + torch.arange(bucket.tokens, dtype=torch.int32).view(bucket.shape("S R C")),
        nothing=torch.tensor([0], dtype=torch.int32),
        no_cell=torch.tensor([-1], dtype=torch.int32),
        no_rank=torch.tensor([-1.0]),
        accepted_rank=torch.tensor([2.0 * bucket.cells]),
        no_confidence=torch.tensor([NO_CONFIDENCE]),
    )
