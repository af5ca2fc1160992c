"""Checkpoints from disk to packed tensors: read, merge the LoRA adapter, pack; a stream of (name, tensor)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from tqdm import tqdm

from lopa_ascend.checkpoint.files import CheckpointError
from lopa_ascend.checkpoint.lora import Adapter, merge, open_adapter
from lopa_ascend.checkpoint.pack import pack, packed_name
from lopa_ascend.checkpoint.read import DTYPES, Checkpoint, open_checkpoint
from lopa_ascend.config import ModelConfig

__all__ = ["Adapter", "Checkpoint", "CheckpointError", "load", "merge", "open_adapter", "open_checkpoint", "pack"]

_CHOICES = ("auto", "float32", "bfloat16")


def load(
    path: str | Path, *, lora: str | Path | None = None, dtype: str = "auto", device: str = "cpu"
) -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    """The packed weights of a Dream directory, with a PEFT adapter merged in if ``lora`` names one.

    Args:
        dtype: "float32", "bfloat16", or "auto" for the checkpoint's own.

    Returns:
        The config, whose ``dtype`` is that of the weights, and the weights by the names that `pack` gives them.

    Raises:
        CheckpointError: the checkpoint or the adapter cannot be loaded; found before any weight is read.
        ValueError: ``dtype`` is unknown.
    """
    if dtype not in _CHOICES:
        raise ValueError(f"dtype: unknown value {dtype!r}; choose one of {', '.join(_CHOICES)}")
    checkpoint = open_checkpoint(path)
    config = checkpoint.config if dtype == "auto" else replace(checkpoint.config, dtype=dtype)
    stream = checkpoint.tensors()
    if lora is not None:
        stream = merge(stream, open_adapter(lora, config))
    total = len({packed_name(name) for name in checkpoint.files})
    packed = tqdm(pack(stream, config, DTYPES[config.dtype]), "loading", total, unit="tensor", delay=1, disable=None)
    return config, {name: tensor.to(device) for name, tensor in packed}
