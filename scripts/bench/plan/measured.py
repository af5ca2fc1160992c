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
    works = [
        Workload(precision=row["precision"], tp=row["tp"], k=0, window=1, block=1, context=data["context"])
        for row in data["rows"]
    ]
    middle, steps = _middle(devices), [1e-3 * row["step_ms"] for row in data["rows"]]
    free = replace(
        middle, memory_efficiency=1.0, matrix_kernel_s=0.0, attention_kernel_s=0.0, vector_kernel_s=0.0, gap_s=0.0
    )
    parts = []
    for step, work in zip(steps, works, strict=True):
        found, bare = predict_on(model, middle, work), predict_on(model, free, work)
        memory = bare.device - bare.collectives
        fixed = found.device - found.collectives - memory / middle.memory_efficiency
        parts.append(Measured(step, memory, fixed, found.collectives))
    rows = []
    for index, (given, work) in enumerate(zip(data["rows"], works, strict=True)):
        low, high = (1000 * step.device for step in predict(model, devices, work).values())
        error = fit([*parts[:index], *parts[index + 1 :]]).error(parts[index])
        rows.append(
            {**given, "fastest_ms": round(low, 2), "slowest_ms": round(high, 2), "left_out_error": round(error, 4)}
        )
    best = fit(parts)
    return {"rows": rows, "memory_efficiency": round(best.memory_efficiency, 4), "fixed_costs": round(best.fixed, 4)}


def fit(rows: Sequence[Measured]) -> Fit:
    """The constants with the least squares of the relative errors of two rows or more."""
    # memory x + fixed y = step - collectives, each divided by the step, where x is 1 / efficiency
    factors = [(row.memory / row.step, row.fixed / row.step) for row in rows]
    (x, y), *_ = np.linalg.lstsq(
        np.array(factors), np.array([1 - row.collectives / row.step for row in rows]), rcond=None
    )
    return Fit(float(1 / x), float(y))


def _middle(devices: Range) -> Device:
    """A device with the middle of each constant."""
    low, high = (getattr(devices, end) for end in ENDS)
    return replace(low, **{name: (getattr(low, name) + getattr(high, name)) / 2 for name in CONSTANTS})
