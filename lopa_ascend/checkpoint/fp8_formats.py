"""Linear layers with float8 e4m3 weights in a checkpoint: ``float-quantized`` of compressed-tensors, or the method
"fp8" of Transformers, vLLM and DeepSeek.

The dtype of a weight says whether its layer is fp8, the shape of its scales what shares one. A layer keeps scales of
outputs, or one of the whole tensor, which each output gets. Weights with scales of blocks become floats as they are
read: no product of whole rows has such scales.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from lopa_ascend.checkpoint.files import CheckpointError, Header
from lopa_ascend.checkpoint.int4_formats import compressed_groups, nested
from lopa_ascend.checkpoint.int8_formats import check_modules
from lopa_ascend.checkpoint.int8_members import FLOATS, Member, check_member
from lopa_ascend.config.files import ConfigError, Fields
from lopa_ascend.config.quantized_files import COMPRESSED_TENSORS, CONFIG_FIELD, FLOAT_QUANTIZED, FP8, fp8_format
from lopa_ascend.families.table import Tensors

E4M3 = "F8_E4M3"
"""The safetensors name of the dtype."""
_NONE: tuple[object, ...] = (None, False, {}, [])
_NUMBER = {"num_bits": 8, "type": "float", "symmetric": True}
_SCALES = ("weight_scale", "weight_scale_inv")
"""Names of the scales. Codes are multiplied by either."""
_STATIC = ("input_scale", "activation_scale")
_LARGEST_BLOCK = 1 << 16
Block = tuple[int, int]
"""Outputs and inputs of a block."""


@dataclass(frozen=True)
class Fp8Description:
    """A checkpoint's description of its fp8 layers."""

    source: Path
    """The file of the description."""
    modules: frozenset[str]
    """The layers that are fp8 in files."""
    block: Block | None
    """Shares a scale; None: an output or the whole weight does."""
    with_input_scales: tuple[str, ...]

    def static(self) -> tuple[str, ...]:
        """The layers with scales of activations."""
        return self.with_input_scales


def describe_fp8(
    path: Path, raw: Mapping[str, Any], expected: Tensors, headers: dict[str, Header]
) -> tuple[Fp8Description | None, dict[str, dict[str, Header]]]:
    """A directory's description of fp8 layers, or None; and by layer its scales, by the last part of their names.

    Args:
        raw: content of config.json.
        headers: of all tensors of the checkpoint. The model's remain.

    Raises:
        CheckpointError: the description is malformed or not supported; layers that run as one disagree; or a tensor is
            missing, or has another shape or dtype.
    """
    name, source = fp8_format(raw.get(CONFIG_FIELD)), path / "config.json"
    if name is None:
        return None, {}
    try:
        block = _READERS[name](Fields(raw[CONFIG_FIELD], f"{source}: {CONFIG_FIELD}"))
    except ConfigError as error:
        raise CheckpointError(str(error)) from error
    modules = frozenset(m for m in expected.linears if (own := headers.get(f"{m}.weight")) and own.dtype == E4M3)
    if not modules:
        raise CheckpointError(f"{source}: {CONFIG_FIELD} describes fp8 layers, and no linear layer is {E4M3}")
    if block is None:
        check_modules(source, modules, "fp8", expected)
    members, static = {}, []
    for module in sorted(modules):
        members[module] = _taken_scale(source, module, expected.linears[module].shape, block, headers)
        for name in (f"{module}.{part}" for part in _STATIC):
            if name in headers:
                check_member(name, headers.pop(name), Member(((1,), ()), FLOATS))
                static.append(module)
    for name, header in headers.items():
        if header.dtype not in FLOATS and name.removesuffix(".weight") not in modules:
            words = f"is {header.dtype}, expected {' or '.join(FLOATS)}: only linear layers are fp8"
            raise CheckpointError(f"{header.file}: tensor {name}: {words}")
    return Fp8Description(source, modules, block, tuple(static)), members


def float_quantized_config(kept: list[str]) -> dict[str, Any]:
    """``quantization_config`` of a checkpoint with fp8 linear layers, except ``kept``."""
    weights = {**_NUMBER, "strategy": "channel", "dynamic": False, "group_size": None, "observer": "minmax"}
    inputs = {**_NUMBER, "strategy": "token", "dynamic": True, "group_size": None}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": COMPRESSED_TENSORS,
        "format": FLOAT_QUANTIZED,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": kept,
        "kv_cache_scheme": None,
    }


def scale_of_outputs(file: Path, module: str, weight: Tensor, scale: Tensor) -> Tensor:
    """The scale of each output of a weight [out, in], float32 [out]. Raises CheckpointError unless scales are positive
    and finite."""
    return _checked(file, module, scale).flatten().expand(len(weight))


def dequantized(file: Path, module: str, weight: Tensor, scale: Tensor, block: Block) -> Tensor:
    """The values of a weight [out, in] with scales of blocks, float32, each rounded once. Raises as
    ``scale_of_outputs``."""
    wide = weight.float()
    factors = _checked(file, module, scale).repeat_interleave(block[1], 1)[:, : wide.shape[1]]
    for rows, factor in zip(wide.split(block[0]), factors, strict=True):
        rows *= factor
    return wide


def _checked(file: Path, module: str, scale: Tensor) -> Tensor:
    wide = scale.float()
    wrong = wide[~(wide.isfinite() & (wide > 0))]
    if wrong.numel():
        found = float(wrong.flatten()[0])
        raise CheckpointError(f"{file}: {module}: has the scale {found}, expected positive finite numbers")
    return wide


def _taken_scale(
    source: Path, module: str, shape: tuple[int, ...], block: Block | None, headers: dict[str, Header]
) -> dict[str, Header]:
    """Takes the scale of a weight [out, in] out of ``headers``, and checks it."""
    outputs, inputs = shape
    shapes: tuple[tuple[int, ...], ...] = ((outputs, 1), (outputs,), (1,), (1, 1), ())
    if block is not None:
        shapes = ((-(-outputs // block[0]), -(-inputs // block[1])),)
    for part in _SCALES:
        name = f"{module}.{part}"
        if name in headers:
            header = headers.pop(name)
            check_member(name, header, Member(shapes, FLOATS))
            return {part: header}
    names = " or ".join(f"{module}.{part}" for part in _SCALES)
    raise CheckpointError(f"{source}: tensor {names}: is missing, expected {list(shapes[0])} in {' or '.join(FLOATS)}")


# ---- the fields of each format ---------------------------------------------------------------------------------------


def _fp8(fields: Fields) -> Block | None:
    fields.expect("activation_scheme", ("dynamic", "static"), default="dynamic")
    fields.expect("fmt", ("e4m3", "float8_e4m3fn", None))
    fields.expect("kv_cache_scheme", _NONE)
    return _block(fields, "weight_block_size") if fields.has("weight_block_size") else None


def _float_quantized(fields: Fields) -> Block | None:
    blocks = {_block_of_group(group) for group in compressed_groups(fields)}
    if len(blocks) > 1:
        raise fields.error("config_groups", "weights with scales of blocks in all groups or in none")
    return blocks.pop()


def _block_of_group(fields: Fields) -> Block | None:
    weights = _numbers(fields, "weights")
    weights.expect("dynamic", (False, None))
    weights.expect("strategy", ("channel", "tensor", "block"))
    if weights.get("strategy") == "block":
        return _block(weights, "block_structure")
    inputs = _numbers(fields, "input_activations")
    inputs.expect("strategy", ("token", "tensor"))
    inputs.expect("dynamic", (True,) if inputs.get("strategy") == "token" else (True, False))
    return None


def _numbers(fields: Fields, name: str) -> Fields:
    found = nested(fields, name, None)
    for part, expected in _NUMBER.items():
        found.expect(part, (expected,))
    return found


def _block(fields: Fields, name: str) -> Block:
    match fields.get(name):
        case [int(outputs), int(inputs)] if 0 < min(outputs, inputs) and max(outputs, inputs) <= _LARGEST_BLOCK:
            return outputs, inputs
    raise fields.error(name, f"two sizes from 1 to {_LARGEST_BLOCK}")


_READERS: Mapping[str, Callable[[Fields], Block | None]] = {FP8: _fp8, FLOAT_QUANTIZED: _float_quantized}
