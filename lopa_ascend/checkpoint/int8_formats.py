"""Int8 linear layers of a checkpoint: compressed-tensors or ModelSlim.

compressed-tensors describes layers in the field ``quantization_config`` of config.json, ModelSlim each tensor in a file
of its own. Both store int8 weights with a scale for each output. Scales of activations (static quantisation) are not
used: activations are quantised token by token when they run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lopa_ascend.checkpoint.files import CheckpointError, matches_pattern
from lopa_ascend.config.files import read_json_object, shown
from lopa_ascend.config.int4_files import int4_format
from lopa_ascend.config.quantized_files import (
    COMPRESSED_TENSORS,
    CONFIG_FIELD,
    MODELSLIM,
    fp8_format,
    modelslim_descriptions,
    uses_compressed_tensors,
)
from lopa_ascend.families.table import Tensors

Kind = Literal["dynamic", "static", "mixed"]
"""The checkpoint's tensors are for "static" or "dynamic" quantisation of activations, or for both ("mixed")."""
_MODELSLIM_KINDS: Mapping[str, Kind | None] = {
    "FLOAT": None,
    "W8A8_DYNAMIC": "dynamic",
    "W8A8": "static",
    "W8A8_MIX": "mixed",
}
_MODELSLIM_CACHES = ("kv_quant_type", "kv_cache_type", "fa_quant_type", "reduce_quant_type")
"""Fields that describe quantisation beyond linear layers."""
_WEIGHTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
_TOKEN = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
_TENSOR = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "tensor", "dynamic": False}


@dataclass(frozen=True)
class Int8Description:
    """A checkpoint's description of its int8 layers."""

    source: Path
    """The file of the description."""
    format: str
    """COMPRESSED_TENSORS or MODELSLIM."""
    kinds: Mapping[str, Kind]
    """By linear layer, in layer order. Others are float."""
    tensors: frozenset[str] | None
    """Names of all tensors that the checkpoint must hold; None: they are not listed."""

    def static(self) -> list[str]:
        """The layers that have only static scales of activations."""
        return [module for module, kind in self.kinds.items() if kind == "static"]


def describe_int8(path: Path, raw: Mapping[str, Any], expected: Tensors) -> Int8Description | None:
    """A directory's description of int8 layers, or None. ``raw`` is config.json.

    Raises:
        CheckpointError: the description is malformed or not of W8A8, or layers that run as one disagree.
    """
    field = raw.get(CONFIG_FIELD)
    is_compressed, descriptions = uses_compressed_tensors(field), modelslim_descriptions(path)
    is_compressed = is_compressed and int4_format(field) is None and fp8_format(field) is None
    if len(descriptions) > 1:
        names = " and ".join(file.name for file in descriptions)
        raise CheckpointError(f"{path}: {names} describe int8 layers, expected one of them")
    if is_compressed and descriptions:
        raise CheckpointError(
            f"{descriptions[0]}: describes int8 layers, and so does {CONFIG_FIELD} in config.json; expected one"
        )
    modules = [module for module in expected.linears if module != expected.head]
    if is_compressed:
        found = _CompressedTensors(path / "config.json", raw[CONFIG_FIELD]).describe(modules)
    elif descriptions:
        found = _describe_modelslim(descriptions[0], modules)
    else:
        return None
    check_stacks(found.source, found.kinds, expected)
    return found


def compressed_tensors_config(kept: Iterable[str]) -> dict[str, Any]:
    """``quantization_config`` of a checkpoint with int8 linear layers, except ``kept``."""
    weights = {**_WEIGHTS, "dynamic": False, "group_size": None, "observer": "minmax"}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": _TOKEN, "output_activations": None}
    return {
        "quant_method": COMPRESSED_TENSORS,
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": [*kept],
        "kv_cache_scheme": None,
    }


def check_stacks(source: Path, kinds: Mapping[str, str], expected: Tensors) -> None:
    """Raises CheckpointError if layers that run as one are not all float, or all of one kind. ``kinds`` has the layers
    that are not float, as the file ``source`` says."""
    stacks: dict[str, dict[str, str]] = {}
    for module, spec in expected.linears.items():
        stacks.setdefault(spec.ours, {})[module] = kinds.get(module, "float")
    for stack in stacks.values():
        if len({*stack.values()}) > 1:
            words = ", ".join(f"{module} is {kind}" for module, kind in stack.items())
            raise CheckpointError(f"{source}: {words}, expected the same of all: they run as one layer")


def check_modules(source: Path, modules: Collection[str], kind: str, expected: Tensors) -> None:
    """Raises CheckpointError if int4 or fp8 ``modules`` are the head, experts, or parts of a layer that runs as one."""
    if expected.head in modules:
        raise CheckpointError(f"{source}: {expected.head} is {kind}, expected a float head")
    for module, spec in expected.linears.items():
        if module in modules and spec.row.each:
            raise CheckpointError(f"{source}: {module} is {kind}, and experts are supported in float and in int8")
    check_stacks(source, dict.fromkeys(modules, kind), expected)


# ---- compressed-tensors ----------------------------------------------------------------------------------------------


class _CompressedTensors:
    """The field ``quantization_config``."""

    def __init__(self, file: Path, values: Mapping[str, Any]):
        self.file, self.values = file, values

    def describe(self, modules: Iterable[str]) -> Int8Description:
        self._expect(CONFIG_FIELD, self.values, {"format": "int-quantized"})
        for name in ("kv_cache_scheme", "sparsity_config", "transform_config"):
            value = self.values.get(name)
            says_dense = name == "sparsity_config" and isinstance(value, dict) and value.get("format") == "dense"
            if value not in (None, {}) and not says_dense:
                raise self._error(name, value, "none: it is not supported")
        groups = self.values.get("config_groups")
        if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
            raise self._error("config_groups", groups, "an object of objects")
        kinds_by_group = {name: self._kind(name, group) for name, group in groups.items()}
        ignored = self._names("ignore", self.values.get("ignore") or [])
        targets = {
            name: self._names(f"config_groups.{name}.targets", group.get("targets")) for name, group in groups.items()
        }
        kinds: dict[str, Kind] = {}
        for module in modules:
            if self._matches(ignored, module):
                continue
            names = [name for name in groups if "Linear" in targets[name] or self._matches(targets[name], module)]
            found = {kinds_by_group[name] for name in names}
            if len(found) > 1:
                raise CheckpointError(f"{self.file}: {module}: is in the groups {', '.join(names)}, expected one")
            if found:
                kinds[module] = found.pop()
        return Int8Description(self.file, COMPRESSED_TENSORS, kinds, None)

    def _kind(self, name: str, group: Mapping[str, Any]) -> Kind:
        """The kind of a group, which must be W8A8."""
        where = f"config_groups.{name}"
        if group.get("output_activations") is not None:
            raise self._error(f"{where}.output_activations", group["output_activations"], "none")
        self._expect(f"{where}.weights", group.get("weights"), _WEIGHTS)
        activations = group.get("input_activations")
        is_static = isinstance(activations, dict) and activations.get("strategy") == "tensor"
        self._expect(f"{where}.input_activations", activations, _TENSOR if is_static else _TOKEN)
        return "static" if is_static else "dynamic"

    def _expect(self, where: str, values: object, expected: Mapping[str, object]) -> None:
        if not isinstance(values, dict):
            raise self._error(where, values, "an object")
        for field, value in expected.items():
            if values.get(field) != value or type(values.get(field)) is not type(value):
                raise self._error(f"{where}.{field}", values.get(field), f"{value!r}: only W8A8 is supported")

    def _names(self, where: str, values: object) -> list[str]:
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            raise self._error(where, values, "a list of names")
        return values

    def _matches(self, names: Iterable[str], module: str) -> bool:
        """Whether a name is the layer's, or after "re:" a regular expression for its beginning."""
        return any(self._is_match(name[3:], module) if name.startswith("re:") else name == module for name in names)

    def _is_match(self, pattern: str, module: str) -> bool:
        try:
            return matches_pattern(pattern, module, is_whole=False)
        except ValueError as error:
            raise CheckpointError(f"{self.file}: {CONFIG_FIELD}: {error}") from error

    def _error(self, field: str, value: object, expected: str) -> CheckpointError:
        name = field if field.startswith(CONFIG_FIELD) else f"{CONFIG_FIELD}.{field}"
        return CheckpointError(f"{self.file}: {name} is {shown(value)}, expected {expected}")


# ---- ModelSlim -------------------------------------------------------------------------------------------------------


def _describe_modelslim(file: Path, modules: Iterable[str]) -> Int8Description:
    values = read_json_object(file, CheckpointError)
    for name in _MODELSLIM_CACHES:
        if values.get(name):
            raise CheckpointError(
                f"{file}: {name} is {shown(values[name])}, expected none: only linear layers are int8"
            )
    # Fields without a dot describe the whole checkpoint.
    types = {name: value for name, value in values.items() if "." in name}
    kinds: dict[str, Kind] = {}
    for name, value in types.items():
        if not isinstance(value, str) or value not in _MODELSLIM_KINDS:
            choices = ", ".join(_MODELSLIM_KINDS)
            raise CheckpointError(f"{file}: tensor {name}: is {shown(value)}, expected one of {choices}")
    for module in modules:
        value = types.get(f"{module}.weight")
        if value is None:
            raise CheckpointError(f"{file}: tensor {module}.weight: is not described")
        kind = _MODELSLIM_KINDS[value]
        if kind is not None:
            kinds[module] = kind
    for name, value in types.items():
        module, _, member = name.rpartition(".")
        expected = types[f"{module}.weight"] if module in kinds else "FLOAT"
        allowed = {expected, "FLOAT"} if member == "bias" else {expected}
        if value not in allowed:
            raise CheckpointError(f"{file}: tensor {name}: is {value}, expected {expected}")
    return Int8Description(file, MODELSLIM, kinds, frozenset(types))
