"""Descriptions of devices: constants with their units and sources, from devices.json or a file with one device."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from lopa_ascend.config.files import read_json_object

FILE = Path(__file__).with_name("devices.json")


class DeviceError(ValueError):
    """A description of a device that cannot be used. The message names the file and the field."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """One die, GPU or CPU. Rates are peaks, of which the efficiencies are the reachable shares."""

    bf16_flops: float
    """FLOP/s of matrix products."""
    int8_flops: float
    fp32_flops: float
    memory_bandwidth: float
    """Bytes/s."""
    memory_bytes: float
    compute_efficiency: float
    memory_efficiency: float
    matrix_kernel_s: float
    """Fixed seconds of a matrix product or an attention, beside its arithmetic and memory traffic."""
    vector_kernel_s: float
    """Fixed seconds of any other kernel."""
    matrix_kernels_layer: float
    vector_kernels_layer: float
    quantise_kernels_layer: float
    """Further vector kernels of a layer with W8A8."""
    other_kernels: float
    """Vector kernels of a step outside the layers."""
    host_layer_s: float
    """Seconds of the host for each layer of a launch."""
    host_launch_s: float
    host_inputs_s: float
    """Seconds of the host to write a launch's inputs."""
    host_request_s: float
    """Seconds of the host for each request's results."""
    host_overlaps: float
    """1: the host works while the device computes; 0: one after the other."""
    link_bandwidth: float
    """Bytes/s from one device to others, one way."""
    link_efficiency: float
    link_latency_s: float
    collective_s: float
    """Fixed seconds of a collective, optimistic."""
    slow_collective_s: float
    """Fixed seconds of a collective, pessimistic."""

    @property
    def reachable_bandwidth(self) -> float:
        """Bytes/s of memory."""
        return self.memory_bandwidth * self.memory_efficiency

    @property
    def reachable_link(self) -> float:
        """Bytes/s of the link."""
        return self.link_bandwidth * self.link_efficiency


CONSTANTS = tuple(f.name for f in fields(Device))
_POSITIVE = ("flops", "bandwidth", "bytes", "efficiency")
"""Constants whose names end so are divided by, or are sizes; all others may be 0."""

_UNITS = {"flops": ("FLOP/s", "OP/s"), "bandwidth": ("B/s",), "bytes": ("B",), "_s": ("s",)}
"""By the end of a constant's name: what its value is counted in. All others are plain numbers, without a unit."""


def known_devices() -> tuple[str, ...]:
    """Names of the built-in devices."""
    return tuple(read_json_object(FILE, DeviceError))


def load_device(name: str) -> Device:
    """A built-in device by its name, or the device that a JSON file describes.

    Raises:
        DeviceError: there is no such device or file, or the file lacks a constant or a source.
    """
    return parse_device(_description(name), name)


def constants_table(name: str) -> str:
    """The constants of a device with their sources, as a table in Markdown.

    Raises:
        DeviceError: as ``load_device``.
    """
    description = _description(name)
    parse_device(description, name)
    rows = [("constant", "value", "source"), ("---",) * 3]
    for constant in CONSTANTS:
        value, unit, source = description["constants"][constant]
        rows.append((constant, f"{value:g} {unit}".rstrip(), source))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _description(name: str) -> dict[str, Any]:
    built_in = read_json_object(FILE, DeviceError)
    if name in built_in:
        found: dict[str, Any] = built_in[name]
        return found
    if not Path(name).exists():
        raise DeviceError(f"unknown device {name!r}; choose one of {', '.join(built_in)}, or give a JSON file")
    return read_json_object(Path(name), DeviceError)


def parse_device(description: dict[str, Any], source: str) -> Device:
    """The device of a JSON object.

    Args:
        description: "constants": name -> [value, unit, source].
        source: where it comes from, for messages.

    Raises:
        DeviceError: a constant is missing, unknown, no number that makes sense, in another unit, or without a source.
    """
    constants = description.get("constants")
    if not isinstance(constants, dict):
        raise DeviceError(f'{source}: has no object "constants"')
    for name in constants.keys() - set(CONSTANTS):
        raise DeviceError(f"{source}: unknown constant {name!r}; choose from {', '.join(CONSTANTS)}")
    return Device(**{name: _value(constants, name, source) for name in CONSTANTS})


def _value(constants: dict[str, Any], name: str, source: str) -> float:
    entry = constants.get(name)
    if not (isinstance(entry, list) and len(entry) == 3 and isinstance(entry[2], str) and entry[2]):
        raise DeviceError(f"{source}: {name} is {entry!r}, expected [value, unit, source]")
    value, unit, _ = entry
    must_be_positive = name.endswith(_POSITIVE)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value < math.inf or (must_be_positive and value == 0):
        expected = "above 0" if must_be_positive else "of at least 0"
        raise DeviceError(f"{source}: {name} is {value!r}, expected a number {expected}")
    units = next((units for end, units in _UNITS.items() if name.endswith(end)), ("",))
    if value and unit not in units:  # 0 is 0 in every unit
        raise DeviceError(f"{source}: {name} is in {unit!r}, expected {' or '.join(map(repr, units))}")
    if name.endswith("efficiency") and value > 1:
        raise DeviceError(f"{source}: {name} is {value!r}, expected at most 1")
    return float(value)
