"""Devices: constants with their units and sources, from devices.json, and what a self-test has measured of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lopa_ascend.config.files import read_json_object
from scripts.arguments import InputError
from scripts.bench.tables import table

FILE = Path(__file__).with_name("devices.json")
REPORTED = "910c"
"""The built-in device that the self-test runs on."""
UPDATED_LAYERS = 28
"""Attention calls in the graph whose updates the self-test times."""


class DeviceError(InputError):
    """There is no such device, or a report that cannot be used."""


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
    """Fixed seconds of a matrix product, beside its arithmetic and memory traffic."""
    attention_kernel_s: float
    """Those of an attention."""
    vector_kernel_s: float
    """Those of any other kernel."""
    gap_s: float
    """Seconds from the end of a task to the beginning of the next one."""
    host_layer_s: float
    """Seconds of the host for each layer of a launch whose KV lengths have changed."""
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
    """Fixed seconds of a collective, with the wait for the slowest rank."""
    slow_collective_s: float
    """Those of a sum above the limit, and of what branch parallel ranks exchange."""
    sum_limit_bytes: float
    """Bytes for each rank that a sum may have at most to be fast."""
    collective_events_s: float
    """Seconds of the events between streams before and after a collective."""

    fp8_flops: float = 0.0
    """The constants from here on are those of GPUs alone. 0: the device has no such products."""
    sms: float = 0.0
    """Streaming multiprocessors, among which the tiles of a kernel are dealt out; 0: the device is no GPU."""
    l2_bandwidth: float = 0.0
    """Reachable bytes/s of reads from the L2 cache, of all SMs together."""
    fp8_efficiency: float = 0.0
    int8_efficiency: float = 0.0
    row_efficiency: float = 0.0
    """Share of the memory bandwidth that kernels reach which go through rows."""
    attention_efficiency: float = 0.0
    """Share of the peak in bf16 that a tile of attention reaches."""
    attention_rows: float = 0.0
    """Rows of such a tile."""
    attention_splits: float = 0.0
    """Parts into which the keys of a query are split at most."""

    measured_sums: tuple[tuple[int, float, float], ...] = ()
    """(ranks, bytes, seconds) of all-reduces that the self-test has timed, in the order of their bytes."""

    @property
    def reachable_bandwidth(self) -> float:
        """Bytes/s of memory."""
        return self.memory_bandwidth * self.memory_efficiency

    def peak_flops(self, precision: str) -> float:
        """FLOP/s of products of numbers of a format; InputError if the device has none."""
        peaks = {"bf16": self.bf16_flops, "w8a8": self.int8_flops, "fp32": self.fp32_flops, "fp8": self.fp8_flops}
        if not peaks[precision]:
            raise InputError(f"the device has no products in {precision}")
        return peaks[precision]

    def measured_sum(self, ranks: int, num_bytes: float) -> float | None:
        """Seconds of an all-reduce, between the next smaller and the next larger one that were timed; None if none were
        for so many ranks and bytes."""
        timed = [(size, seconds) for count, size, seconds in self.measured_sums if count == ranks]
        if not timed or not timed[0][0] <= num_bytes <= timed[-1][0]:
            return None
        return float(np.interp(num_bytes, *np.array(timed).T))


class Range(NamedTuple):
    """A device with the fastest values of its constants, and with the slowest."""

    low: Device
    """Of a step's time."""
    high: Device


CONSTANTS = tuple(f.name for f in fields(Device) if f.default is MISSING)
"""Those of every device."""
GPU_CONSTANTS = tuple(f.name for f in fields(Device) if f.default == 0.0)
"""Those that a GPU has besides."""


def known_devices() -> tuple[str, ...]:
    """Names of the built-in devices."""
    return tuple(read_json_object(FILE, DeviceError))


def load_device(name: str) -> Range:
    """A built-in device by its name, or the 910C with what a report of the self-test, by its file, has measured.
    DeviceError if there is neither, or the report is of another version of the self-test."""
    if name in known_devices():
        return _device(_constants(name))
    if not Path(name).exists():
        choices = ", ".join(known_devices())
        raise DeviceError(f"unknown device {name!r}; choose one of {choices}, or give a self-test's report")
    report, built_in = read_json_object(Path(name), DeviceError), load_device(REPORTED)
    try:
        found = _measured(report, built_in.low)
    except (KeyError, TypeError, ValueError) as error:
        raise DeviceError(f"{name}: not a report of this version's self-test ({error!r})") from error
    return Range(*(replace(device, **found) for device in built_in))


def constants_table(name: str) -> str:
    """The constants of a device with their sources, as a table in Markdown."""
    devices, known = load_device(name), _constants(name if name in known_devices() else REPORTED)
    rows = []
    for constant, (_, unit, source) in known.items():
        ends, old = ([getattr(device, constant) for device in each] for each in (devices, _device(known)))
        value = " to ".join(dict.fromkeys(f"{end:g}" for end in ends))
        rows.append((constant, f"{value} {unit}".rstrip(), source if ends == old else name))
    return table(("constant", "value", "source"), rows)


def _constants(name: str) -> dict[str, Any]:
    """Of a built-in device [value, unit, source] by name. A value that is known within a range alone is [fastest,
    slowest]."""
    described = read_json_object(FILE, DeviceError)[name]
    constants: dict[str, Any] = described["constants"]
    if like := described.get("like"):
        inherited = _constants(like).items()
        constants = {key: [*value[:2], f"as of {like}: {value[2]}"] for key, value in inherited} | constants
    return constants


def _device(constants: Mapping[str, Any]) -> Range:
    ends = {name: value if isinstance(value, list) else [value, value] for name, (value, *_) in constants.items()}
    return Range(
        *(Device(**{name: float(values[end]) for name, values in ends.items()}, measured_sums=()) for end in range(2))
    )


def _measured(report: Mapping[str, Any], device: Device) -> dict[str, Any]:
    """The constants that a report has, by name."""
    found: dict[str, Any] = {}
    if parts := report["parts"]:
        bandwidth = parts["products_bytes"] / (1e-6 * parts["products_us"])
        found["memory_efficiency"] = min(1.0, bandwidth / device.memory_bandwidth)
        keys = parts["attention_bytes"] / bandwidth
        found |= {"attention_kernel_s": max(0.0, 1e-6 * parts["attention_us"] - keys), "matrix_kernel_s": 0.0}
        found |= {"vector_kernel_s": 1e-6 * parts["small_us"], "gap_s": 0.0}  # its gap is part of each measured time
    updates = [times for times in report["updates_us"].values() if isinstance(times, dict)]
    if updates:
        changed = min(min(times["changed"], times["changed by a thread"]) - times["kept"] for times in updates)
        found["host_layer_s"] = max(0.0, 1e-6 * changed / UPDATED_LAYERS)
        found["host_launch_s"] = 1e-6 * min(times["kept"] for times in updates)
    times = report["all_reduce_us"]
    if sums := times.get("tp, captured"):
        ranks = report["tensor_parallel_size"]
        found["measured_sums"] = tuple((ranks, int(size), 1e-6 * us) for size, us in sums.items())
    if exchanged := times.get("bp, captured"):
        found["slow_collective_s"] = 1e-6 * min(exchanged.values())
    return found
