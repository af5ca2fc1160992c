"""Health of this machine's GPUs, by nvidia-smi: NVML's own command, which comes with the driver. Needs neither torch
nor a context on a GPU."""

from __future__ import annotations

import csv
from collections.abc import Callable

from lopa_ascend.backend.device import Ask, Gauge

MIB = 2**20
MEASURES: tuple[tuple[str, str, str, Callable[[float], float]], ...] = (
    ("memory.used", "lopa:gpu_memory_used_bytes", "Memory of a GPU that programs hold.", lambda x: x * MIB),
    ("memory.total", "lopa:gpu_memory_total_bytes", "Memory of a GPU.", lambda x: x * MIB),
    ("utilization.gpu", "lopa:gpu_utilization_ratio", "Share of time in which a kernel ran.", lambda x: x / 100),
    ("temperature.gpu", "lopa:gpu_temperature_celsius", "Temperature of a GPU.", float),
    (
        "ecc.errors.uncorrected.volatile.total",
        "lopa:gpu_memory_errors",
        "Memory errors since the driver was loaded that could not be corrected.",
        float,
    ),
)
"""nvidia-smi's query; the name and the text of its gauge; and the gauge's value from the answer."""


def gauges(ask: Ask) -> list[Gauge]:
    """Measures of GPUs, by nvidia-smi's numbers: those of the PCI bus, whatever CUDA_VISIBLE_DEVICES hides.

    Raises:
        OSError, subprocess.SubprocessError: nvidia-smi is missing, fails or hangs.
        ValueError: what it says is not understood.
    """
    query = ",".join(["index", *(field for field, *_ in MEASURES)])
    text = ask(("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"))
    rows = {int(index): values for index, *values in csv.reader(text.splitlines(), skipinitialspace=True)}
    if not rows or any(len(values) != len(MEASURES) for values in rows.values()):
        raise ValueError(f"nvidia-smi printed {text[:200]!r}")
    return [
        Gauge(name, about, {index: _value(values[column], convert) for index, values in rows.items()}, "gpu")
        for column, (_, name, about, convert) in enumerate(MEASURES)
    ]


def _value(text: str, convert: Callable[[float], float]) -> float | None:
    """None for "[N/A]" and the like: a card without ECC, a part of a GPU."""
    return None if text.startswith("[") or text == "N/A" else convert(float(text))
