"""Loads the weights of a model: read a checkpoint, slice this rank's part, merge a LoRA adapter, quantise, stack, cast.

Each step is a stream of (name, tensor), so that only one tensor at a time is in memory beside the result. Slicing comes
before merging, so that the float32 temporaries of the merge have the size of the slice. Layers that are quantised and
split by columns are the exception: they are merged whole, because the scale of a row is that of all its columns.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from lopa_ascend.checkpoint.files import CheckpointError
from lopa_ascend.checkpoint.lora import Adapter, merge_adapter, open_adapter
from lopa_ascend.checkpoint.quantize import (
    only_columns,
    quantize_weight,
    quantized,
    stored_int8,
    weight_name,
    with_scale_slices,
    with_whole_columns,
)
from lopa_ascend.checkpoint.read import DTYPES, Checkpoint, ExpectedTensors, model_type, open_checkpoint
from lopa_ascend.checkpoint.shard import WHOLE, Shard, TensorSlices, slice_tensors, whole_slices
from lopa_ascend.checkpoint.stack import stack_projections, stacked_name
from lopa_ascend.checkpoint.values import check_finite, checked_copies
from lopa_ascend.config import ModelConfig
from lopa_ascend.config.engine import WEIGHT_DTYPES
from lopa_ascend.progress import progress

__all__ = [
    "DTYPES",
    "Adapter",
    "Checkpoint",
    "CheckpointError",
    "ExpectedTensors",
    "Shard",
    "load",
    "load_unsplit",
    "merge_adapter",
    "model_type",
    "open_adapter",
    "open_checkpoint",
    "quantize_weight",
    "refuse_adapter",
    "stack_projections",
    "with_dtype",
]


def with_dtype(config: ModelConfig, dtype: str) -> ModelConfig:
    """``config`` with the ``dtype`` that the weights are to have: "float32", "bfloat16", or "auto" to leave it.

    Raises:
        ValueError: ``dtype`` is unknown.
    """
    if dtype not in WEIGHT_DTYPES:
        raise ValueError(f"dtype: unknown value {dtype!r}; choose one of {', '.join(WEIGHT_DTYPES)}")
    return config if dtype == "auto" else replace(config, dtype=dtype)


def load(
    path: str | Path,
    *,
    lora: str | Path | None = None,
    dtype: str = "auto",
    device: str = "cpu",
    shard: Shard = WHOLE,
    int8: Collection[str] = (),
) -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    """Loads a rank's weights from a Dream directory, with a PEFT adapter merged in if there is one.

    Host memory peaks at the weights that are returned plus one tensor of the checkpoint. With an adapter, the float32
    temporaries of merging one tensor come on top: of the rank's part of it, or of the whole tensor if it is quantised
    and split by columns.

    Args:
        path: Hugging Face directory of a Dream checkpoint.
        lora: directory of a PEFT LoRA adapter; None for no adapter.
        dtype: "float32", "bfloat16", or "auto" for the one that ``config.json`` names.
        device: where the weights go.
        shard: which part to load; the rest of the files is not read.
        int8: the last parts of the names of linear layers that are quantised to int8, e.g. "q_proj". It is ignored if
            the checkpoint stores int8 layers.

    Returns:
        The config of the whole model, whose ``dtype`` is that of the weights; and the weights by our names:

        - ``qkv``: the rows [q; k; v] of this rank's heads; ``o``: the matching columns.
        - ``gate_up``: this rank's rows [gate; up] of the MLP; ``down``: the matching columns.
        - ``embed``: [vocab, hidden], on every rank.
        - ``head``: ``config.vocab_shard(shard.size)`` rows, zero beyond the vocabulary.
        - norms: whole.
        - int8 layers: ``weight`` is int8, and ``weight_scale`` [out] float32.

    Raises:
        CheckpointError: the checkpoint or the adapter cannot be loaded. Raised before any weight is read, except where
            weights are no finite numbers, or a tied head differs from the embedding.
        ValueError: ``dtype`` is unknown, or ``shard.size`` ranks cannot split the model; raised before any
            weight is read.
    """
    checkpoint = open_checkpoint(path)
    config = with_dtype(checkpoint.config, dtype)
    sizes = config.tensor_parallel_sizes()
    if shard.size not in sizes:
        choices = ", ".join(map(str, sizes))
        raise ValueError(f"shard: {shard.size} ranks cannot split this model; choose one of {choices}")
    slices = shard.tensor_slices(config)
    tensors, modules = _rank_tensors(checkpoint, slices, lora, int8)
    slices = with_scale_slices(slices, modules)
    stacked = stack_projections(
        tensors,
        slices,
        DTYPES[config.dtype],
        lambda name, tensor: check_finite(checkpoint.files[weight_name(name)], weight_name(name), tensor),
    )
    num_stacked = len({stacked_name(name) for name in slices})
    loading = progress(checked_copies(stacked, checkpoint, slices), "loading", num_stacked, "tensor", delay=1)
    return config, {name: tensor.to(device) for name, tensor in loading}


def _rank_tensors(
    checkpoint: Checkpoint, slices: TensorSlices, lora: str | Path | None, int8: Collection[str]
) -> tuple[Iterator[tuple[str, torch.Tensor]], Collection[str]]:
    """Names and tensors of a rank's part of a checkpoint, and the names of the linear layers that are int8 in it.

    Args:
        checkpoint: what to load.
        slices: the rank's.
        lora: directory of a PEFT LoRA adapter; None for no adapter.
        int8: the last parts of the names of linear layers that are quantised.

    Raises:
        CheckpointError: the adapter cannot be merged.
    """
    if checkpoint.int8 is not None:
        refuse_adapter(checkpoint, lora)
        modules: Collection[str] = checkpoint.int8.kinds
        return slice_tensors(stored_int8(checkpoint), with_scale_slices(slices, modules)), modules
    modules = checkpoint.expected.linears_named(int8)
    whole = with_whole_columns(slices, modules, checkpoint)
    tensors = slice_tensors(checkpoint.tensors(), whole)
    if lora is not None:
        tensors = merge_adapter(tensors, open_adapter(lora, checkpoint.config), whole)
    return only_columns(quantized(tensors, modules), slices, modules), modules


def refuse_adapter(checkpoint: Checkpoint, lora: str | Path | None) -> None:
    """Refuses an adapter for a checkpoint whose weights are int8.

    Raises:
        CheckpointError: there is an adapter.
    """
    if lora is not None:
        raise CheckpointError(
            f"{lora}: cannot be merged into the int8 weights of {checkpoint.path}; merge it into the float checkpoint "
            "and quantise that (python -m scripts.eval quantize MODEL OUT --lora ADAPTER), or serve the float "
            "checkpoint with the adapter and --quantization w8a8"
        )


def load_unsplit(
    checkpoint: Checkpoint,
    dtypes: Mapping[str, torch.dtype],
    *,
    lora: str | Path | None = None,
    device: str = "cpu",
) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors of a checkpoint as they are stored, neither split nor stacked, with an adapter merged in.

    Args:
        checkpoint: what to load.
        dtypes: by Hugging Face name, the dtype that each tensor is to have.
        lora: directory of a PEFT LoRA adapter; None for no adapter.
        device: where the tensors go. They share no memory with the checkpoint's files.

    Raises:
        CheckpointError: as of ``load``.
    """
    tensors, slices = checkpoint.tensors(), whole_slices(checkpoint.expected)
    if lora is not None:
        tensors = merge_adapter(tensors, open_adapter(lora, checkpoint.config, checkpoint.expected), slices)
    tensors = checked_copies(tensors, checkpoint, slices)
    for name, tensor in progress(tensors, "loading", len(checkpoint.files), "tensor", delay=1):
        own = tensor.to(dtype=dtypes[name], copy=True)
        check_finite(checkpoint.files[name], name, own)
        yield name, own.to(device)
