"""Adds up a decode step of Dream-7B on 910C dies, TP 4 x BP 4, bf16, from the tasks that npugraph_ex captures.

    python -m scripts.npu_predict               the table of docs/predicted-step.md, at 1, 4 and 16 sequences
    python -m scripts.npu_predict --json        the same as JSON
    python -m scripts.npu_predict --constants   the constants of the device with their sources

The tasks are those of scripts/planner/captured.json, which a test holds equal to a fresh capture; the constants are
those of the planner (docs/planner.md). Nothing was measured on an NPU.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from lopa_ascend.config.help import HelpFormatter
from scripts.arguments import number_from
from scripts.planner.devices import Device, DeviceError, constants_table, load_device
from scripts.planner.models import load_model
from scripts.planner.step import COLLECTIVES, collective_seconds, kv_bytes_per_position

FILE = Path(__file__).parent / "planner" / "captured.json"
TP, BP, BLOCKS, BLOCK_LENGTH = 4, 4, 2, 32
LAYERS = 28
WRITTEN = 0.60
"""Share of replays of one sequence whose KV lengths differ from the replay before.

Measured with the bundled model of 75,610 training steps in blocks of BLOCK_LENGTH: 1,401 replays, 40 % with the lengths
of the last one (python -m scripts.bench_updates --block-size 32). Shorter blocks change them more often.
Of several sequences, one that has changed is enough."""
INPUTS_WRITTEN = 0.92
"""Share of replays of one sequence before which the host must write the inputs, because they are not those of the
launch before. Measured by the same command."""
PRODUCTS = ("aten::mm", "aten::addmm", "aten::matmul")
Task = tuple[str, int, int]
"""Name, bytes moved, FLOPs."""


@dataclass(frozen=True)
class Predicted:
    """Milliseconds of a step."""

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


def tasks_of(sequences: int) -> tuple[list[Task], list[Task]]:
    """The captured tasks of a layer, and those outside the layers."""
    found = json.loads(FILE.read_text(encoding="utf-8"))
    if str(sequences) not in found:
        raise ValueError(f"sequences: {sequences} is not in {FILE.name}; choose one of {', '.join(found)}")
    kept = found[str(sequences)]
    return [(*task,) for task in kept["layer"]], [(*task,) for task in kept["outside"]]


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


def predict(sequences: int, device: Device, context: int, case: str) -> Predicted:
    """Adds a step up.

    Args:
        sequences: decoded together; one of the captured numbers.
        device: of each rank.
        context: positions before the window of each sequence.
        case: see ``seconds``.
    """
    layer, outside = tasks_of(sequences)
    # Each block of a window is an entry, which reads all keys and values up to its end.
    positions = sequences * sum(context + (block + 1) * BLOCK_LENGTH for block in range(BLOCKS))
    kv_bytes = positions * kv_bytes_per_position(load_model("Dream-7B"), "bf16", TP) / LAYERS
    terms = dict.fromkeys(("products", "attention", "collectives", "small_kernels"), 0.0)
    for tasks, repeats in ((layer, LAYERS), (outside, 1)):
        for task in tasks:
            term, duration = seconds(task, device, case, kv_bytes)
            terms[term] += 1000 * repeats * duration
    on_device = sum(terms.values())
    updates = 1000 * LAYERS * device.host_layer_s * (1 - (1 - WRITTEN) ** sequences)
    inputs = device.host_inputs_s * (1 - (1 - INPUTS_WRITTEN) ** sequences)
    other = 1000 * (device.host_launch_s + inputs + sequences * device.host_request_s)
    host = updates + other
    largest = max(terms, key=terms.__getitem__)
    if device.host_overlaps:
        step, bound_by = max(on_device, host), "host" if host > on_device else largest
    else:
        step, bound_by = on_device + host, "host" if host > terms[largest] else largest
    return Predicted(
        sequences=sequences,
        tasks=LAYERS * len(layer) + len(outside),
        **terms,
        device=on_device,
        updates=updates,
        other_host=other,
        host=host,
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


def table(columns: Sequence[tuple[str, Predicted]]) -> str:
    """Predictions as a table in Markdown, a column each."""
    lines = ["| ms | " + " | ".join(name for name, _ in columns) + " |", "|---|" + "---|" * len(columns)]
    for field, name in ROWS.items():
        values = [getattr(found, field) for _, found in columns]
        shown = [f"{value:.2f}" if isinstance(value, float) else str(value).replace("_", " ") for value in values]
        lines.append(f"| {name} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.npu_predict", description=__doc__, formatter_class=HelpFormatter
    )
    parser.add_argument(
        "--device",
        default="910c",
        metavar="DEVICE",
        help="910c or h200, or a JSON file with one device, as scripts.plan --measure-cpu writes it (default: 910c)",
    )
    parser.add_argument(
        "--context",
        type=number_from(0),
        default=512,
        metavar="N",
        help="positions before the window of each sequence (default: 512)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--constants", action="store_true", help="print the device's constants with their sources")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    parser = build_parser()
    options = parser.parse_args(arguments)
    try:
        device = load_device(options.device)
    except DeviceError as error:
        parser.error(f"--device: {error}")
    if options.constants:
        print(constants_table(options.device))
        return 0
    columns = [
        (f"{sequences}, {case}", predict(sequences, device, options.context, case))
        for sequences in (1, 4, 16)
        for case in COLLECTIVES
    ]
    if options.json:
        print(json.dumps({name: asdict(found) for name, found in columns}))
    else:
        print(table(columns))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
