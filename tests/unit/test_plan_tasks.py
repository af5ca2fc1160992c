"""The tasks that a prediction adds up: those that npugraph_ex captures of Dream-7B on a rank of TP 4 x BP 4, and the
kernels of a GPU by their shapes."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scripts.bench.plan import gpu
from scripts.bench.plan.devices import known_devices, load_device
from scripts.bench.plan.models import load_model
from scripts.bench.plan.step import ENDS, floor, predict, predict_on, seconds
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
    assert attention[:4] == ("attention", 2 * queries + 2 * keys, 4 * 128 * 1152 * 7 * 128, LAYERS)


# ---- GPUs ------------------------------------------------------------------------------------------------------------

H200 = load_device("h200").high
GPU_LAYER = {
    "qkv": 30,
    "o": 25,
    "gate and up": 195,
    "down": 108,
    "attention": 14,
    "norms": 10,
    "rope, KV": 9,
    "swiglu": 18,
}
"""Microseconds of a layer of Dream-7B on an H200: 512 tokens that see 512 keys, in bf16, by arithmetic."""


def gpu_work(keys: int = 512, **fields: Any) -> Workload:
    """Eight rows of two blocks."""
    return Workload(**{"k": 7, "window": 64, "context": keys - 64, **fields})


def test_a_layer_on_a_gpu_takes_what_its_kernels_take_by_their_shapes() -> None:
    found = list(step_tasks(load_model("Dream-7B"), gpu_work(), on_gpu=True))
    times = [1e6 * task.times / LAYERS * seconds(task, H200, gpu_work()) for task in found if task.times % LAYERS == 0]
    qkv, o, gate_up, down, attention, norms, swiglu, rope, kv_write = times
    for found_us, expected_us in zip(
        (qkv, o, gate_up, down, attention, norms, rope + kv_write, swiglu), GPU_LAYER.values(), strict=True
    ):
        assert found_us == pytest.approx(expected_us, rel=0.15)
    head, *others = (task for task in found if task.times % LAYERS)
    assert seconds(head, H200, gpu_work()) == pytest.approx(0.75e-3, rel=0.15)
    assert sum(task.times for task in found) == 28 * 10 + 101
    fixed = sum(task.times * seconds(task, H200, gpu_work()) for task in others) + 381 * H200.gap_s
    assert fixed == pytest.approx(0.6e-3, rel=0.15)


@pytest.mark.parametrize(
    ("work", "expected"),
    [
        (gpu_work(), (12.8, 12.8)),
        (gpu_work(4096), (12.8, 15.2)),
        (gpu_work(precision="w8a8"), (10, 12)),
        (gpu_work(precision="fp8"), (7.5, 8.6)),
    ],
)
def test_a_step_on_an_h200(work: Workload, expected: tuple[float, float]) -> None:
    steps = predict(load_model("Dream-7B"), load_device("h200"), work)
    for end, milliseconds in zip(ENDS, expected, strict=True):
        assert 1e3 * steps[end].device == pytest.approx(milliseconds, rel=0.15)


def test_no_step_is_below_the_floor_of_the_data_sheet() -> None:
    model, device = load_model("Dream-7B"), load_device("h200").low
    assert 1e3 * floor(model, device, gpu_work()) == pytest.approx(8.1, abs=0.05)
    assert 1e3 * floor(model, device, gpu_work(4096)) == pytest.approx(8.8, abs=0.05)
    for name in known_devices():
        for precision in ("bf16", "w8a8"):
            work = gpu_work(precision=precision)
            low = load_device(name).low
            assert predict_on(model, low, work).device > floor(model, low, work)


def test_the_int8_kernel_is_bound_by_the_l2_cache_and_a_library_is_not() -> None:
    product = Task("product", 0, shape=(512, 37888, 3584))
    operations = 2 * 512 * 37888 * 3584
    assert operations / gpu.seconds(product, H200, "w8a8") == pytest.approx(128 * H200.l2_bandwidth)
    assert operations / gpu.seconds(product, H200, "fp8") > 1e15
    faster = replace(H200, l2_bandwidth=1e15)
    assert operations / gpu.seconds(product, faster, "w8a8") > 1e15


def test_a_wave_takes_as_long_as_its_last_tile() -> None:
    fast = replace(H200, l2_bandwidth=1e15)
    one, two = (gpu.seconds(Task("product", 0, shape=(128, 128 * tiles, 4096)), fast, "w8a8") for tiles in (132, 133))
    assert two == pytest.approx(2 * one)
    few, narrow = (gpu.seconds(Task("product", 0, shape=(n, 4096, 4096)), fast, "w8a8") for n in (257, 64))
    assert few / narrow == pytest.approx(8)  # tiles of 128 x 128 against those of 64 x 32


def test_few_tiles_of_attention_leave_sms_idle_unless_keys_are_split() -> None:
    """With branches on 8 ranks a rank has two blocks: 32 tiles of 64 rows."""
    attention = Task("attention", 0, shape=(224, 8, 4096, 128))
    alone = gpu.seconds(attention, H200, "bf16")
    assert 28 * alone == pytest.approx(1.35e-3, rel=0.15)
    split = gpu.seconds(attention, replace(H200, attention_splits=8), "bf16")
    assert split < alone / 3
    full = Task("attention", 0, shape=(224, 64, 4096, 128))
    wide = gpu.seconds(full, replace(H200, attention_rows=128, attention_efficiency=0.6), "bf16")
    assert 28 * (gpu.seconds(full, H200, "bf16") - wide) == pytest.approx(1.2e-3, rel=0.2)


@pytest.mark.parametrize("name", ["h200", "910c", "xeon"])
def test_skipped_rows_and_masked_heads_save_their_part(name: str) -> None:
    model, device, work = load_model("Dream-7B"), load_device(name).low, Workload(k=7, window=64, context=512)
    whole = predict_on(model, device, work)
    skipping = predict_on(model, device, replace(work, computed=0.78))
    assert (replace(work, computed=0.78).tokens, work.tokens) == (400, 512)
    assert 0.75 < skipping.products / whole.products < 0.9
    masked = predict_on(model, device, replace(work, predicted=0.5))
    assert masked.attention == whole.attention
    assert 0.03 < 1 - masked.products / whole.products < 0.06


def test_a_gpu_without_a_format_refuses_it() -> None:
    with pytest.raises(ValueError, match="no products in fp8"):
        predict(load_model("Dream-7B"), load_device("a100"), gpu_work(precision="fp8"))
