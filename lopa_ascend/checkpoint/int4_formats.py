"""Int4 linear layers of a checkpoint: GPTQ, AWQ, or the packed format of compressed-tensors.

The configuration says how weights are quantised, names of tensors say which. The formats were made for float or int8
activations; here activations are quantised token by token when they run, as for int8 layers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lopa_ascend.checkpoint.files import CheckpointError
from lopa_ascend.checkpoint.int8_formats import check_modules
from lopa_ascend.config.files import ConfigError, Fields
from lopa_ascend.config.int4_files import AWQ, GPTQ, GROUP_SIZES, PACKED, int4_description
from lopa_ascend.config.quantized_files import COMPRESSED_TENSORS, CONFIG_FIELD
from lopa_ascend.families.table import Quantized, Tensors

CODES = {GPTQ: "qweight", AWQ: "qweight", PACKED: "weight_packed"}
"""By format: the last part of the name of a layer's weights."""
_NONE: tuple[object, ...] = (None, False, {}, [])
_WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "dynamic": False}


@dataclass(frozen=True)
class Int4Description:
    """A checkpoint's description of its int4 layers."""

    source: Path
    """The file of the description."""
    format: str
    """GPTQ, AWQ or PACKED."""
    layers: Quantized
    zero_offset: int = 0
    """Added to a stored zero point, it gives the code for zero."""


@dataclass(frozen=True)
class _Scheme:
    group_size: int
    has_zeros: bool
    zero_offset: int = 0


def describe_int4(
    path: Path, raw: Mapping[str, Any], expected: Tensors, names: Collection[str]
) -> Int4Description | None:
    """A directory's description of int4 layers, or None. ``raw`` is config.json, ``names`` are those of the tensors.

    Raises:
        CheckpointError: the description is malformed, is not supported, or does not fit the model; or layers that run
            as one disagree.
    """
    found = int4_description(path, raw, CheckpointError)
    if found is None:
        return None
    source, name, values = found
    where = f"{source}: {CONFIG_FIELD}" if source.name == "config.json" else str(source)
    try:
        scheme = _READERS[name](Fields(values, where))
    except ConfigError as error:
        raise CheckpointError(str(error)) from error
    modules = frozenset(module for module in expected.linears if f"{module}.{CODES[name]}" in names)
    layers = Quantized(modules, scheme.group_size, scheme.has_zeros)
    check_modules(source, modules, "int4", expected)
    return Int4Description(source, name, layers, scheme.zero_offset)


def packed_config(kept: Collection[str], group_size: int) -> dict[str, Any]:
    """``quantization_config`` of a checkpoint with packed int4 linear layers, except ``kept``."""
    weights = {**_WEIGHTS, "symmetric": True, "group_size": group_size, "observer": "minmax"}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": COMPRESSED_TENSORS,
        "format": PACKED,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": [*kept],
        "kv_cache_scheme": None,
    }


# ---- the fields of each format ---------------------------------------------------------------------------------------


def _gptq(fields: Fields) -> _Scheme:
    fields.expect("bits", (4,))
    fields.expect("group_size", GROUP_SIZES)
    fields.expect("lm_head", _NONE)
    fields.expect("pack_dtype", ("int32", None))
    for name in ("checkpoint_format", "format"):
        fields.expect(name, ("gptq", "gptq_v2", None))
    # With static groups the order of activations changes no group. Where it does, the layers' g_idx says so as well.
    if fields.flag("desc_act", False) and not fields.flag("static_groups", False):
        expected = "false, or static_groups true: groups of inputs in another order are not supported"
        raise fields.error("desc_act", expected)
    is_v2 = "gptq_v2" in (fields.get("checkpoint_format"), fields.get("format"))
    return _Scheme(int(fields.get("group_size")), not fields.flag("sym", False), 0 if is_v2 else 1)


def _awq(fields: Fields) -> _Scheme:
    bits, group = (old if fields.has(old) else new for old, new in (("w_bit", "bits"), ("q_group_size", "group_size")))
    fields.expect(bits, (4,))
    fields.expect(group, GROUP_SIZES)
    for name in ("version", "format", "checkpoint_format"):
        if str(fields.get(name, "gemm")).lower() != "gemm":
            raise fields.error(name, "'gemm'")
    return _Scheme(int(fields.get(group)), has_zeros=True)


def compressed_groups(fields: Fields) -> list[Fields]:
    """The groups of layers of compressed-tensors. Raises ConfigError if the field is malformed, or also describes other
    parts of a model."""
    fields.expect("kv_cache_scheme", _NONE)
    fields.expect("transform_config", _NONE)
    sparsity = fields.get("sparsity_config")
    if not (isinstance(sparsity, dict) and sparsity.get("format") == "dense"):
        fields.expect("sparsity_config", _NONE)
    groups = fields.get("config_groups")
    if not isinstance(groups, dict) or not groups or not all(isinstance(group, dict) for group in groups.values()):
        raise fields.error("config_groups", "an object of objects")
    found = [Fields(group, f"{fields.source}.config_groups.{name}") for name, group in groups.items()]
    for group in found:
        group.expect("output_activations", _NONE)
        group.expect("format", (fields.get("format"), None))
    return found


def _packed(fields: Fields) -> _Scheme:
    schemes = {_packed_group(group) for group in compressed_groups(fields)}
    if len(schemes) > 1:
        raise fields.error("config_groups", "the same weights in all groups")
    return schemes.pop()


def _packed_group(fields: Fields) -> _Scheme:
    inputs = nested(fields, "input_activations", {})
    if inputs.values:
        for name, value in {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token"}.items():
            inputs.expect(name, (value,))
    weights = nested(fields, "weights", None)
    for name, value in _WEIGHTS.items():
        weights.expect(name, (value,), default=False if name == "dynamic" else None)
    weights.expect("group_size", GROUP_SIZES)
    weights.expect("actorder", (None, False, "weight", "static"))
    return _Scheme(int(weights.get("group_size")), not weights.flag("symmetric", True))


def nested(fields: Fields, name: str, default: object) -> Fields:
    """The fields of the object in a field."""
    value = fields.get(name) or default
    if not isinstance(value, dict):
        raise fields.error(name, "an object")
    return Fields(value, f"{fields.source}.{name}")


_READERS: Mapping[str, Callable[[Fields], _Scheme]] = {GPTQ: _gptq, AWQ: _awq, PACKED: _packed}
