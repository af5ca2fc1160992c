"""The time of one decoding step, term by term: each task of ``tasks.py`` priced by a device, and the host's work."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from lopa_ascend.config import ModelConfig
from lopa_ascend.families import FAMILIES
from scripts.bench.plan import gpu
from scripts.bench.plan.devices import Device, Range
from scripts.bench.plan.tasks import Task, Workload, step_tasks

ENDS = ("low", "high")
"""Ends of a prediction's range: the step's time with the fastest constants of a device, and with the slowest."""
INPUTS_WRITTEN = 0.92
"""Share of steps of one sequence before which the host must write the inputs, because they are not those of the launch
before: 1,401 replays of the bundled model in blocks of 32."""


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
    """The longer of device and host on average over steps, or their sum where the host does not work ahead."""
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
    """The time of one step, at both ends of its range."""
    return {end: predict_on(model, getattr(devices, end), work) for end in ENDS}


def predict_on(model: ModelConfig, device: Device, work: Workload) -> Step:
    """The time of one step on a device; see ``predict``."""
    shares = dict.fromkeys((*TERMS.values(), "gaps"), 0.0)
    for task in step_tasks(model, work, on_gpu=device.sms > 0):
        shares[TERMS[task.kind]] += task.times * seconds(task, device, work)
        shares["gaps"] += task.times * device.gap_s
    on_device, largest = sum(shares.values()), max(shares, key=shares.__getitem__)
    lengths = _of_any(lengths_written(work.tpf, work.block), work.requests)
    inputs = max(lengths, _of_any(INPUTS_WRITTEN, work.requests))  # new lengths come with new inputs
    updates = model.num_layers * device.host_layer_s
    least = device.host_launch_s + work.requests * device.host_request_s
    cases = (  # share of the steps, seconds of the host
        (1 - inputs, least),
        (inputs - lengths, least + device.host_inputs_s),
        (lengths, least + device.host_inputs_s + updates),
    )
    host = sum(share * seconds for share, seconds in cases)
    overlaps = device.host_overlaps and not is_causal(model)
    if overlaps:  # one step ahead and no further: a short step does not make up for a long one
        step = sum(share * max(on_device, seconds) for share, seconds in cases)
    else:
        step = on_device + host
    host_binds = host > (on_device if overlaps else shares[largest])
    return Step(
        **shares,
        device=on_device,
        updates=lengths * updates,
        other_host=host - lengths * updates,
        step=step,
        bound_by="host" if host_binds else largest,
    )


def is_causal(model: ModelConfig) -> bool:
    """Whether a model decodes in a causal view. Its graphs are of passes, and the host decides between them."""
    family = FAMILIES.get(model.model_type)
    return family is not None and family.properties.is_causal


def lengths_written(tpf: float, block: int) -> float:
    """The share of steps of one sequence before which the host writes KV lengths into a captured graph.

    They change where a block is opened and where one is committed: in at most 2 tpf / block of the steps, and in fewer
    as both may fall into one. This is the share if they do so by chance; the golden traces of the published code have
    up to 0.14 less (tests/unit/test_planner.py).
    """
    return 1 - (1 - min(1.0, tpf / block)) ** 2


def _of_any(share: float, requests: int) -> float:
    """The share of steps of several requests in which one or more of them is among this share of its own."""
    return 1 - (1 - share) ** requests


def seconds(task: Task, device: Device, work: Workload) -> float:
    """The time of a task on a device."""
    if TERMS[task.kind] == "collectives":
        ranks = work.bp if task.kind == "exchange" else work.tp
        return collective_seconds(device, ranks, task.bytes, task.kind) + device.collective_events_s
    memory, precision = task.bytes / device.reachable_bandwidth, precision_of(task, work)
    if task.kind == "small":
        memory *= device.memory_efficiency / device.row_efficiency if device.sms else 1
        return memory + device.vector_kernel_s
    if device.sms and task.shape:
        arithmetic = gpu.seconds(task, device, precision)
    else:
        arithmetic = task.flops / (device.peak_flops(precision) * device.compute_efficiency)
    fixed = device.attention_kernel_s if task.kind == "attention" else device.matrix_kernel_s
    return max(memory, arithmetic) + fixed


def precision_of(task: Task, work: Workload) -> str:
    """The number format in which a task computes."""
    return work.precision if task.kind == "product" or work.precision == "fp32" else "bf16"


def floor(model: ModelConfig, device: Device, work: Workload) -> float:
    """The least seconds of a step by the data sheet: each task the longer of memory and arithmetic at their peaks."""
    tasks = (task for task in step_tasks(model, work, on_gpu=device.sms > 0) if TERMS[task.kind] != "collectives")
    return sum(
        task.times * max(task.bytes / device.memory_bandwidth, task.flops / device.peak_flops(precision_of(task, work)))
        for task in tasks
    )


def collective_seconds(device: Device, ranks: int, num_bytes: float, kind: str) -> float:
    """Seconds of an all-reduce (the kind "sum") of ``num_bytes``, or of an all-gather whose result has so many.

    The transfer follows msmodeling: the better of a ring and a tree. Sums above the device's limit have the larger
    fixed cost, and so has what branch parallel ranks exchange, whose communicator never uses the vector cores.
    """
    if kind == "sum" and (measured := device.measured_sum(ranks, num_bytes)) is not None:
        return measured - device.collective_events_s  # which the measured time has
    rounds, latency = (2 if kind == "sum" else 1), device.link_latency_s
    link = device.link_bandwidth * device.link_efficiency
    ring = rounds * (ranks - 1) * (latency + num_bytes / ranks / link)
    tree = rounds * (math.ceil(math.log2(ranks)) * latency + num_bytes / link)
    is_slow = kind == "exchange" or (kind == "sum" and num_bytes > ranks * device.sum_limit_bytes)
    return (device.slow_collective_s if is_slow else device.collective_s) + min(ring, tree)
