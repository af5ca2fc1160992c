"""Predictions for the rows of the paper's Table 4, settings S1 to S18, and for the engine of S13 to S18.

A prediction needs the row's tokens per forward pass (TPF). The paper has them for S12 and S18 alone (Table 3). The TPF
of any other row is estimated, never from the row's own tokens/s:

- S1 to S6 start from S18's TPF, S7 to S11 from S12's, S13 to S17 from S18's: equal branches and, at the end of each
  group, equal thresholds.
- Within a group TPF depends on the thresholds as tokens/s do in the rows of the other platform with four branches (S1
  to S6, or S13 to S18) for the same model and task.

A prediction is for the steps of this engine. The engine of S13 to S18 was never published. What is known of the paper's
others, and of graphs on an NPU, says what it does besides, one after the other: ``published_engine``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lopa_ascend.config.files import read_json_object
from scripts.bench.plan.devices import Range, load_device
from scripts.bench.plan.models import load_model
from scripts.bench.plan.step import ENDS, predict
from scripts.bench.plan.tasks import Workload

FILE = Path(__file__).with_name("paper.json")
WINDOW = 128
"""Positions of a window: 4 blocks of 32. Assumed; the paper does not say how many blocks are open."""
CONTEXT = 1024
"""Few-shot prompt and committed blocks. Assumed; the term is small."""
PROMPTS = {"low": 512, "high": 1024}
"""Tokens of the few-shot prompts, whose passes are in the published times of answers. Assumed."""
GROUP_SIZE = 6
"""Settings with the same thresholds in the same order, from the highest to the lowest: S1 to S6, S7 to S12, S13 to S18.
"""
Figures = Mapping[tuple[str, str, str], float]
"""By model, task and setting."""


def read_paper() -> dict[str, Any]:
    """The content of paper.json."""
    return read_json_object(FILE, ValueError)


def validate() -> list[dict[str, Any]]:
    """One row for each setting, model and task, in the paper's order.

    ``predicted`` is the geometric mean of tokens/s at both ends of the range: ``fastest`` and ``slowest``.
    """
    paper = read_paper()
    published, known, rows = _by_row(paper["rows"], "avg_tps"), _by_row(paper["tokens_per_forward"], "tpf"), []
    for row in paper["rows"]:
        number, key = int(row["setting"].removeprefix("S")), (row["model"], row["task"])
        setting = [*paper["settings"].values()][(number - 1) // GROUP_SIZE]
        tpf, source = _tokens_per_forward(key, number, published, known)
        steps = predict(load_model("Dream-7B"), load_device(setting["device"]), _workload(setting, tpf))
        speeds = {"fastest": tpf / steps["low"].step, "slowest": tpf / steps["high"].step}
        middle = math.prod(speeds.values()) ** 0.5
        rows.append(
            {
                **{name: row[name] for name in ("setting", "model", "task")},
                "predicted": round(middle, 2),
                "published": row["avg_tps"],
                "predicted_over_published": round(middle / row["avg_tps"], 4),
                **{f"predicted_{end}": round(speed, 2) for end, speed in speeds.items()},
                **{f"{end}_over_published": round(speed / row["avg_tps"], 4) for end, speed in speeds.items()},
                "platform": setting["platform"],
                "step_ms_fastest": round(1000 * steps["low"].step, 3),
                "step_ms_slowest": round(1000 * steps["high"].step, 3),
                "published_step_ms": round(1000 * tpf / row["avg_tps"], 3),
                "bound_by_fastest": steps["low"].bound_by,
                "bound_by_slowest": steps["high"].bound_by,
                "tpf": round(tpf, 3),
                "tpf_source": source,
            }
        )
    return rows


def published_engine() -> list[dict[str, Any]]:
    """What a step of S13 to S18 takes in the engine that was published with them, in milliseconds.

    For each row of these settings the range of "engine", which is the sum of

    - "step": this engine's.
    - "host": the host chooses the winner and what is filled, as in the published code for GPUs. So its launch, inputs
      and results come between two steps.
    - "lengths": before each step it writes the KV lengths of all layers, changed or not.
    - "prompt": by how much the first pass of an answer is longer, as it computes the prompt too, divided among its
      passes.
    """
    paper = read_paper()
    published = _by_row(paper["rows"], "avg_tps")
    tokens = {
        (row["model"], row["task"]): row["latency_s"] * published[row["model"], row["task"], "S18"]
        for row in paper["tokens_per_forward"]
        if row["setting"] == "S18"
    }
    setting = paper["settings"]["S13-S18"]
    model, devices = load_model("Dream-7B"), load_device(setting["device"])
    waits = Range(*(replace(device, host_overlaps=0.0) for device in devices))
    found = []
    for row in validate():
        if row["platform"] != setting["platform"]:
            continue
        work = _workload(setting, row["tpf"])
        ours, waiting = predict(model, devices, work), predict(model, waits, replace(work, block=1))
        passes = tokens[row["model"], row["task"]] / row["tpf"]
        ends = {}
        for end in ENDS:
            step, then = ours[end].step, waiting[end]
            with_prompt = replace(work, k=0, window=PROMPTS[end] + work.block, context=0)
            first = predict(model, devices, with_prompt)[end].device
            terms = {
                "step": step,
                "host": then.step - then.updates - step,
                "lengths": then.updates,
                "prompt": max(0.0, first - then.device) / passes,
            }
            ends[end] = {name: round(1000 * seconds, 3) for name, seconds in terms.items()}
            ends[end]["engine"] = round(1000 * sum(terms.values()), 3)
        names = {name: row[name] for name in ("setting", "model", "task", "published_step_ms")}
        found.append({**names, "fastest_ms": ends["low"], "slowest_ms": ends["high"]})
    return found


def _workload(setting: Mapping[str, Any], tpf: float) -> Workload:
    """That of a group of settings: one request, one branch on each group of ranks."""
    sizes = {name: setting[name] for name in ("precision", "tp", "bp")}
    return Workload(**sizes, k=setting["bp"] - 1, window=WINDOW, context=CONTEXT, tpf=tpf)


def _by_row(rows: Iterable[Mapping[str, Any]], column: str) -> Figures:
    return {(row["model"], row["task"], row["setting"]): row[column] for row in rows}


def _tokens_per_forward(key: tuple[str, str], number: int, published: Figures, known: Figures) -> tuple[float, str]:
    """The TPF of a setting's row, by model and task, and where it comes from, by tokens/s and TPF of the paper."""
    if (*key, f"S{number}") in known:
        return known[(*key, f"S{number}")], "Table 3"
    anchor = "S12" if 7 <= number <= 12 else "S18"
    first = 1 if number >= 13 else 13  # of the other platform's settings with four branches
    same_thresholds, lowest_thresholds = f"S{first + (number - 1) % GROUP_SIZE}", f"S{first + GROUP_SIZE - 1}"
    ratio = published[(*key, same_thresholds)] / published[(*key, lowest_thresholds)]
    is_same = same_thresholds == lowest_thresholds
    factor = "" if is_same else f" x tokens/s of {same_thresholds} / {lowest_thresholds}"
    return known[(*key, anchor)] * ratio, f"estimated: TPF of {anchor}{factor}"
