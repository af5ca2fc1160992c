"""A decode step of Dream-7B, TP 4 x BP 4, bf16, added up from the tasks that npugraph_ex captures.

The tasks are those of captured.json, which ``python -m tests.npu.lab tests.npu.captured_tasks`` writes and a test holds
equal to a fresh capture. Nothing was measured on an NPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lopa_ascend.config.files import read_json_object
from scripts.bench.plan.devices import Device
from scripts.bench.plan.models import load_model
from scripts.bench.plan.step import collective_seconds, host_seconds, kv_bytes_per_position, whole_step

FILE = Path(__file__).with_name("captured.json")
TP, BP, BLOCKS, BLOCK_LENGTH = 4, 4, 2, 32
LAYERS = 28
CONTEXT = 512
"""Positions before the window that the captured attention was given."""
LENGTHS_WRITTEN = 0.60
"""Share of replays of one sequence whose KV lengths differ from those of the replay before: 1,401 replays of the
bundled model in blocks of BLOCK_LENGTH. Shorter blocks change them more often."""
INPUTS_WRITTEN = 0.92
"""Share of replays of one sequence before which the host must write the inputs, because they are not those of the
launch before. Of the same replays."""
PRODUCTS = ("aten::mm", "aten::addmm", "aten::matmul")
Task = tuple[str, int, int]
"""Name, bytes moved, FLOPs."""


@dataclass(frozen=True)
class CapturedStep:
    """A step added up from captured tasks, in milliseconds."""

    sequences: int
    tasks: int
    """Captured tasks of 28 layers and of the rest of the step."""
    products: float
    """Matrix products: the longer of memory and arithmetic, and the fixed cost of a kernel."""
    attention: float
    collectives: float
    small_kernels: float
    device: float
    updates: float
    """Host: KV lengths that are written into the graph, on average."""
    other_host: float
    """Host: launch, inputs where they are written, and results of each sequence."""
    host: float
    step: float
    bound_by: str
    """What takes most of ``step``."""


def tasks_of(sequences: int, file: Path = FILE) -> tuple[list[Task], list[Task]]:
    """The captured tasks of a layer, and those outside the layers.

    Raises:
        ValueError: the file cannot be read, or has no step of so many sequences.
    """
    kept = _steps(file).get(str(sequences))
    if kept is None:
        raise ValueError(f"sequences: {sequences} is not in {file.name}; choose one of {', '.join(_steps(file))}")
    return [(*task,) for task in kept["layer"]], [(*task,) for task in kept["outside"]]


def captured_sequences(file: Path = FILE) -> list[int]:
    """The numbers of sequences whose steps a file has.

    Raises:
        ValueError: the file cannot be read.
    """
    return [int(name) for name in _steps(file)]


def _steps(file: Path) -> dict[str, Any]:
    return read_json_object(file, ValueError)


def seconds(task: Task, device: Device, case: str, kv_bytes: float) -> tuple[str, float]:
    """The term of a task, and its time in seconds.

    Args:
        task: a captured one.
        device: of each rank.
        case: "optimistic" or "pessimistic" collectives.
        kv_bytes: keys and values that the attention of a layer reads.
    """
    name, moved, flops = task
    if "all_reduce" in name:
        result_bytes = moved / 2  # the task moves an input, and a result of the same size
        return "collectives", collective_seconds(device, TP, result_bytes, case, reduce=True)
    if "all_gather" in name:
        result_bytes = moved * TP / (1 + TP)  # the task moves an input, and a result that is TP times as large
        return "collectives", collective_seconds(device, TP, result_bytes, case, reduce=False)
    if "attention" in name:
        return "attention", (moved + kv_bytes) / device.reachable_bandwidth + device.matrix_kernel_s
    memory = moved / device.reachable_bandwidth
    if name in PRODUCTS:
        arithmetic = flops / (device.bf16_flops * device.compute_efficiency)
        return "products", max(memory, arithmetic) + device.matrix_kernel_s
    return "small_kernels", memory + device.vector_kernel_s


def predict_captured(sequences: int, device: Device, context: int, case: str, file: Path = FILE) -> CapturedStep:
    """Adds a step up.

    Args:
        sequences: decoded together; one of the captured numbers.
        device: of each rank.
        context: positions before the window of each sequence.
        case: see ``seconds``.
        file: with the captured tasks.

    Raises:
        ValueError: see ``tasks_of``.
    """
    layer, outside = tasks_of(sequences, file)
    # Each block of a window is an entry, which reads all keys and values up to its end.
    positions = sequences * sum(context + (block + 1) * BLOCK_LENGTH for block in range(BLOCKS))
    kv_bytes = positions * kv_bytes_per_position(load_model("Dream-7B"), "bf16", TP) / LAYERS
    terms = dict.fromkeys(("products", "attention", "collectives", "small_kernels"), 0.0)
    for tasks, repeats in ((layer, LAYERS), (outside, 1)):
        for task in tasks:
            term, duration = seconds(task, device, case, kv_bytes)
            terms[term] += 1000 * repeats * duration
    seconds_of_host = host_seconds(device, LAYERS, sequences, LENGTHS_WRITTEN, INPUTS_WRITTEN)
    updates, other = (1000 * duration for duration in seconds_of_host)
    step, bound_by = whole_step(device, terms, updates + other)
    return CapturedStep(
        sequences=sequences,
        tasks=LAYERS * len(layer) + len(outside),
        **terms,
        device=sum(terms.values()),
        updates=updates,
        other_host=other,
        host=updates + other,
        step=step,
        bound_by=bound_by,
    )


ROWS = {
    "tasks": "captured tasks",
    "products": "matrix products",
    "attention": "attention",
    "collectives": "collectives",
    "small_kernels": "small kernels",
    "device": "**device**",
    "updates": "host: KV lengths",
    "other_host": "host: launch, inputs, results",
    "host": "**host**",
    "step": "**step**",
    "bound_by": "bound by",
}


def table(columns: Sequence[tuple[str, CapturedStep]]) -> str:
    """Predictions as a table in Markdown, a column each."""
    lines = ["| ms | " + " | ".join(name for name, _ in columns) + " |", "|---|" + "---|" * len(columns)]
    for field, name in ROWS.items():
        values = [getattr(found, field) for _, found in columns]
        shown = [f"{value:.2f}" if isinstance(value, float) else str(value).replace("_", " ") for value in values]
        lines.append(f"| {name} | " + " | ".join(shown) + " |")
    return "\n".join(lines)
