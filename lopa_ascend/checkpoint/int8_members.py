"""The tensors of int8 layers beside weight and bias: scales, offsets, and those of static quantisation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lopa_ascend.checkpoint.files import ITEM_SIZES, CheckpointError, Header
from lopa_ascend.checkpoint.int8_formats import Int8Description
from lopa_ascend.config.quantized_files import COMPRESSED_TENSORS
from lopa_ascend.families.table import Tensors

FLOATS = tuple(ITEM_SIZES)
"""Safetensors names of the dtypes of float tensors."""
_CHUNK = 1024
"""Rows of a weight that are summed at a time."""


@dataclass(frozen=True)
class Member:
    """A tensor of a quantised layer: its possible shapes and dtypes, by their safetensors names."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    required: bool = True
    is_read: bool = True


def members_of(description: Int8Description, module: str, num_outputs: int) -> dict[str, Member]:
    """The tensors of an int8 layer but its weight and bias, by the last part of their names."""
    per_output = ((num_outputs, 1), (num_outputs,))
    single = ((1,), ())
    kind = description.kinds[module]
    if description.format == COMPRESSED_TENSORS:
        members = {
            "weight_scale": Member(per_output, FLOATS),
            "weight_zero_point": Member(per_output, ("I8",), required=False),
        }
        if kind == "static":
            members["input_scale"] = Member(single, FLOATS)
            members["input_zero_point"] = Member(single, ("I8",), required=False)
        return members
    is_needed = kind != "static"
    members = {
        "weight_scale": Member(per_output, FLOATS, is_needed),
        "weight_offset": Member(per_output, FLOATS, is_needed),
    }
    if kind != "dynamic":
        is_read = kind == "static"
        members |= {
            "input_scale": Member(single, FLOATS, is_read=is_read),
            "input_offset": Member(single, ("I8", *FLOATS), is_read=is_read),
            "quant_bias": Member(((num_outputs,),), ("I32",), is_read=is_read),
            "deq_scale": Member(((num_outputs,),), ("F32", "I64"), is_read=is_read),
        }
    return members


def split_members(
    description: Int8Description, expected: Tensors, headers: dict[str, Header]
) -> dict[str, dict[str, Header]]:
    """Takes the members of int8 layers out of ``headers``, and checks them and the int8 weights. The model's tensors
    remain.

    Returns:
        By layer: the members that are there and read, by the last part of their names.

    Raises:
        CheckpointError: a tensor is missing, or has another shape or dtype.
    """
    source = description.source
    if description.tensors is not None:
        for name, header in headers.items():
            if name not in description.tensors:
                raise CheckpointError(f"{header.file}: tensor {name}: is not described in {source.name}")
        for name in sorted(description.tensors - headers.keys()):
            raise CheckpointError(f"{source}: tensor {name}: is described, but missing in the weights")
    found: dict[str, dict[str, Header]] = {}
    for module in description.kinds:
        weight = headers.get(f"{module}.weight")
        if weight is not None and weight.dtype != "I8":
            raise CheckpointError(f"{weight.file}: tensor {module}.weight: is {weight.dtype}, expected I8 by {source}")
        members = members_of(description, module, expected.specs[f"{module}.weight"].shape[0])
        found[module] = _taken(module, members, headers, source)
    for name, header in headers.items():
        if header.dtype not in FLOATS and name.removesuffix(".weight") not in description.kinds:
            raise CheckpointError(
                f"{header.file}: tensor {name}: is {header.dtype}, expected {' or '.join(FLOATS)} by {source}"
            )
    return found


def _taken(module: str, members: dict[str, Member], headers: dict[str, Header], source: Path) -> dict[str, Header]:
    """Takes the members of a layer out of ``headers``, and returns those that are read."""
    taken = {}
    for part, member in members.items():
        name = f"{module}.{part}"
        if name in headers:
            taken[part] = headers.pop(name)
            check_member(name, taken[part], member)
        elif member.required:
            words = f"{list(member.shapes[0])} in {' or '.join(member.dtypes)}"
            raise CheckpointError(f"{source}: tensor {name}: is missing, expected {words}")
    return {part: header for part, header in taken.items() if members[part].is_read}


def check_member(name: str, header: Header, member: Member) -> None:
    """Raises CheckpointError if a tensor has another shape or dtype than a member."""
    if header.shape not in member.shapes:
        expected = " or ".join(str(list(shape)) for shape in member.shapes)
        raise CheckpointError(f"{header.file}: tensor {name}: has shape {list(header.shape)}, expected {expected}")
    if header.dtype not in member.dtypes:
        raise CheckpointError(f"{header.file}: tensor {name}: is {header.dtype}, expected {' or '.join(member.dtypes)}")


class Int8Members:
    """The members of one int8 layer by the last part of their names; ``files`` are for messages."""

    def __init__(self, module: str, tensors: Mapping[str, Tensor], files: Mapping[str, Path]):
        self._module, self._tensors, self._files = module, tensors, files

    def weight_scale(self) -> Tensor:
        """The scale of each output, float32 [out]. Raises CheckpointError if a scale is not positive and finite, or an
        offset is not zero."""
        for part in ("weight_zero_point", "weight_offset"):
            if part in self._tensors and bool((self._tensors[part] != 0).any()):
                raise self._error(part, "is not zero everywhere, expected symmetric int8 weights")
        for part in ("weight_scale", "input_scale"):
            if part in self._tensors:
                self._check_scale(part, self._tensors[part])
        if "deq_scale" in self._tensors:
            return self._static_scale()
        return self._tensors["weight_scale"].flatten().float()

    def check_quant_bias(self, weight: Tensor, bias: Tensor | None) -> None:
        """Compares the bias that static quantisation has folded into integers with the layer's own ``bias`` [out]; the
        weight is int8 [out, in]. Raises CheckpointError if they differ by more than rounding."""
        if "quant_bias" not in self._tensors:
            return
        offset = float(self._tensors["input_offset"].reshape(()))
        # Rows in chunks, because the sum makes an int64 copy of what it adds.
        sums = torch.cat([rows.sum(1, dtype=torch.int64) for rows in weight.split(_CHUNK)]).double()
        own = torch.zeros_like(sums) if bias is None else bias.double() / self._deq_scale().double()
        expected = own - offset * sums
        difference = (self._tensors["quant_bias"].double() - expected).abs()
        # 2 for rounding to integers; 1/64 because bfloat16 may have rounded the bias, and the scale, to 8 bits each.
        tolerance = 2 + own.abs() / 64
        if bool((difference > tolerance).any()):
            raise self._error("quant_bias", "does not agree with the layer's bias and input_offset")

    def _static_scale(self) -> Tensor:
        """The scale of each output, from ``deq_scale``. A ``weight_scale`` must agree with it."""
        deq_scale = self._deq_scale()
        self._check_scale("deq_scale", deq_scale)
        scale = deq_scale / self._tensors["input_scale"].float().reshape(())
        stored = self._tensors.get("weight_scale")
        if stored is None:
            self._check_scale("deq_scale", scale)
            return scale
        if not torch.allclose(stored.flatten().float(), scale, rtol=2**-6):
            raise self._error("deq_scale", "is not input_scale * weight_scale")
        return stored.flatten().float()

    def _deq_scale(self) -> Tensor:
        """``deq_scale`` as float32 [out]. An int64 has the bits of a float32."""
        stored = self._tensors["deq_scale"]
        return stored if stored.dtype == torch.float32 else stored.to(torch.int32).view(torch.float32)

    def _check_scale(self, part: str, scale: Tensor) -> None:
        wrong = scale.float()[~(torch.isfinite(scale.float()) & (scale.float() > 0))]
        if wrong.numel():
            raise self._error(part, f"holds {float(wrong.flatten()[0])}, expected positive finite numbers")

    def _error(self, part: str, message: str) -> CheckpointError:
        return CheckpointError(f"{self._files[part]}: tensor {self._module}.{part}: {message}")
