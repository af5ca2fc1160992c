"""Loads the weights of a model: read a checkpoint, slice this rank's part, merge a LoRA adapter, quantise, stack, cast.

Each step is a stream of (name, tensor): only one tensor at a time is in memory beside the result. Slicing comes before
merging, so the float32 temporaries of the merge are slices. Layers that are quantised and split by columns are merged
whole: a row has one scale for all its columns.
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
    """``config`` with another ``dtype``; "auto" leaves it. Raises ValueError for an unknown one."""
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

    Host memory peaks at the result plus one tensor of the checkpoint. An adapter adds float32 temporaries of one
    tensor: of the rank's part, or of all of it if the layer is quantised and split by columns.

    Args:
        lora: directory of a PEFT LoRA adapter.
        draft_adapter: is not merged, but among the returned weights; see ``lora.draft_factors``.
        dtype: "float32", "bfloat16", or "auto" for the one that ``config.json`` names.
        dtypes: of each tensor by name in the checkpoint; None: ``dtype``.
        shard: the part to load; the rest of the files is not read. None: the whole model.
        layers: the linear layers to quantise. Ignored if the checkpoint stores quantised layers.

    Returns:
        The config of the whole model with the weights' ``dtype``, and the weights by our names (see the family's
        ``Table``). The head has ``config.vocab_shard(shard.size)`` rows, zero beyond the vocabulary. A quantised layer
        has an int8 or float8_e4m3fn ``weight`` and a float32 ``weight_scale`` [out], or int4 tensors as in
        ``Int4Members.neutral``.

    Raises:
        CheckpointError: the adapter cannot be loaded (before any weight is read), a weight is not finite, or a tied
            head differs from the embedding.
        ValueError: ``dtype`` is unknown, or ``shard.size`` ranks cannot split the model or its groups of inputs (before
            any weight is read).
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
    """Names in the checkpoint and tensors of a rank's part, merged and quantised; ``slices`` are of stored tensors."""
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
    """Raises CheckpointError for an adapter of a checkpoint with quantised weights."""
    if lora is not None and checkpoint.quantized is not None:
        codes = checkpoint.quantized.codes
        setting = next(name for name, (kind, _) in QUANTIZATIONS.items() if kind == codes)
        raise CheckpointError(
            f"{lora}: cannot be merged into the {codes} weights of {checkpoint.path}; merge it into the float "
            "checkpoint and quantise that (in a clone: python -m scripts.eval quantize MODEL OUT --lora ADAPTER), or "
            f"serve the float checkpoint with the adapter and --quantization {setting}"
        )
