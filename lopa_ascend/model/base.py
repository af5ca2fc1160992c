"""What the engine asks of a model: hidden states of a batch of tokens over paged keys and values, and logits."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from lopa_ascend.backend.interface import Entries, Ops
from lopa_ascend.config import ModelConfig
from lopa_ascend.families import Family
from lopa_ascend.families.table import SCALE, ZERO
from lopa_ascend.parallel.collectives import Group
from lopa_ascend.types import ModelProperties, Traffic

Caches = Tensor | Sequence[Tensor]
"""Keys, or values, of all layers: one tensor [layers, pages, 128, kv_heads, head_dim], or one tensor for each layer."""


@dataclass(frozen=True)
class ForwardInputs:
    """The batch of one forward pass: T tokens of all rows of all sequences, one after the other."""

    tokens: Tensor
    """Token ids, int64 or int32 [T]."""
    positions: Tensor
    """Positions in their sequences, int64 or int32 [T]."""
    slot_mapping: Tensor
    """Flat cache positions (page * 128 + offset) that are written, int64 or int32 [W]. They are distinct."""
    source: Tensor | None
    """For each entry of ``slot_mapping`` the token whose keys and values go there, int64 [W]; None: token i goes to
    ``slot_mapping[i]``."""
    entries: Entries
    """Who attends to what."""
    rows: Tensor | None
    """Indices of the tokens whose hidden states are returned, int64 [R]; None: all."""
    num_drafts: int = 0
    """The first so many tokens draft: weights compute them that a model may have for drafts alone."""

    def to(self, device: torch.device) -> ForwardInputs:
        """The same on a device."""
        tensors: dict[str, Any] = {name: x.to(device) for name, x in vars(self).items() if isinstance(x, Tensor)}
        entries = replace(self.entries, page_tables=self.entries.page_tables.to(device))
        return replace(self, entries=entries, **tensors)


class Model(Protocol):
    """One rank's part of a model. ``tp`` is the group of ranks that split each forward pass."""

    properties: ModelProperties
    config: ModelConfig
    """The configuration of the whole model, not of the rank's part."""
    ops: Ops
    tp: Group
    head: Tensor
    """Weight of the LM head. Its dtype is that of hidden states, keys and values."""
    first_token_id: int
    """First token id of this rank's part of the vocabulary."""
    local_vocab_size: int
    """Token ids in this rank's part of the vocabulary."""

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """What the model holds in device memory, for the report of its size."""
        ...

    def forward(self, inputs: ForwardInputs, k_caches: Caches, v_caches: Caches) -> Tensor:
        """Final normed hidden states [R, hidden] of ``inputs.rows``. Writes keys and values to the caches.

        A compiled forward pass needs one cache tensor for each layer: a slice of a common tensor would be copied.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden] -> [R, local_vocab_size]."""
        ...

    def traffic(self, num_computed: int) -> tuple[Traffic, ...]:
        """What this rank sends in a compiled forward pass over ``num_computed`` tokens."""
        ...


def settle(model: Model) -> str:
    """Gives a model's linear layers to ``Ops.settle``, and returns what it says."""
    weights = {name: w for name, w in model.weights.items() if not name.endswith((SCALE, ZERO))}
    one = [w[0] if w.dim() == 3 and ".experts_" in name else w for name, w in weights.items()]  # experts have one shape
    return model.ops.settle(w for w in (*one, model.head) if w.dim() > 1)


class SplitModel(Model, Protocol):
    """A model that is written in fused ops, which ranks can split.

    Args:
        family: the model's.
        config: the whole model's.
        weights: this rank's weights, by our names in the table of the family. They are taken out of the mapping,
            so that none is in memory twice when ``ops`` converts them.
        tp: the ranks that split each forward pass.
        num_positions: positions that a sequence may have; None: all that the model allows.
    """

    family: Family

    def __init__(
        self,
        family: Family,
        config: ModelConfig,
        weights: MutableMapping[str, Tensor],
        ops: Ops,
        tp: Group = ...,
        num_positions: int | None = None,
    ) -> None: ...
