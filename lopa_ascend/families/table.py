"""The tensors of a family, one row each: checkpoints are read, split, stacked and quantised by them.

With a model's sizes a `Table` gives `Tensors`. A model in plain torch makes these from its module instead.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal

from lopa_ascend.config import ModelConfig, ParameterError

HEAD = "lm_head"
"""`Row.linear` of the LM head."""
SCALE = "_scale"
"""Suffix of a quantised weight's scales."""
ZERO = "_zero"
"""Suffix of the codes that mean zero in the groups of an int4 weight. Its scales have two dimensions."""
DRAFTS = "_diff"
"""Suffix of the names of weights that drafts use in place of those without it."""
LORA_A, LORA_B = "_lora_a", "_lora_b"
"""Suffixes of the two factors that an adapter for drafts adds to a linear layer."""
Selected = slice | list[int]
"""Some of a dimension: a range, or indices."""
TensorSlices = Mapping[str, tuple[Selected, ...]]
"""By name in the checkpoint: a part of each dimension of a tensor."""
ALL: TensorSlices = {}
DIVIDED = ("heads", "kv_heads", "qkv_heads", "inner", "expert_inner", "shared_inner")
"""Sizes that are divided among tensor-parallel ranks."""


@dataclass(frozen=True, slots=True)
class Row:
    """A tensor of a checkpoint; in each layer, if it is one of ``Table.layer``."""

    name: str
    """In the checkpoint, within its layer."""
    ours: str
    """Our name, within its layer. Rows with the same one are stacked, in this order, along the first axis; with
    ``each`` those of an expert together."""
    shape: tuple[str, ...] = ()
    """Keys of `sizes_of`."""
    linear: str | None = None
    """Of the weight of a linear layer: its name in ``quantization_exclude``, or HEAD. LoRA may change it."""
    source: str | None = None
    """Of such a weight: the weight of the norm or linear layer that makes its input, up to a factor. It can be divided
    to make the input smaller."""
    flag: str | None = None
    """The field of ModelConfig that says whether it is there; None: it always is."""
    part: Literal["dense", "moe"] | None = None
    """In a model with experts: only layers without, or with them, have it."""
    each: bool = False
    """One for each expert; ``{}`` in the name stands for its number."""
    is_summed: bool = False
    """Added to what the ranks sum, so all but one of them have zeros."""
    is_float32: bool = False
    """Computed in float32, so it keeps this dtype whatever the model's is."""
    tied_to: str | None = None
    """The tensor with the same values if ``tie_word_embeddings``. A checkpoint may then leave this one out."""

    @property
    def split(self) -> str | None:
        """The size that is divided among ranks; None: each has the whole tensor."""
        return "vocab" if self.linear == HEAD else next((size for size in self.shape if size in DIVIDED), None)


@dataclass(frozen=True, slots=True)
class Table:
    """All tensors of a family, in the order in which they are loaded."""

    before: tuple[Row, ...]
    layer: tuple[Row, ...]
    """Of each layer. Our names begin with "layers.N."."""
    after: tuple[Row, ...]
    layers: str
    """Prefix of their names in the checkpoint, before ".N."."""

    def tensors(self, config: ModelConfig) -> Tensors:
        sizes = sizes_of(config)
        specs: dict[str, TensorSpec] = {}
        copies: dict[str, str] = {}
        for row, prefix, our_prefix in self._rows(config):
            if row.tied_to is not None and config.tie_word_embeddings:
                copies[row.name] = row.tied_to
            elif row.flag is None or getattr(config, row.flag):
                shape = tuple(sizes[size] for size in row.shape)
                specs[prefix + row.name] = TensorSpec(prefix + row.name, our_prefix + row.ours, shape, row, prefix)
        head = next(row.name for row in (*self.before, *self.after) if row.linear == HEAD)
        return Tensors(specs, copies, head.removesuffix(".weight"))

    def _rows(self, config: ModelConfig) -> Iterator[tuple[Row, str, str]]:
        """Each row with the prefixes of its name and of ours."""
        yield from ((row, "", "") for row in self.before)
        for n in range(config.num_layers):
            has_experts = config.experts is not None and n >= config.experts.first_layer
            rows = [row for row in self.layer if row.part in (None, "moe" if has_experts else "dense")]
            yield from ((row, f"{self.layers}.{n}.", f"layers.{n}.") for row in _for_each_expert(rows, config))
        yield from ((row, "", "") for row in self.after)


def _for_each_expert(rows: Sequence[Row], config: ModelConfig) -> Iterator[Row]:
    for (_, each), members in groupby(rows, lambda row: (row.ours, row.each)):
        if not each:
            yield from members
            continue
        assert config.experts is not None
        own = list(members)
        for number in range(config.experts.num_experts):
            yield from (replace(row, name=row.name.format(number)) for row in own)


def sizes_of(config: ModelConfig) -> dict[str, int]:
    """By what rows call them."""
    experts = config.experts
    return {
        "experts": experts.num_experts if experts else 0,
        "expert_inner": experts.inner if experts else 0,
        "shared_inner": experts.shared_inner if experts else 0,
        "qkv_heads": (config.num_heads + 2 * config.num_kv_heads) * config.head_dim,
        "vocab": config.vocab_size,
        "hidden": config.hidden_size,
        "inner": config.intermediate_size,
        "heads": config.num_heads * config.head_dim,
        "kv_heads": config.num_kv_heads * config.head_dim,
        "head_dim": config.head_dim,
    }


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor of one model."""

    name: str
    """In the checkpoint."""
    ours: str
    """What it becomes, or becomes a part of."""
    shape: tuple[int, ...]
    row: Row
    prefix: str = ""
    """Prefix of the names in its layer, in the checkpoint."""

    @property
    def module(self) -> str:
        return self.name.rpartition(".")[0]

    @property
    def split_axis(self) -> int | None:
        return None if self.row.split is None else self.row.shape.index(self.row.split)

    @property
    def source(self) -> str:
        """The tensor that is divided to make this layer's inputs smaller."""
        assert self.row.source is not None
        return self.prefix + self.row.source

    def quantized(self, layers: Quantized) -> Iterator[TensorSpec]:
        """This linear weight as it is quantised, and what lies behind it. All are divided alike."""
        if not layers.group_size:
            yield self
            yield self._beside(SCALE, self.shape[:1])
            return
        outputs, inputs = self.shape
        yield replace(self, shape=(outputs, inputs // 2))
        for suffix in (SCALE, ZERO)[: 1 + layers.has_zeros]:
            yield self._beside(suffix, (outputs, inputs // layers.group_size))

    def _beside(self, suffix: str, shape: tuple[int, ...]) -> TensorSpec:
        row = replace(self.row, name=self.row.name + suffix, shape=self.row.shape[: len(shape)], linear=None)
        return replace(self, name=self.name + suffix, ours=self.ours + suffix, shape=shape, row=row)


@dataclass(frozen=True)
class Quantized:
    """Linear layers that are quantised, all in one way."""

    modules: frozenset[str] = frozenset()
    group_size: int = 0
    """Inputs of int4 weights that share a scale; 0: the weights have 8 bits, with a scale for each output."""
    has_zeros: bool = False
    """Whether each group of int4 weights has its own code for zero."""
    is_fp8: bool = False
    """Whether weights of 8 bits are float8 e4m3 instead."""

    @property
    def codes(self) -> str:
        """Of the weights: "int8", "int4" or "fp8"."""
        return "int4" if self.group_size else "fp8" if self.is_fp8 else "int8"


FLOAT = Quantized()


@dataclass(frozen=True)
class Tensors:
    """The tensors that the checkpoint of a model must hold."""

    specs: Mapping[str, TensorSpec]
    """By name in the checkpoint, in the order of loading."""
    copies: Mapping[str, str]
    """Tied tensors: name -> tensor with the same values. A checkpoint may leave them out."""
    head: str = HEAD
    """The module of the LM head, tied or not."""

    @property
    def linears(self) -> dict[str, TensorSpec]:
        """By module, the head's among them."""
        return {spec.module: spec for spec in self.specs.values() if spec.row.linear is not None}

    def num_bytes(self, item_size: int, layers: Quantized = FLOAT, ranks: int = 1) -> int:
        """Bytes of one rank's part, without padding and the scales of int8 layers. ``item_size``: bytes of a float."""
        total = 0
        for spec in self.specs.values():
            size: float = item_size
            if spec.row.linear is not None and spec.module in layers.modules:
                # Of int4 each group has a scale in float32, and perhaps a byte for its zero.
                size = 1 if not layers.group_size else 0.5 + (4 + layers.has_zeros) / layers.group_size
            share = 1 if spec.split_axis is None else ranks
            total += int(math.prod(spec.shape) * size) // share
        return total

    def quantized(self, layers: Collection[str], group_size: int = 0, *, is_fp8: bool = False) -> Quantized:
        """Symmetric, for the linear ``layers`` as ``quantization_exclude`` calls them."""
        modules = (module for module, spec in self.linears.items() if spec.row.linear in layers)
        return Quantized(frozenset(modules), group_size, is_fp8=is_fp8)

    def with_scales(self, layers: Quantized) -> Tensors:
        """With quantised linear layers, and their scales behind each weight."""
        specs: dict[str, TensorSpec] = {}
        for spec in self.specs.values():
            is_quantized = spec.row.linear is not None and spec.module in layers.modules
            specs |= {part.name: part for part in (spec.quantized(layers) if is_quantized else (spec,))}
        return replace(self, specs=specs)

    def check_groups(self, layers: Quantized, ranks: int, sizes: Collection[int]) -> None:
        """Refuses experts in int4 or fp8, and a split that would put groups of int4 weights on two ranks
        (ParameterError). ``sizes``: other numbers of ranks that can split the model, for the message."""
        if layers.codes == "int8":
            return
        group, linears = layers.group_size, [s for name, s in self.linears.items() if name in layers.modules]
        experts = next((spec.module for spec in linears if spec.row.each), None)
        if experts is not None:
            raise ParameterError(
                "quantization", f"{layers.codes} is not supported for experts ({experts}); choose w8a8"
            )
        if not group:
            return
        undivided = {
            n: next((spec for spec in linears if spec.shape[1] // (n if spec.split_axis == 1 else 1) % group), None)
            for n in {ranks, *sizes}
        }
        wrong = undivided[ranks]
        if wrong is None:
            return
        found = f"groups of {group} do not divide the {wrong.shape[1]} inputs of {wrong.module}"
        choices = ", ".join(str(n) for n in sizes if undivided[n] is None)
        if choices:
            message = f"{found} among {ranks} ranks; choose one of {choices}"
            raise ParameterError("tensor_parallel_size", message)
        raise ParameterError("quantization", f"{found}; choose smaller groups, or w8a8")


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of the model that one tensor-parallel rank holds; by default the whole model."""

    rank: int = 0
    size: int = 1

    def slices(self, tensors: Tensors, config: ModelConfig) -> TensorSlices:
        """The rank's part of every tensor. Every rank has the same number of rows of the LM head. The last ones may
        reach beyond the vocabulary: they are padding."""
        return {
            spec.name: tuple(
                self._part(spec.row.split, size, config) if axis == spec.split_axis else slice(0, size)
                for axis, size in enumerate(spec.shape)
            )
            for spec in tensors.specs.values()
        }

    def _part(self, split: str | None, size: int, config: ModelConfig) -> Selected:
        if split == "qkv_heads" and self.size > 1:  # queries, keys and values of one tensor
            numbers = range(size)
            heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
            own_kv = self._range("kv_heads", kv_heads, config)
            spans = [(0, self._range("heads", heads, config)), (heads, own_kv), (heads + kv_heads, own_kv)]
            return [n for first, own in spans for n in numbers[first + own.start : first + own.stop]]
        return self._range(split, size, config)

    def _range(self, split: str | None, size: int, config: ModelConfig) -> slice:
        if split == "kv_heads":  # with more ranks than KV heads, several ranks hold the same head
            first = self.rank * config.num_kv_heads // self.size
            return slice(first * config.head_dim, (first + config.local_kv_heads(self.size)) * config.head_dim)
        local_size = -(-size // self.size)
        return slice(self.rank * local_size, (self.rank + 1) * local_size)
