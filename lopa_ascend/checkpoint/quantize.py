"""Turns a stream of tensors into one with int8 linear layers: quantises float weights, or reads the scales that a
checkpoint stores beside int8 weights."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

import torch
from torch import Tensor

from lopa_ascend.checkpoint.int8_members import Int8Members
from lopa_ascend.checkpoint.read import Checkpoint, map_tensor
from lopa_ascend.checkpoint.shard import TensorSlices

CHUNK = 1024
"""Rows of a weight that are converted to float32 at a time."""


def quantize_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantises a weight symmetrically, with one scale for each output: its largest magnitude / 127, and 1 for zeros.

    Args:
        weight: [out, in].

    Returns:
        int8 [out, in], and the scales, float32 [out].
    """
    codes = torch.empty(weight.shape, dtype=torch.int8)
    scales = torch.empty(weight.shape[0])
    for first in range(0, weight.shape[0], CHUNK):
        part = slice(first, first + CHUNK)
        wide = weight[part].to(torch.float32, copy=True)
        scale = wide.abs().amax(1) / 127
        scales[part] = scale.masked_fill_(scale == 0, 1)
        codes[part] = wide.div_(scale[:, None]).round_().clamp_(-127, 127).to(torch.int8)
    return codes, scales


def scale_name(module: str) -> str:
    """The Hugging Face name of the scales of a linear layer."""
    return f"{module}.weight_scale"


def weight_name(name: str) -> str:
    """The Hugging Face name of the weight that scales belong to; any other name as it is."""
    return name.removesuffix("_scale") if name.endswith(".weight_scale") else name


def quantized(tensors: Iterable[tuple[str, Tensor]], modules: Collection[str]) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors with the weights of linear layers as int8, each followed by its scales, float32 [out].

    Args:
        tensors: Hugging Face names and tensors. A weight that is quantised has all its columns: the scale is that of a
            whole row of the model, whichever columns a rank takes of it.
        modules: names of the linear layers.
    """
    for name, tensor in tensors:
        module = name.removesuffix(".weight")
        if module == name or module not in modules:
            yield name, tensor
            continue
        codes, scale = quantize_weight(tensor)
        yield name, codes
        yield scale_name(module), scale


def stored_int8(checkpoint: Checkpoint) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of a checkpoint with int8 layers, whose weights are each followed by their scales.

    Raises:
        CheckpointError: a member of a layer has values that make no sense.
    """
    for name, tensor in checkpoint.tensors():
        yield name, tensor
        module = name.removesuffix(".weight")
        if name.endswith(".weight") and module in checkpoint.members:
            yield scale_name(module), _stored_scale(checkpoint, module, tensor)


def _stored_scale(checkpoint: Checkpoint, module: str, weight: Tensor) -> Tensor:
    """The scales of an int8 layer, float32 [out], once all of its members have been checked.

    Args:
        module: the layer's name.
        weight: int8 [out, in].
    """
    files, bias_name = checkpoint.members[module], f"{module}.bias"
    tensors = {part: map_tensor(file, f"{module}.{part}") for part, file in files.items()}
    members = Int8Members(module, tensors, files)
    scale = members.weight_scale()
    bias = map_tensor(checkpoint.files[bias_name], bias_name) if bias_name in checkpoint.files else None
    members.check_quant_bias(weight, bias)
    return scale


def with_scale_slices(slices: TensorSlices, modules: Collection[str]) -> TensorSlices:
    """``slices`` with those of the scales of some linear layers: the rows of their weights, in the same order."""
    weights = {f"{module}.weight" for module in modules}
    scales = {scale_name(name.removesuffix(".weight")): slices[name][:1] for name in slices if name in weights}
    return {**slices, **scales}


def with_whole_columns(slices: TensorSlices, modules: Collection[str], checkpoint: Checkpoint) -> TensorSlices:
    """``slices`` with all columns of the weights of some linear layers of a checkpoint."""
    weights = [f"{module}.weight" for module in modules]
    return {**slices, **{name: (slices[name][0], slice(0, checkpoint.expected.shapes[name][1])) for name in weights}}


def only_columns(
    tensors: Iterable[tuple[str, Tensor]], slices: TensorSlices, modules: Collection[str]
) -> Iterator[tuple[str, Tensor]]:
    """Takes a rank's columns of the weights of linear layers that came with all columns.

    Args:
        tensors: Hugging Face names and tensors.
        slices: by Hugging Face name.
        modules: names of the linear layers.
    """
    for name, tensor in tensors:
        is_whole = name.endswith(".weight") and name.removesuffix(".weight") in modules
        yield name, tensor[:, slices[name][1]] if is_whole else tensor
