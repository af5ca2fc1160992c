"""Predictions for decoding steps that others have measured on A3: Qwen3-8B, whose sizes SDAR-8B has.

The host is left out, because these graphs take KV lengths from the device's side and their engine is another one. What
two constants of such a prediction were, fitted to all rows but one, says how far to trust it for the one left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lopa_ascend.config.files import read_json_object
from scripts.bench.plan.devices import CONSTANTS, Device, Range, load_device
from scripts.bench.plan.models import load_model
from scripts.bench.plan.step import ENDS, predict, predict_on
from scripts.bench.plan.tasks import Workload

FILE = Path(__file__).with_name("measured.json")


class Measured(NamedTuple):
    """A measured step, and the parts of its prediction in seconds."""

    step: float
    memory: float
    """At all of the bandwidth."""
    fixed: float
    """Fixed costs of kernels, with gaps, in the middle of their ranges."""
    collectives: float


class Fit(NamedTuple):
    """The two constants that fit rows best."""

    memory_efficiency: float
    fixed: float
    """What the middle of the fixed costs is multiplied by."""

    def error(self, row: Measured) -> float:
        """Of the prediction, as a share of the measured step."""
        return (row.memory / self.memory_efficiency + self.fixed * row.fixed + row.collectives) / row.step - 1


def compare() -> dict[str, Any]:
    """Each measured step beside its prediction, with the error for it of a fit to the others, and the fit to all."""
    data = read_json_object(FILE, ValueError)
    model, devices = load_model(data["model"]), load_device(data["device"])
    middle = _middle(devices)
    free = replace(
        middle, memory_efficiency=1.0, matrix_kernel_s=0.0, attention_kernel_s=0.0, vector_kernel_s=0.0, gap_s=0.0
    )
    rows, parts = list[dict[str, Any]](), list[Measured]()
    for row in data["rows"]:
        work = Workload(precision=row["precision"], tp=row["tp"], k=0, window=1, block=1, context=data["context"])
        found, bare = predict_on(model, middle, work), predict_on(model, free, work)
        memory = bare.device - bare.collectives
        fixed = found.device - found.collectives - memory / middle.memory_efficiency
        parts.append(Measured(1e-3 * row["step_ms"], memory, fixed, found.collectives))
        low, high = (round(1000 * step.device, 2) for step in predict(model, devices, work).values())
        rows.append({**row, "fastest_ms": low, "slowest_ms": high})
    for index, row in enumerate(rows):
        row["left_out_error"] = round(fit([*parts[:index], *parts[index + 1 :]]).error(parts[index]), 4)
    best = fit(parts)
    return {"rows": rows, "memory_efficiency": round(best.memory_efficiency, 4), "fixed_costs": round(best.fixed, 4)}


def fit(rows: Sequence[Measured]) -> Fit:
    """The constants with the least squares of the relative errors of two rows or more."""
    # memory x + fixed y = step - collectives, each divided by the step, where x is 1 / efficiency
    step, memory, fixed, collectives = np.array(rows).T
    (x, y), *_ = np.linalg.lstsq(np.stack([memory / step, fixed / step], axis=1), 1 - collectives / step, rcond=None)
    return Fit(float(1 / x), float(y))


def _middle(devices: Range) -> Device:
    """A device with the middle of each constant."""
    low, high = (getattr(devices, end) for end in ENDS)
    return replace(low, **{name: (getattr(low, name) + getattr(high, name)) / 2 for name in CONSTANTS})
