"""Loads the weights of a model: read a checkpoint, slice this rank's part, merge a LoRA adapter, quantise, stack, cast.

Each step is a stream of (name, tensor), so that only one tensor at a time is in memory beside the result. Slicing comes
before merging, so that the float32 temporaries of the merge have the size of the slice. Layers that are quantised and
split by columns are the exception: they are merged whole, because the scale of a row is that of all its columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from lopa_ascend.checkpoint.files import CheckpointError
from lopa_ascend.checkpoint.lora import (
    Adapter,
    draft_factors,
    merge_adapter,
    open_adapter,
    open_draft_adapter,
)
from lopa_ascend.checkpoint.read import DTYPES, Checkpoint, PlainTensors, config_json, open_checkpoint
from lopa_ascend.checkpoint.streams import (
    check_weights,
    checked_copies,
    quantize_weight,
    quantized,
    sliced,
    stacked,
    stored_fp8,
    stored_int4,
    stored_int8,
)
from lopa_ascend.config import ModelConfig
from lopa_ascend.config.engine import QUANTIZATIONS, WEIGHT_DTYPES
from lopa_ascend.families.table import FLOAT, SCALE, Quantized, Shard, TensorSlices
from lopa_ascend.process.progress import progress

__all__ = [
    "DTYPES",
    "Adapter",
    "Checkpoint",
    "CheckpointError",
    "PlainTensors",
    "Shard",
    "config_json",
    "load",
    "merge_adapter",
    "open_adapter",
    "open_checkpoint",
    "open_draft_adapter",
    "quantize_weight",
    "refuse_adapter",
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
    checkpoint: Checkpoint,
    *,
    lora: str | Path | None = None,
    draft_adapter: Adapter | None = None,
    dtype: str = "auto",
    dtypes: Mapping[str, torch.dtype] | None = None,
    device: str = "cpu",
    shard: Shard | None = None,
    layers: Quantized = FLOAT,
) -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    """Loads a rank's weights, with a PEFT adapter merged in if there is one.

    Host memory peaks at the weights that are returned plus one tensor of the checkpoint. With an adapter, the float32
    temporaries of merging one tensor come on top: of the rank's part of it, or of the whole tensor if it is quantised
    and split by columns.

    Args:
        checkpoint: what to load.
        lora: directory of a PEFT LoRA adapter; None for no adapter.
        draft_adapter: one that is not merged, but among the weights that are returned; see ``lora.draft_factors``.
        dtype: "float32", "bfloat16", or "auto" for the one that ``config.json`` names.
        dtypes: by name in the checkpoint, the dtype of each tensor; None: all have ``dtype``.
        device: where the weights go.
        shard: which part to load; the rest of the files is not read. None: the whole model.
        layers: the linear layers to quantise. Ignored if the checkpoint stores quantised layers.

    Returns:
        The config of the whole model, whose ``dtype`` is that of the weights; and the weights by our names, as the
        family's `Table` says. The head has ``config.vocab_shard(shard.size)`` rows, zero beyond the vocabulary.
        Of int8 and fp8 layers the weight is int8 or float8_e4m3fn, and ``weight_scale`` [out] float32. Of int4 layers
        there are what ``Int4Members.neutral`` says: ``weight`` [out, in / 2], ``weight_scale`` and perhaps
        ``weight_zero`` [out, in / G].

    Raises:
        CheckpointError: the adapter cannot be loaded; raised before any weight is read. Or weights are no finite
            numbers, or a tied head differs from the embedding.
        ValueError: ``dtype`` is unknown, or ``shard.size`` ranks cannot split the model or its groups of inputs;
            raised before any weight is read.
    """
    config, shard = with_dtype(checkpoint.config, dtype), shard or Shard()
    sizes = config.tensor_parallel_sizes()
    if shard.size not in sizes:
        choices = ", ".join(map(str, sizes))
        raise ValueError(f"shard: {shard.size} ranks cannot split this model; choose one of {choices}")
    layers = checkpoint.quantized or layers
    checkpoint.expected.check_groups(layers, shard.size, sizes)
    tensors = checkpoint.expected.with_scales(layers)
    slices = shard.slices(tensors, config)
    of_floats = shard.slices(checkpoint.expected, config)
    dtypes = dtypes or dict.fromkeys(checkpoint.files, DTYPES[config.dtype])
    is_float32 = {name for name, spec in tensors.specs.items() if spec.row.is_float32}
    dtypes = {name: torch.float32 if name in is_float32 else dtype for name, dtype in dtypes.items()}
    float_dtypes = {name: dtype for name, dtype in dtypes.items() if name + SCALE not in tensors.specs}
    check = partial(check_weights, checkpoint)
    is_stored = checkpoint.quantized is not None
    parts = _rank_tensors(checkpoint, slices if is_stored else of_floats, lora, layers)
    rank_stream = stacked(parts, tensors, slices, float_dtypes, check)
    num_stacked = len({spec.ours for spec in tensors.specs.values()})
    loading = progress(checked_copies(rank_stream, checkpoint, slices), "loading", num_stacked, "tensor", delay=1)
    weights = {name: tensor.to(device) for name, tensor in loading}
    if draft_adapter is not None:
        factors = draft_factors(draft_adapter, tensors, of_floats)
        weights |= {name: tensor.to(device, DTYPES[config.dtype], copy=True) for name, tensor in factors}
    return config, weights


def _rank_tensors(
    checkpoint: Checkpoint, slices: TensorSlices, lora: str | Path | None, layers: Quantized
) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors of a rank's part of a checkpoint.

    Args:
        checkpoint: what to load.
        slices: the rank's, of the tensors as the checkpoint has them.
        lora: directory of a PEFT LoRA adapter; None for no adapter.
        layers: the linear layers that are quantised in the result.

    Raises:
        CheckpointError: the adapter cannot be merged.
    """
    if checkpoint.quantized is not None:
        refuse_adapter(checkpoint, lora)
        if checkpoint.int4 is not None:
            return sliced(stored_int4(checkpoint, checkpoint.int4), slices)
        return sliced((stored_int8 if checkpoint.fp8 is None else stored_fp8)(checkpoint), slices)
    # The scale of a row is that of all its columns, so weights have all of them until they have been quantised.
    weights = [] if layers.group_size else [f"{module}.weight" for module in layers.modules]
    whole = {**slices, **{name: (slices[name][0], slice(None)) for name in weights}}
    tensors = sliced(checkpoint.tensors(), whole)
    if lora is not None:
        tensors = merge_adapter(tensors, open_adapter(lora, checkpoint.expected, checkpoint.config.model_type), whole)
    return sliced(quantized(tensors, layers), {name: (slice(None), slices[name][1]) for name in weights})


def refuse_adapter(checkpoint: Checkpoint, lora: str | Path | None) -> None:
    """Refuses an adapter for a checkpoint whose weights are quantised.

    Raises:
        CheckpointError: there is an adapter.
    """
    if lora is not None and checkpoint.quantized is not None:
        codes = checkpoint.quantized.codes
        setting = next(name for name, (kind, _) in QUANTIZATIONS.items() if kind == codes)
        raise CheckpointError(
            f"{lora}: cannot be merged into the {codes} weights of {checkpoint.path}; merge it into the float "
            "checkpoint and quantise that (in a clone: python -m scripts.eval quantize MODEL OUT --lora ADAPTER), or "
            f"serve the float checkpoint with the adapter and --quantization {setting}"
        )
