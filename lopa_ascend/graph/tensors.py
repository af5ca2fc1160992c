"""The tensors of a compiled step: what the host writes, what outlives a step, and what a step returns.

Sizes, views into one piece of memory, and the flat list of a compiler's arguments are derived from the declarations
here and in ``policy/rows.py``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, NamedTuple, TypeVar

import torch
from torch import Tensor

from lopa_ascend.graph.buckets import Bucket
from lopa_ascend.graph.policy import Constants, Launch, Packing, RequestParams
from lopa_ascend.graph.spec import float32, int32, num_elements, specs, views


class ModelInputs(NamedTuple):
    positions: Annotated[Tensor, int32("tokens")]
    hidden_rows: Annotated[Tensor, int32("tokens")]
    """Row of ``Storage.hidden`` that each token's hidden state goes to. In slot 0 a block's last position goes to a row
    of the seat, which later steps read; all other tokens go to rows of this step alone. With full attention all tokens
    do, and the states at the winner's block ends are copied to the seat afterwards (``save_rows``)."""
    predicted_by: Annotated[Tensor, int32("tokens")]
    """Row of ``Storage.hidden`` that predicts each token's cell. In a packed bucket with shifted logits, the first
    cells of blocks have no meaning: only the device knows which slot computes the block before."""
    block_ends: Annotated[Tensor, int32("sequences blocks")]
    """With full attention, rows of ``Storage.hidden`` at the ends of blocks in slot 0."""
    save_rows: Annotated[Tensor, int32("sequences blocks")]
    """With full attention, rows of ``Storage.hidden`` to which the states at the winner's block ends are copied, for
    later steps."""
    page_tables: Annotated[Tensor, int32("tables pages")]
    """Page ids of each attention entry, in a packed bucket of each slot."""


StepInputs = tuple[Launch, RequestParams, ModelInputs]
"""What the host writes for each step, but for the KV lengths of attention entries."""


class Storage(NamedTuple):
    """What outlives a step."""

    states: Tensor
    """Packed states [seats, state size] (``policy.State``); float32 with the bits of int32."""
    hidden: Tensor
    """[seats * (1 + M) + tokens, hidden], with M blocks of the largest window. Each seat has 1 + M rows for hidden
    states at the ends of blocks; block b has row (b + 1) mod (1 + M). So there is a row for each block of a window, and
    for the block before, whose state predicts the window's first position. The last rows are for the tokens of the
    running step."""


class StepOutput(NamedTuple):
    """What a step tells the host, in one int32 tensor."""

    winners: Annotated[Tensor, int32("sequences")]
    tokens: Annotated[Tensor, int32("sequences cells")]
    """Token ids of the anchor's window after the step."""
    ids: Annotated[Tensor, int32("sequences branches cells")]
    """Predicted token ids of all branches."""
    max_probs: Annotated[Tensor, float32("sequences branches cells")]
    confidences: Annotated[Tensor, float32("sequences branches cells")]
    """Left out if they are the probabilities."""


Caches = tuple[Sequence[Tensor], Sequence[Tensor]]
"""Keys and values of every layer [pages, 128, kv_heads, head_dim]."""
_Group = TypeVar("_Group", Launch, RequestParams, ModelInputs, Constants)


def input_size(bucket: Bucket) -> int:
    """32-bit elements of a bucket's ``StepInputs`` and, if it is packed, of its ``Packing``."""
    packing = 0 if bucket.rows is None else num_elements(Packing, bucket)
    return packing + sum(num_elements(group, bucket) for group in (Launch, RequestParams, ModelInputs))


def view_packing(memory: Tensor, bucket: Bucket) -> Packing | None:
    """The packing, in the last of the first ``input_size`` elements of ``memory`` int32; None in a full bucket."""
    if bucket.rows is None:
        return None
    end = input_size(bucket)
    return Packing(*views(memory[end - num_elements(Packing, bucket) : end], specs(Packing).values(), bucket))


def view_inputs(memory: Tensor, bucket: Bucket) -> StepInputs:
    """A bucket's inputs, one after the other in the first ``input_size`` elements of ``memory`` int32."""
    params_start = num_elements(Launch, bucket)
    model_start = params_start + num_elements(RequestParams, bucket)
    return (
        Launch(*views(memory, specs(Launch).values(), bucket)),
        RequestParams(*views(memory[params_start:], specs(RequestParams).values(), bucket)),
        ModelInputs(*views(memory[model_start:], specs(ModelInputs).values(), bucket)),
    )


def view_output(memory: Tensor, bucket: Bucket, num_columns: int) -> StepOutput:
    """The output of a step in ``memory`` int32 [n]. ``num_columns``: tensors of predictions, 2 if the confidences are
    the probabilities, otherwise 3."""
    winners, tokens, ids, max_probs, *others = views(
        memory, list(specs(StepOutput).values())[: 2 + num_columns], bucket
    )
    return StepOutput(winners, tokens, ids, max_probs, *(others or [max_probs]))


def flatten(
    inputs: StepInputs, constants: Constants, storage: Storage, caches: Caches, packing: Packing | None = None
) -> list[Tensor]:
    """A compiled step's arguments in one list. The step is compiled for their shapes."""
    launch, params, model = inputs
    return [*launch, *params, *model, *constants, *storage, *caches[0], *caches[1], *(packing or ())]


def unpacked(tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], Packing]:
    """A packed step's arguments: those of any step, and the packing."""
    count = len(Packing._fields)
    return tensors[:-count], Packing(*tensors[-count:])


def unflatten(tensors: Sequence[Tensor]) -> tuple[StepInputs, Constants, Storage, Caches]:
    """The inverse of ``flatten``, without a packing."""
    launch, rest = _take(Launch, tensors)
    params, rest = _take(RequestParams, rest)
    model, rest = _take(ModelInputs, rest)
    constants, rest = _take(Constants, rest)
    states, hidden, *caches = rest
    num_layers = len(caches) // 2
    return (launch, params, model), constants, Storage(states, hidden), (caches[:num_layers], caches[num_layers:])


def _take(kind: type[_Group], tensors: Sequence[Tensor]) -> tuple[_Group, Sequence[Tensor]]:
    count = len(kind._fields)
    return kind(*tensors[:count]), tensors[count:]


def make_constants(bucket: Bucket, first_padding_position: int) -> Constants:
    """The constants of a bucket. As many cache positions from ``first_padding_position`` on as the bucket writes are
    never read."""
    padding = first_padding_position + torch.arange(bucket.writes, dtype=torch.int32)
    branch, cell = torch.arange(bucket.branches, dtype=torch.int32), torch.arange(bucket.cells)
    return Constants(
        branches=branch,
        branch_precedes=branch[:, None] < branch,
        cell_precedes=cell[:, None] < cell,
        padding_positions=padding.view(bucket.shape("sequences slots cells")),
        no_cell=torch.tensor([-1], dtype=torch.int32),
        no_masks=torch.tensor([0.0]),
        no_limit=torch.tensor([math.inf]),
        no_confidence=torch.tensor([-math.inf]),
        no_rank=torch.tensor([-1.0]),
    )
