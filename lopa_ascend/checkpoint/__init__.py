"""Checkpoints from disk to packed tensors: read, shard, merge the LoRA adapter, pack; a stream of (name, tensor).

Sharding comes before merging, so that the merge's float32 temporaries are of the shard's size.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from tqdm import tqdm

from lopa_ascend.checkpoint.files import CheckpointError
from lopa_ascend.checkpoint.lora import Adapter, merge, open_adapter
from lopa_ascend.checkpoint.pack import pack, packed_name
from lopa_ascend.checkpoint.read import DTYPES, Checkpoint, open_checkpoint
from lopa_ascend.checkpoint.shard import WHOLE, Shard, cut
from lopa_ascend.config import ModelConfig

__all__ = [
    "Adapter",
    "Checkpoint",
    "CheckpointError",
    "Shard",
    "load",
    "merge",
    "open_adapter",
    "open_checkpoint",
    "pack",
]

_CHOICES = ("auto", "float32", "bfloat16")


def load(
    path: str | Path,
    *,
    lora: str | Path | None = None,
    dtype: str = "auto",
    device: str = "cpu",
    shard: Shard = WHOLE,
) -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    """The packed weights of a Dream directory, with a PEFT adapter merged in if ``lora`` names one.

    Host memory peaks at the weights returned and one tensor of the checkpoint. With an adapter, what the merge needs
    in float32 for the rank's part of one tensor comes on top.

    Args:
        dtype: "float32", "bfloat16", or "auto" for the checkpoint's own.
        shard: whose part to load; more of the files than this is not read.

    Returns:
        The whole model's config, whose ``dtype`` is that of the weights, and the weights by the names that `pack` gives
        them: heads [q; k; v] and MLP [gate; up] of this rank, as columns in ``o`` and ``down``, and
        ``config.vocab_shard(size)`` rows of ``embed`` and ``head``, the rows beyond the vocabulary zero.

    Raises:
        CheckpointError: the checkpoint or the adapter cannot be loaded; found before any weight is read.
        ValueError: ``dtype`` is unknown, or ``shard.size`` does not split the model; likewise.
    """
    if dtype not in _CHOICES:
        raise ValueError(f"dtype: unknown value {dtype!r}; choose one of {', '.join(_CHOICES)}")
    checkpoint = open_checkpoint(path)
    config = checkpoint.config if dtype == "auto" else replace(checkpoint.config, dtype=dtype)
    sizes = config.tensor_parallel_sizes()
    if shard.size not in sizes:
        choices = ", ".join(map(str, sizes))
        raise ValueError(f"shard: {shard.size} ranks cannot split this model; choose one of {choices}")
    slices = shard.slices(config)
    stream = cut(checkpoint.tensors(), slices)
    if lora is not None:
        stream = merge(stream, open_adapter(lora, config), slices)
    total = len({packed_name(name) for name in checkpoint.files})
    packed = tqdm(pack(stream, slices, DTYPES[config.dtype]), "loading", total, unit="tensor", delay=1, disable=None)
    return config, {name: tensor.to(device) for name, tensor in packed}
