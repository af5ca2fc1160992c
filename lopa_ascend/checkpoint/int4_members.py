"""Converts the tensors of int4 layers to our form: two codes a byte, the even input in the low bits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from lopa_ascend.checkpoint.files import CheckpointError, Header
from lopa_ascend.checkpoint.int4_formats import CODES, Int4Description
from lopa_ascend.checkpoint.int8_members import FLOATS, Member, check_member
from lopa_ascend.config.int4_files import AWQ, GPTQ, PACKED
from lopa_ascend.families.table import SCALE, ZERO, Quantized, Tensors, TensorSpec

MIDDLE = 8
"""The code for zero in a symmetric checkpoint."""
_AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]
"""Places of eight outputs in an int32 of AWQ."""


def _members_of(name: str, layers: Quantized, shape: tuple[int, ...]) -> dict[str, Member]:
    """The tensors of an int4 layer [out, in] but its bias, by the last part of their names."""
    outputs, inputs = shape
    groups = inputs // layers.group_size
    if name == PACKED:
        packed_zeros = (-(-outputs // 8), groups)
        return {
            "weight_packed": Member(((outputs, inputs // 8),), ("I32",)),
            "weight_scale": Member(((outputs, groups),), FLOATS),
            "weight_shape": Member(((2,),), ("I64", "I32")),
            # Versions before 0.10 do not pack zero points.
            "weight_zero_point": Member((packed_zeros, (outputs, groups)), ("I32", "I8"), required=layers.has_zeros),
        }
    codes = (inputs // 8, outputs) if name == GPTQ else (inputs, outputs // 8)
    return {
        "qweight": Member((codes,), ("I32",)),
        "qzeros": Member(((groups, outputs // 8),), ("I32",)),
        "scales": Member(((groups, outputs),), FLOATS),
        **({"g_idx": Member(((inputs,),), ("I32",), required=False)} if name == GPTQ else {}),
    }


def take_int4_members(
    description: Int4Description, expected: Tensors, headers: dict[str, Header]
) -> dict[str, dict[str, Header]]:
    """Replaces the tensors of int4 layers in ``headers`` by the weights that they make, and returns them: by layer, and
    by the last part of their names.

    Raises:
        CheckpointError: a tensor is missing, or has another shape or dtype; or groups do not divide the inputs.
    """
    found: dict[str, dict[str, Header]] = {}
    linears = expected.linears
    for module in sorted(description.layers.modules):
        spec = linears[module]
        if spec.shape[1] % description.layers.group_size:
            raise CheckpointError(
                f"{description.source}: {module}: has {spec.shape[1]} inputs, expected a multiple of group_size "
                f"{description.layers.group_size}"
            )
        found[module] = {}
        for part, member in _members_of(description.format, description.layers, spec.shape).items():
            name = f"{module}.{part}"
            if name in headers:
                found[module][part] = headers.pop(name)
                check_member(name, found[module][part], member)
            elif member.required:
                words = f"{list(member.shapes[0])} in {' or '.join(member.dtypes)}"
                raise CheckpointError(f"{description.source}: tensor {name}: is missing, expected {words}")
        headers[spec.name] = replace(found[module][CODES[description.format]], shape=spec.shape)
    integers = [name for name in headers if headers[name].dtype not in FLOATS and name.rpartition(".")[0] not in found]
    for name in integers:
        words = f"is {headers[name].dtype}, expected {' or '.join(FLOATS)} by {description.source}"
        raise CheckpointError(f"{headers[name].file}: tensor {name}: {words}")
    return found


class Int4Members:
    """The tensors of one int4 layer by the last part of their names; ``spec`` is of its weight [out, in]."""

    def __init__(self, description: Int4Description, spec: TensorSpec, tensors: Mapping[str, Tensor]):
        self._description, self._spec, self._tensors = description, spec, tensors

    def neutral(self) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors of our form: codes, uint8 [out, in / 2]; scales, float32 [out, in / G]; and unless the
        checkpoint is symmetric the codes for zero, uint8 [out, in / G].

        Raises:
            CheckpointError: inputs are in another order, or codes for zero are impossible.
        """
        name, is_packed = self._spec.name, self._description.format == PACKED
        self._check_order()
        zeros = self._zeros()
        if not self._description.layers.has_zeros and zeros is not None and bool((zeros != MIDDLE).any()):
            raise self._error("has zero points other than 8, and is said to be symmetric")
        yield name, self._codes()
        scale = self._tensors["weight_scale"] if is_packed else self._tensors["scales"].T
        yield name + SCALE, scale.float()
        if self._description.layers.has_zeros:
            assert zeros is not None
            yield name + ZERO, zeros

    def _codes(self) -> Tensor:
        if self._description.format == PACKED:
            return self._tensors["weight_packed"].contiguous().view(torch.uint8)
        codes = self._tensors["qweight"]
        if self._description.format == GPTQ:
            return codes.T.contiguous().view(torch.uint8)
        whole = _awq_order(nibbles(codes)).T.contiguous()
        return whole[:, ::2] | (whole[:, 1::2] << 4)

    def _zeros(self) -> Tensor | None:
        """The codes for zero, uint8 [out, in / G]; None if the file has none."""
        if self._description.format == PACKED:
            stored = self._tensors.get("weight_zero_point")
            if stored is None or stored.dtype == torch.int32:
                return None if stored is None else nibbles(stored.T)[:, : self._spec.shape[0]].T
            if bool(((stored < -8) | (stored > 7)).any()):
                raise self._error("has zero points outside of -8..7")
            return (stored + MIDDLE).view(torch.uint8)
        zeros = nibbles(self._tensors["qzeros"])
        if self._description.format == AWQ:
            return _awq_order(zeros).T
        zeros = zeros + self._description.zero_offset
        if bool((zeros > 15).any()):
            raise self._error(
                "has a stored zero point of 15, which programs read as 0 or as 16; expected a checkpoint in the format "
                "gptq_v2"
            )
        return zeros.T

    def _check_order(self) -> None:
        shape = self._tensors.get("weight_shape")
        if shape is not None and tuple(shape.tolist()) != self._spec.shape:
            raise self._error(f"has weight_shape {shape.tolist()}, expected {list(self._spec.shape)}")
        order = self._tensors.get("g_idx")
        if order is not None and not torch.equal(
            order.long(), torch.arange(len(order)) // self._description.layers.group_size
        ):
            raise self._error(
                "has a g_idx of another order of inputs (desc_act), expected groups of inputs that lie together"
            )

    def _error(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self._description.source}: {self._spec.module}: {message}")


def nibbles(words: Tensor) -> Tensor:
    """The codes in int32 [..., N], lowest bits first, uint8 [..., 8 * N]."""
    octets = words.contiguous().view(torch.uint8)
    return torch.stack((octets & 15, octets >> 4), -1).flatten(-2)


def _awq_order(codes: Tensor) -> Tensor:
    """Codes of AWQ [..., out] in the order of the outputs."""
    places: Tensor = codes.unflatten(-1, (-1, 8))
    return places[..., _AWQ_PLACES].flatten(-2)
