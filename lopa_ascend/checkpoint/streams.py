"""The steps from a file to our weights, each a stream of (name in the checkpoint, tensor): slice, quantise, check and
stack one tensor at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from lopa_ascend.checkpoint.files import CheckpointError
from lopa_ascend.checkpoint.fp8_formats import scale_of_outputs
from lopa_ascend.checkpoint.int4_formats import Int4Description
from lopa_ascend.checkpoint.int4_members import Int4Members
from lopa_ascend.checkpoint.int8_members import Int8Members
from lopa_ascend.checkpoint.read import Checkpoint, map_tensor
from lopa_ascend.families.table import ALL, SCALE, ZERO, Quantized, Tensors, TensorSlices

_QUANTIZED_ROWS = 1024
"""Rows of a weight that are converted to float32 at a time."""
_INT4_LEVELS = 8, 9
"""Divisors of a group's largest magnitude, for the two scales that are tried."""
_COMPARED_ROWS = 4096
"""Rows that are compared at a time."""


def sliced(stream: Iterable[tuple[str, Tensor]], slices: TensorSlices) -> Iterator[tuple[str, Tensor]]:
    """Views of the parts that ``slices`` selects; other tensors stay whole."""
    for name, tensor in stream:
        yield name, tensor[slices[name]] if name in slices else tensor


# ---- quantised layers ------------------------------------------------------------------------------------------------


def quantize_weight(weight: Tensor, dtype: torch.dtype = torch.int8) -> tuple[Tensor, Tensor]:
    """A weight [out, in] as int8 or float8_e4m3fn codes, and the scale of each output, float32 [out]: its largest
    magnitude divided by that of the codes, 127 or 448; 1 for zeros."""
    codes = torch.empty(weight.shape, dtype=dtype)
    scales = torch.empty(weight.shape[0])
    largest = 127 if dtype == torch.int8 else torch.finfo(dtype).max
    for first in range(0, weight.shape[0], _QUANTIZED_ROWS):
        part = slice(first, first + _QUANTIZED_ROWS)
        wide = weight[part].to(torch.float32, copy=True)
        scale = wide.abs().amax(1) / largest
        scales[part] = scale.masked_fill_(scale == 0, 1)
        wide.div_(scale[:, None]).clamp_(-largest, largest)
        codes[part] = (wide.round_() if dtype == torch.int8 else wide).to(dtype)  # e4m3 rounds half to even itself
    return codes, scales


def quantize_int4(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """A weight [out, in] as int4, two codes a byte, the even input in the low bits, uint8 [out, in / 2]; and scales,
    which bfloat16 holds, float32 [out, in / group_size]. The code 8 is zero.

    The largest magnitude in a group becomes -8, the integer without a counterpart, so its scale may be negative. A
    smaller scale is taken if clipping that weight makes the sum of squared errors less.
    """
    outputs, inputs = weight.shape
    packed = torch.empty((outputs, inputs // 2), dtype=torch.uint8)
    scales = torch.empty(outputs, inputs // group_size)
    for first in range(0, outputs, _QUANTIZED_ROWS):
        part = slice(first, first + _QUANTIZED_ROWS)
        wide = weight[part].float().unflatten(1, (-1, group_size))
        largest = wide.gather(2, wide.abs().argmax(2, keepdim=True))
        tried = [(largest / -levels).bfloat16().float() for levels in _INT4_LEVELS]
        errors = [(_int4(wide, scale) * scale).sub_(wide).square_().sum(2, keepdim=True) for scale in tried]
        scale = torch.where(errors[1] < errors[0], tried[1], tried[0])
        codes = _int4(wide, scale).add_(8).to(torch.uint8).flatten(1)
        packed[part] = codes[:, ::2] | (codes[:, 1::2] << 4)
        scales[part] = scale[..., 0]
    return packed, scales


def _int4(wide: Tensor, scale: Tensor) -> Tensor:
    """The integers -8..7 nearest to wide / scale, in float32; 0 if the scale is 0."""
    return (wide / torch.where(scale == 0, 1, scale)).round_().clamp_(-8, 7)


def quantized(stream: Iterable[tuple[str, Tensor]], layers: Quantized) -> Iterator[tuple[str, Tensor]]:
    """Quantises the weights of ``layers``; scales follow each. For int8 and fp8 a weight must have all its columns,
    because a row of the model has one scale; for int4 it must have whole groups."""
    for name, tensor in stream:
        module = name.removesuffix(".weight")
        if module == name or module not in layers.modules:
            yield name, tensor
            continue
        size, dtype = layers.group_size, torch.float8_e4m3fn if layers.is_fp8 else torch.int8
        codes, scale = quantize_int4(tensor, size) if size else quantize_weight(tensor, dtype)
        yield name, codes
        yield name + SCALE, scale


def stored_int8(checkpoint: Checkpoint) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a checkpoint with int8 layers; scales follow each weight. Raises CheckpointError if a member of a
    layer has impossible values."""
    for name, tensor in checkpoint.tensors():
        yield name, tensor
        module = name.removesuffix(".weight")
        if name.endswith(".weight") and module in checkpoint.members:
            bias_name = f"{module}.bias"
            members = Int8Members(module, checkpoint.members_of(module), checkpoint.members[module])
            scale = members.weight_scale()
            has_bias = bias_name in checkpoint.files
            members.check_quant_bias(tensor, map_tensor(checkpoint.files[bias_name], bias_name) if has_bias else None)
            yield name + SCALE, scale


def stored_fp8(checkpoint: Checkpoint) -> Iterator[tuple[str, Tensor]]:
    """As ``stored_int8``, for fp8 layers."""
    for name, tensor in checkpoint.tensors():
        yield name, tensor
        module = name.removesuffix(".weight")
        if name.endswith(".weight") and module in checkpoint.members:
            (scale,) = checkpoint.members_of(module).values()
            yield name + SCALE, scale_of_outputs(checkpoint.files[name], module, tensor, scale)


def stored_int4(checkpoint: Checkpoint, description: Int4Description) -> Iterator[tuple[str, Tensor]]:
    """As ``stored_int8``, for int4 layers in the form of ``quantize_int4``. The codes for zero follow if the checkpoint
    is not symmetric."""
    linears = checkpoint.expected.linears
    for name, file in checkpoint.files.items():
        module = name.removesuffix(".weight")
        if name.endswith(".weight") and module in checkpoint.members:
            yield from Int4Members(description, linears[module], checkpoint.members_of(module)).neutral()
        else:
            yield name, map_tensor(file, name)


# ---- checks of values ------------------------------------------------------------------------------------------------


def check_weights(checkpoint: Checkpoint, name: str, tensor: Tensor) -> None:
    """``check_finite`` for a tensor of a checkpoint. An error of scales names their weight."""
    source = name if name in checkpoint.files else name.removesuffix(SCALE).removesuffix(ZERO)
    check_finite(checkpoint.files[source], source, tensor)


def check_finite(file: Path, name: str, tensor: Tensor) -> None:
    """Raises CheckpointError if a value is NaN or infinite: every token of every answer would depend on it."""
    if tensor.numel() == 0:
        return
    if tensor.dtype == torch.float8_e4m3fn:  # which has no infinity, and no extremes in torch
        low = high = torch.nan if bool(tensor.isnan().any()) else 0.0
    else:
        # The extremes are NaN if any value is. This takes a tenth of the time of copying the tensor, and no memory.
        low, high = (float(extreme) for extreme in tensor.aminmax())
    if not (low > -torch.inf and high < torch.inf):
        found = "NaN" if math.isnan(low) else str(low if low == -torch.inf else high)
        dtype = str(tensor.dtype).removeprefix("torch.")
        raise CheckpointError(f"{file}: tensor {name}: holds {found} as {dtype}, expected finite numbers")


def checked_copies(
    stream: Iterator[tuple[str, Tensor]], checkpoint: Checkpoint, slices: TensorSlices = ALL
) -> Iterator[tuple[str, Tensor]]:
    """Passes tensors on, and then compares tied tensors that are stored twice. Raises CheckpointError if a copy differs
    from its original in the rank's part."""
    yield from stream
    for name, file in checkpoint.copies.items():
        original = checkpoint.expected.copies[name]
        part = slices.get(original, ())
        copied, expected = map_tensor(file, name)[part], map_tensor(checkpoint.files[original], original)[part]
        for rows, others in zip(copied.split(_COMPARED_ROWS), expected.split(_COMPARED_ROWS), strict=True):
            if not torch.equal(rows.float(), others.float()):
                raise CheckpointError(
                    f"{file}: tensor {name}: differs from {original}, expected equal values because config.json ties "
                    "them (tie_word_embeddings)"
                )


# ---- our weights -----------------------------------------------------------------------------------------------------


def stacked(
    stream: Iterable[tuple[str, Tensor]],
    tensors: Tensors,
    slices: TensorSlices,
    dtypes: Mapping[str, torch.dtype],
    check: Callable[[str, Tensor], None],
) -> Iterator[tuple[str, Tensor]]:
    """Stacks tensors that belong together along their rows, and casts them. Yields our names and tensors in new memory,
    each with its last part. At any time only one of them is incomplete.

    Args:
        stream: the rank's parts, in the order of ``tensors``; each may be a view of its file.
        slices: the rows and columns of the rank. Rows that a tensor lacks at the end of its slice become zero.
        dtypes: of the results; tensors that are missing here keep theirs.
        check: gets the name and the cast values of each tensor; may raise.
    """
    missing = _rows_of_parts(tensors, slices)
    incomplete: dict[str, Tensor] = {}
    for name, part in stream:
        target, dtype = tensors.specs[name].ours, dtypes.get(name, part.dtype)
        parts = missing[target]
        if part.dim() == 0:
            part = part[None]
        if target not in incomplete:
            num_rows = max(rows.stop for rows in parts.values())
            incomplete[target] = torch.empty((num_rows, *part.shape[1:]), dtype=dtype)
        rows = incomplete[target][parts.pop(name)]
        rows[: len(part)] = part
        check(name, rows[: len(part)])
        rows[len(part) :] = 0  # beyond the vocabulary
        if not parts:
            whole = incomplete.pop(target)
            yield target, whole if tensors.specs[name].shape else whole[0]
    assert not incomplete, f"incomplete: {', '.join(incomplete)}"


def _rows_of_parts(tensors: Tensors, slices: TensorSlices) -> dict[str, dict[str, slice]]:
    """By our name: the parts and their rows in it."""
    parts_by_target: dict[str, dict[str, slice]] = {}
    for spec in tensors.specs.values():
        parts = parts_by_target.setdefault(spec.ours, {})
        start = max((part.stop for part in parts.values()), default=0)
        rows = slices[spec.name][0] if spec.shape else slice(0, 1)
        parts[spec.name] = slice(start, start + (len(rows) if isinstance(rows, list) else rows.stop - rows.start))
    return parts_by_target
