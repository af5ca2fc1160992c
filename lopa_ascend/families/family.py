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
    """Models of one architecture in fused ops: their tensors, their ``config.json``, and how they decode.

    Ranks may split them, linear layers may be int8, adapters are merged, and ``config.json`` is read strictly.
    """

    model_type: str
    """As ``config.json`` names it."""
    name: str = ""
    """Of the architecture, if another family has the same ``model_type``."""
    claims: Callable[[Mapping[str, Any]], bool] | None = None
    """Whether a ``config.json`` with this ``model_type`` is of this family; None: if no other family claims it."""
    architectures: tuple[str, ...] = ()
    """What ``architectures`` of its ``config.json`` names, if its ``model_type`` is that of other models, too; instead
    of ``claims``."""
    checkpoints: tuple[str, ...] = ()
    """What the names of its published checkpoints begin with."""
    table: Table
    """The tensors of a checkpoint, and how the decoder has them."""
    decoder: str = "lopa_ascend.model.decoder:Decoder"
    """The forward pass, a ``model.base.SplitModel``, as module and class. It imports torch, so not before use."""
    properties: ModelProperties
    names: Mapping[str, str] = field(default_factory=dict)
    """What its ``config.json`` calls the fields of Qwen2, if it has names of its own."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """The values of fields that are missing, by the names of Qwen2: of ``attention_bias`` (else true), ``rms_norm_eps``
    (else 1e-6), ``mask_token_id`` and ``block_size``."""
    implied: Callable[[Fields], Mapping[str, Any]] | None = None
    """The values of fields that are missing because others say them, by names in the file."""
    only: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    """Fields of its own that change the computation, with the values that can be computed. None is a missing field."""
    unused: frozenset[str] = frozenset()
    """Fields of its own that change nothing here, and fields of Qwen2 that ``complete`` reads in another way."""
    own_rope: frozenset[str] = frozenset()
    """Further fields of ``rope_parameters`` that ``complete`` reads, with "rope_type" or its older name "type"."""
    draft_adapter: str | None = None
    """The folder of a checkpoint that may hold an adapter which only drafts are computed with."""
    complete: Callable[[Fields, ModelConfig], ModelConfig] | None = None
    """Adds what only this family has, such as experts, to the configuration that was read."""
    end_tokens: tuple[str, ...] = ()
    """Special tokens of the tokenizer that end an answer and that no file names as such."""
    recommended: Mapping[str, Any] = field(default_factory=dict)
    """Decoding parameters that the authors recommend, beside the block size of a model that is block-causal."""
    source: str = ""
    """Where they recommend them."""
    sizes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Of its published checkpoints by size, such as "8B": the fields of `shape` and others that differ, named as in
    Qwen2."""
    published: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of ``config.json`` that are the same in all sizes, by their names in the file."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.name or self.model_type)
        if self.architectures:
            object.__setattr__(self, "claims", self._has_architecture)

    def _has_architecture(self, config: Mapping[str, Any]) -> bool:
        found = config.get("architectures")
        return isinstance(found, list) and any(name in found for name in self.architectures)

    def tensors(self, config: ModelConfig) -> Tensors:
        """The tensors of a model of this family."""
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
    """The fields of ``config.json`` that make a size: width, that of the MLP, layers, heads, and others by name."""
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        **others,
    }
