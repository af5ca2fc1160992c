"""Checks of the weights themselves, made while they are loaded."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from lopa_ascend.checkpoint.files import CheckpointError
from lopa_ascend.checkpoint.read import Checkpoint, map_tensor
from lopa_ascend.checkpoint.shard import TensorSlices

_CHUNK = 4096
"""Rows that are compared at a time."""


def check_finite(file: Path | str, name: str, tensor: torch.Tensor) -> None:
    """Refuses a tensor with a value that is not a finite number: every token of every answer would depend on it.

    Args:
        file: where the tensor comes from, for the message.
        name: the tensor's name, for the message.
        tensor: what is checked; on the CPU.

    Raises:
        CheckpointError: a value is NaN or infinite.
    """
    if tensor.numel() == 0:
        return
    # The extremes are NaN if any value is. This takes a tenth of the time of copying the tensor, and no memory.
    low, high = (float(extreme) for extreme in tensor.aminmax())
    if not (low > -torch.inf and high < torch.inf):
        if math.isnan(low):
            found = "NaN"
        else:
            found = str(low if low == -torch.inf else high)
        dtype = str(tensor.dtype).removeprefix("torch.")
        raise CheckpointError(f"{file}: tensor {name}: holds {found} as {dtype}, expected finite numbers")


def checked_copies(
    tensors: Iterator[tuple[str, torch.Tensor]], checkpoint: Checkpoint, slices: TensorSlices
) -> Iterator[tuple[str, torch.Tensor]]:
    """Passes tensors on, and then compares the tied tensors that were stored twice, which differ only by mistake.

    Args:
        tensors: names and tensors.
        checkpoint: where they come from.
        slices: the rows and columns of this rank.

    Raises:
        CheckpointError: a stored copy differs from its original.
    """
    yield from tensors
    originals: Mapping[str, str] = checkpoint.expected.copies
    for name, file in checkpoint.copies.items():
        original = originals[name]
        copied = map_tensor(file, name)[slices[original]]
        expected = map_tensor(checkpoint.files[original], original)[slices[original]]
        for rows, others in zip(copied.split(_CHUNK), expected.split(_CHUNK), strict=True):
            if not torch.equal(rows.float(), others.float()):
                raise CheckpointError(
                    f"{file}: tensor {name}: differs from {original}, expected equal values because config.json ties "
                    "them (tie_word_embeddings)"
                )
