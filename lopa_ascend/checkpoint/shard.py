"""Which part of every tensor of a checkpoint a tensor-parallel rank holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from lopa_ascend.checkpoint.read import ExpectedTensors, expected_shapes
from lopa_ascend.config import ModelConfig

TensorSlices = Mapping[str, tuple[slice, ...]]
"""By Hugging Face name, in layer order: one slice for each dimension, each with its start and stop."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of the model that one tensor-parallel rank holds; by default the whole model."""

    rank: int = 0
    size: int = 1
    """Number of tensor-parallel ranks."""

    def tensor_slices(self, config: ModelConfig) -> TensorSlices:
        """The rank's slices of every tensor: heads, MLP and LM head are split between the ranks, the rest is whole.

        Every rank has the same number of rows of the LM head, so those of the last rank may reach beyond the end of the
        vocabulary; the rows that the model lacks are padding.
        """
        heads = self._even_slice(config.num_heads * config.head_dim)
        # With more ranks than KV heads, several ranks hold the same head.
        first_kv_head = self.rank * config.num_kv_heads // self.size
        last_kv_head = first_kv_head + config.local_kv_heads(self.size)
        kv_heads = slice(first_kv_head * config.head_dim, last_kv_head * config.head_dim)
        inner = self._even_slice(config.intermediate_size)
        local_vocab_size = config.vocab_shard(self.size)
        vocab = slice(self.rank * local_vocab_size, (self.rank + 1) * local_vocab_size)
        split_rows = {
            "q_proj": heads,
            "k_proj": kv_heads,
            "v_proj": kv_heads,
            "gate_proj": inner,
            "up_proj": inner,
            "lm_head": vocab,
        }
        split_columns = {"o_proj": heads, "down_proj": inner}
        slices: dict[str, tuple[slice, ...]] = {}
        for name, shape in expected_shapes(config).items():
            module = name.split(".")[-2]
            rows = split_rows.get(module, slice(0, shape[0]))
            columns = [split_columns.get(module, slice(0, size)) for size in shape[1:]]  # a vector has none
            slices[name] = (rows, *columns)
        return slices

    def _even_slice(self, size: int) -> slice:
        """This rank's part of ``size`` rows or columns that the ranks split evenly."""
        local_size = size // self.size
        return slice(self.rank * local_size, (self.rank + 1) * local_size)


WHOLE = Shard()
"""The whole model, for a rank that is the only one."""


def whole_slices(expected: ExpectedTensors) -> TensorSlices:
    """All of every tensor, for a model that is not split."""
    return {name: tuple(slice(0, size) for size in shape) for name, shape in expected.shapes.items()}


def slice_tensors(
    tensors: Iterable[tuple[str, torch.Tensor]], slices: TensorSlices
) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and views of the part of each tensor that ``slices`` selects."""
    for name, tensor in tensors:
        yield name, tensor[slices[name]]
