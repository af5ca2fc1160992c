"""The time of one decoding step, term by term: each task of ``tasks.py`` priced by a device, and the host's work."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from lopa_ascend.config import ModelConfig
from scripts.bench.plan.devices import Device, Range
from scripts.bench.plan.tasks import Task, Workload, step_tasks

ENDS = ("low", "high")
"""Ends of a prediction's range: the step's time with the fastest constants of a device, and with the slowest."""
LENGTHS_WRITTEN = 0.60
"""Share of steps of one sequence before which the host writes KV lengths into a captured graph, because they are not
those of the step before: 1,401 replays of the bundled model in blocks of 32. Shorter blocks change them more often."""
INPUTS_WRITTEN = 0.92
"""Share of steps of one sequence before which the host must write the inputs, because they are not those of the launch
before. Of the same replays."""


@dataclass(frozen=True)
class Step:
    """Seconds of a step's terms."""

    products: float
    """Matrix products: the longer of memory and arithmetic, and the fixed cost of a kernel."""
    attention: float
    collectives: float
    """With the events between the device's streams around each of them."""
    small_kernels: float
    gaps: float
    """Between tasks."""
    device: float
    """Sum of the terms above."""
    updates: float
    """Host: KV lengths that are written into the graph, on average."""
    other_host: float
    """Host: launch, inputs where they are written, and results of each sequence."""
    step: float
    """The longer of device and host, or their sum where the host does not work ahead."""
    bound_by: str
    """The term that takes most of ``step``."""

    def as_json(self) -> dict[str, Any]:
        """Milliseconds by term."""
        terms = {name: value for name, value in asdict(self).items() if name != "bound_by"}
        return {**{f"{name}_ms": round(1000 * value, 4) for name, value in terms.items()}, "bound_by": self.bound_by}


TERMS = {
    "product": "products",
    "head": "products",
    "attention": "attention",
    "small": "small_kernels",
    "sum": "collectives",
    "merge": "collectives",
    "exchange": "collectives",
}
"""The term of a step that a kind of task counts to."""


def predict(model: ModelConfig, devices: Range, work: Workload) -> dict[str, Step]:
    """The time of one step, at both ends of its range.

    Args:
        model: the geometry.
        devices: of each rank.
        work: what a group of ranks decodes.

    Raises:
        ValueError: the model cannot be split over ``tp`` ranks, or the precision is unknown.
    """
    return {end: predict_on(model, getattr(devices, end), work) for end in ENDS}


def predict_on(model: ModelConfig, device: Device, work: Workload) -> Step:
    """The time of one step on a device; see ``predict``."""
    shares = dict.fromkeys((*TERMS.values(), "gaps"), 0.0)
    for task in step_tasks(model, work):
        shares[TERMS[task.kind]] += task.times * seconds(task, device, work)
        shares["gaps"] += task.times * device.gap_s
    on_device, largest = sum(shares.values()), max(shares, key=shares.__getitem__)
    updates = model.num_layers * device.host_layer_s * _of_any(LENGTHS_WRITTEN, work.requests)
    inputs = device.host_inputs_s * _of_any(INPUTS_WRITTEN, work.requests)
    other_host = device.host_launch_s + inputs + work.requests * device.host_request_s
    host = updates + other_host
    step = max(on_device, host) if device.host_overlaps else on_device + host
    host_binds = host > (on_device if device.host_overlaps else shares[largest])
    return Step(
        **shares,
        device=on_device,
        updates=updates,
        other_host=other_host,
        step=step,
        bound_by="host" if host_binds else largest,
    )


def _of_any(share: float, requests: int) -> float:
    """The share of steps of several requests in which one or more of them is among this share of its own."""
    return 1 - (1 - share) ** requests


def seconds(task: Task, device: Device, work: Workload) -> float:
    """The time of a task on a device."""
    if TERMS[task.kind] == "collectives":
        ranks = work.bp if task.kind == "exchange" else work.tp
        return collective_seconds(device, ranks, task.bytes, task.kind) + device.collective_events_s
    memory = task.bytes / device.reachable_bandwidth
    if task.kind == "small":
        return memory + device.vector_kernel_s
    narrow = task.kind == "product"
    peak = device.peak_flops(work.precision if narrow or work.precision == "fp32" else "bf16")
    fixed = device.attention_kernel_s if task.kind == "attention" else device.matrix_kernel_s
    return max(memory, task.flops / (peak * device.compute_efficiency)) + fixed


def collective_seconds(device: Device, ranks: int, num_bytes: float, kind: str) -> float:
    """Seconds of an all-reduce (the kind "sum") of ``num_bytes``, or of an all-gather whose result has so many.

    The transfer follows msmodeling: the better of a ring and a tree. Sums above the device's limit have the larger
    fixed cost, and so has what branch parallel ranks exchange, whose communicator never uses the vector cores.
    """
    if kind == "sum" and (measured := device.measured_sum(ranks, num_bytes)) is not None:
        return measured - device.collective_events_s  # which the measured time has
    rounds, latency, link = (2 if kind == "sum" else 1), device.link_latency_s, device.reachable_link
    ring = rounds * (ranks - 1) * (latency + num_bytes / ranks / link)
    tree = rounds * (math.ceil(math.log2(ranks)) * latency + num_bytes / link)
    is_slow = kind == "exchange" or (kind == "sum" and num_bytes > ranks * device.sum_limit_bytes)
    return (device.slow_collective_s if is_slow else device.collective_s) + min(ring, tree)
