"""A family of models: in one value, all that tells its models from those of others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lopa_ascend.config import ModelConfig
from lopa_ascend.config.files import Fields
from lopa_ascend.families.table import Table, Tensors
from lopa_ascend.types import ModelProperties


@dataclass(frozen=True, kw_only=True, eq=False)
class Family:
    """Models of one architecture in fused ops: their tensors, their ``config.json``, and how they decode. Ranks may
    split them, linear layers may be int8, adapters are merged, and ``config.json`` is read strictly."""

    model_type: str
    name: str = ""
    """Of the architecture, if another family has the same ``model_type``."""
    claims: Callable[[Mapping[str, Any]], bool] | None = None
    """Whether a ``config.json`` with this ``model_type`` is of this family; None: if no other one claims it."""
    architectures: tuple[str, ...] = ()
    """In place of ``claims`` if other models have the ``model_type``: what its field ``architectures`` names."""
    checkpoints: tuple[str, ...] = ()
    """Prefixes of the names of its published checkpoints."""
    table: Table
    decoder: str = "lopa_ascend.model.decoder:Decoder"
    """The forward pass, a ``model.base.SplitModel``, as module and class. It imports torch, so not before use."""
    properties: ModelProperties
    names: Mapping[str, str] = field(default_factory=dict)
    """Names of Qwen2's fields -> its own."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of missing fields, by Qwen2's names: ``attention_bias`` (else true), ``rms_norm_eps`` (else 1e-6),
    ``mask_token_id`` and ``block_size``."""
    implied: Callable[[Fields], Mapping[str, Any]] | None = None
    """Values of missing fields that others imply, by names in the file."""
    only: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    """Own fields that change the computation, with the values that can be computed. None is a missing field."""
    unused: frozenset[str] = frozenset()
    """Own fields that change nothing here, and fields of Qwen2 that ``complete`` reads in another way."""
    own_rope: frozenset[str] = frozenset()
    """Further fields of ``rope_parameters`` that ``complete`` reads, with "rope_type" or its older name "type"."""
    draft_adapter: str | None = None
    """The folder of a checkpoint that may hold an adapter for drafts alone."""
    complete: Callable[[Fields, ModelConfig], ModelConfig] | None = None
    """Adds what only this family has, such as experts."""
    end_tokens: tuple[str, ...] = ()
    """Special tokens that end an answer although no file says so."""
    recommended: Mapping[str, Any] = field(default_factory=dict)
    """Decoding parameters that the authors recommend, beside the block size of a block-causal model."""
    source: str = ""
    """Where they recommend them."""
    sizes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """By size, such as "8B", the fields of `shape` and others that differ, by Qwen2's names."""
    published: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of ``config.json``, the same in all sizes, by their names in the file."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.name or self.model_type)
        if self.architectures:
            object.__setattr__(self, "claims", self._has_architecture)

    def _has_architecture(self, config: Mapping[str, Any]) -> bool:
        found = config.get("architectures")
        return isinstance(found, list) and any(name in found for name in self.architectures)

    def tensors(self, config: ModelConfig) -> Tensors:
        return self.table.tensors(config)

    def config_json(self, size: str) -> dict[str, Any]:
        """The ``config.json`` of its published checkpoint of a size, but for fields without effect."""
        usual = {
            "model_type": self.model_type,
            "hidden_act": "silu",
            "rms_norm_eps": self.defaults.get("rms_norm_eps", 1e-6),
            "rope_theta": 1000000.0,
            "tie_word_embeddings": False,
            **self.sizes[size],
        }
        values = {**{self.names.get(name, name): value for name, value in usual.items()}, **self.published}
        return {name: value for name, value in values.items() if value is not None}


def shape(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, **others: Any) -> dict[str, Any]:
    """The fields of ``config.json`` that make a size. ``inner``: the MLP's width."""
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        **others,
    }
