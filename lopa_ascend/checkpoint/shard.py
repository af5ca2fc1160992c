"""What a tensor-parallel rank holds of every tensor of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from lopa_ascend.checkpoint.read import expected_shapes
from lopa_ascend.config import ModelConfig

Slices = Mapping[str, tuple[slice, ...]]
"""By Hugging Face name, one slice with its start and stop for each dimension."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of rank ``rank`` out of ``size`` tensor-parallel ranks; by default everything."""

    rank: int = 0
    size: int = 1

    def slices(self, config: ModelConfig) -> Slices:
        """Heads, MLP and vocabulary by rank, the rest whole; in layer order.

        The rows of the vocabulary are as many on every rank, so the last ones may reach beyond the end: what the model
        lacks there is padding.
        """
        heads = self._even(config.num_heads * config.head_dim)
        first = self.rank * config.num_kv_heads // self.size  # of more ranks than KV heads, several hold the same one
        last = first + config.local_kv_heads(self.size)
        kv_heads = slice(first * config.head_dim, last * config.head_dim)
        inner = self._even(config.intermediate_size)
        vocab_size = config.vocab_shard(self.size)
        vocab = slice(self.rank * vocab_size, (self.rank + 1) * vocab_size)
        rows = {"q_proj": heads, "k_proj": kv_heads, "v_proj": kv_heads, "gate_proj": inner, "up_proj": inner}
        rows |= {"embed_tokens": vocab, "lm_head": vocab}
        columns = {"o_proj": heads, "down_proj": inner}
        held: dict[str, tuple[slice, ...]] = {}
        for name, shape in expected_shapes(config).items():
            module = name.split(".")[-2]
            by_dimension = zip((rows, columns), shape, strict=False)
            held[name] = tuple(split.get(module, slice(0, size)) for split, size in by_dimension)
        return held

    def _even(self, size: int) -> slice:
        local = size // self.size
        return slice(self.rank * local, (self.rank + 1) * local)


WHOLE = Shard()


def cut(stream: Iterable[tuple[str, torch.Tensor]], slices: Slices) -> Iterator[tuple[str, torch.Tensor]]:
    """The stream with a view of the part that ``slices`` names in place of each tensor."""
    for name, tensor in stream:
        yield name, tensor[slices[name]]
