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
"""Keys, or values, of all layers: one tensor [layers, pages, 128, kv_heads, head_dim], or one for each layer."""


@dataclass(frozen=True)
class ForwardInputs:
    """A forward pass over T tokens: all rows of all sequences, one after the other."""

    tokens: Tensor
    """Ids, int64 or int32 [T]."""
    positions: Tensor
    """In their sequences, int64 or int32 [T]."""
    slot_mapping: Tensor
    """Distinct flat cache positions to write (page * 128 + offset), int64 or int32 [W]."""
    source: Tensor | None
    """The token that each of them takes, int64 [W]; None: token i goes to ``slot_mapping[i]``."""
    entries: Entries
    rows: Tensor | None
    """Tokens whose hidden states are returned, int64 [R]; None: all."""
    num_drafts: int = 0
    """The first so many tokens draft; a model may have weights for drafts alone."""

    def to(self, device: torch.device) -> ForwardInputs:
        tensors: dict[str, Any] = {name: x.to(device) for name, x in vars(self).items() if isinstance(x, Tensor)}
        entries = replace(self.entries, page_tables=self.entries.page_tables.to(device))
        return replace(self, entries=entries, **tensors)


class Model(Protocol):
    """One rank's part of a model. ``tp`` is the group of ranks that split each forward pass."""

    properties: ModelProperties
    config: ModelConfig
    """Of the whole model, not of the rank's part."""
    ops: Ops
    tp: Group
    head: Tensor
    """Weight of the LM head. Its dtype is that of hidden states, keys and values."""
    first_token_id: int
    local_vocab_size: int

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
    """A model in fused ops, which ranks can split. ``config`` is the whole model's.

    ``weights`` are this rank's, by our names in the family's table. They are taken out of the mapping, so that none is
    in memory twice when ``ops`` converts them. A sequence may have ``num_positions``; None: all that the model allows.
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
