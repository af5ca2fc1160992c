"""The tasks that a prediction adds up, against those that npugraph_ex captures of Dream-7B on a rank of TP 4 x BP 4."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from scripts.bench.plan.models import load_model
from scripts.bench.plan.tasks import SPLIT_TASKS, Task, Workload, step_tasks

CAPTURED = json.loads((Path(__file__).parents[1] / "data" / "captured_tasks.json").read_text())
"""By sequences, the captured tasks of the only layer and of the rest: [name, bytes, FLOPs]."""
KINDS = {"aten::mm": "product", "aten::addmm": "product", "lab::all_reduce_": "sum", "npu::npu_fused": "attention"}
LAYERS = 28


def expected(sequences: str) -> list[Task]:
    """The captured tasks of a step as predicted ones."""
    tasks = []
    for part, count in (("layer", LAYERS), ("outside", 1)):
        for name, moved, flops in CAPTURED[sequences][part]:
            kind = next((kind for begin, kind in KINDS.items() if name.startswith(begin)), "small")
            kind = "head" if (part, kind) == ("outside", "product") else kind
            if "all_gather" in name:  # a rank of four gives a fifth of what the task moves
                tasks.append(Task("gather", moved * 4 / 5, 0, count))
            elif kind == "sum":
                tasks.append(Task(kind, moved / 2, 0, count))
            else:
                tasks.append(Task(kind, moved, flops, count))
    return tasks


def totals(tasks: list[Task]) -> tuple[Counter[str], Counter[str], Counter[str]]:
    """By kind: tasks, bytes and FLOPs."""
    counted: tuple[Counter[str], ...] = (Counter(), Counter(), Counter())
    for task in tasks:
        kind = "gather" if task.kind in ("merge", "exchange") else task.kind
        for found, value in zip(counted, (1, task.bytes, task.flops), strict=True):
            found[kind] += round(task.times * value)
    number, moved, flops = counted
    return number, moved, flops


@pytest.mark.parametrize("sequences", CAPTURED)
def test_the_predicted_tasks_are_those_that_are_captured(sequences: str) -> None:
    work = Workload(tp=4, bp=4, k=3, window=64, context=0, requests=int(sequences))
    found, captured = totals(list(step_tasks(load_model("Dream-7B"), work))), totals(expected(sequences))
    splits = LAYERS * (SPLIT_TASKS - 1)  # captured as one op, which a 910C runs as a copy of each part
    assert abs(found[0]["small"] - splits - captured[0]["small"]) <= 1
    for kind in ("product", "head", "attention", "sum", "gather"):
        assert found[0][kind] == captured[0][kind]
    for kind in ("product", "head"):
        assert found[2][kind] == captured[2][kind]
        assert found[1][kind] == pytest.approx(captured[1][kind], rel=0.01)
    for kind in ("sum", "gather"):
        assert found[1][kind] == captured[1][kind]
    split_bytes = LAYERS * work.tokens * 9 * 128 * 2  # which the file counts on one side alone
    assert found[1]["small"] - split_bytes == pytest.approx(captured[1]["small"], rel=0.01)


def test_attention_reads_context_and_window_once_a_row() -> None:
    (attention,) = (
        task for task in step_tasks(load_model("Dream-7B"), Workload(tp=4, bp=4)) if task.kind == "attention"
    )
    queries, keys = 128 * 7 * 128 * 2, (1024 + 128) * 128 * 2
    assert attention == Task("attention", 2 * queries + 2 * keys, 4 * 128 * 1152 * 7 * 128, LAYERS)
