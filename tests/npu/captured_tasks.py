"""The captured tasks of a decode step of Dream-7B on a rank of TP 4 x BP 4, by which tests hold those of
``python -m scripts.bench plan``:

    python -m tests.npu.lab tests.npu.captured_tasks    writes tests/data/captured_tasks.json

Nothing is computed. Of each task the file has the bytes that it moves, without keys and values, and its FLOPs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves

from lopa_ascend.graph.compile import load_compiler
from lopa_ascend.graph.step import DecodeStep
from lopa_ascend.parallel.collectives import Group
from tests.npu.lab import capture, collectives, device, engine  # noqa: F401
from tests.npu.lab.capture import Task
from tests.npu.lab.device import Place
from tests.npu.report import BUCKET, Sample, step_tensors, variants

FILE = Path(__file__).parents[1] / "data" / "captured_tasks.json"
TP, BP = 4, 4
SEQUENCES = (1, 4, 8, 16)
KV_LENGTH = 544
FIRST, LAST = "aten::addmm", "npu::npu_add_rms_norm"
"""The first task of the first layer, and the last one of the last."""


@contextmanager
def groups() -> Iterator[tuple[Group, Group]]:
    """The groups of rank 0, whose collectives reach nobody."""
    dist.init_process_group("fake", rank=0, world_size=TP * BP, store=FakeStore())
    try:
        tp, bp = dist.new_group(list(range(TP))), dist.new_group(list(range(0, TP * BP, TP)))
        yield Group(0, TP, tp), Group(0, BP, bp)
    finally:
        dist.destroy_process_group()


def captured(sequences: int) -> tuple[list[Task], list[Task]]:
    """The tasks of a step's only layer, and all others."""
    bucket = BUCKET._replace(sequences=sequences, slots=BUCKET.branches // BP)
    with groups() as (tp, bp), device.nothing_computed():
        sample = Sample(variants()["bf16_tp4"], 1, tp)
        step = DecodeStep(bucket, sample.model, sample.score, bp)
        caches = sample.k_caches, sample.v_caches
        tensors = step_tensors(bucket, sample.model.config.hidden_size, caches, seats=2 * sequences)
        lengths = [KV_LENGTH] * (bucket.sequences * bucket.slots * bucket.entries)
        load_compiler("npu", "npugraph_ex", key="tasks").compile(step, f"sequences{sequences}", tensors, lengths)
    tasks = capture.tapes()[-1].tasks
    torch._dynamo.reset()  # else dynamo keeps the step, whose weights fill the device
    names = [task.op.name() for task in tasks]
    begin, end = names.index(FIRST), len(names) - names[::-1].index(LAST)
    return tasks[begin:end], tasks[:begin] + tasks[end:]


def size(places: list[Place]) -> int:
    return sum(prod(place.size) * place.dtype.itemsize for place in places)


def described(task: Task) -> list[Any]:
    """[name, bytes, FLOPs] of a task."""
    name = task.op.name()
    outputs = {argument.name for argument in task.op._schema.arguments if argument.is_out}
    read = {key: value for key, value in task.kwargs.items() if key not in outputs}
    given = [x for x in tree_leaves((task.args, read)) if isinstance(x, Place)]
    flops = 0
    if name in ("aten::mm", "aten::addmm"):
        left, right = given[-2:]
        flops = 2 * left.size[0] * left.size[1] * right.size[1]
    if name.removesuffix(".out") in ("aten::index_select", "aten::gather"):
        moved = 2 * size(task.results)
    elif name == "aten::copy_":
        moved = size(given[1:]) + size(task.results)
    elif "scatter_nd" in name:
        moved = 2 * size(given[2:])
    elif "scatter_pa" in name:
        moved = 2 * size(given[:2])
    elif "attention" in name:
        moved = 2 * size(given[:1])  # queries and output
    else:
        moved = size(given) + size(task.results)
    return [name, moved, flops]


def main() -> None:
    steps = []
    for sequences in SEQUENCES:
        parts = []
        for name, tasks in zip(("layer", "outside"), captured(sequences), strict=True):
            lines = ",\n".join(json.dumps(described(task)) for task in tasks)
            parts.append(f'"{name}": [\n{lines}\n]')
        steps.append(f'"{sequences}": {{{", ".join(parts)}}}')
    FILE.write_text("{" + ",\n".join(steps) + "}\n")


if __name__ == "__main__":
    main()
