"""The health of this machine's NPUs or GPUs in /metrics."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from lopa_ascend.backend.device import Gauge

logger = logging.getLogger("uvicorn.error")

INTERVAL = 60.0
"""Seconds for which what was read holds."""


class Dies(Collector):
    """The dies or GPUs of this machine as they were when somebody asked for metrics last."""

    def __init__(self, read: Callable[[], Sequence[Gauge]]) -> None:
        self._read_health = read
        self._gauges: Sequence[Gauge] = ()
        self._reading: asyncio.Task[None] | None = None
        self._read_at = -INTERVAL
        self._is_missing = False

    def refresh(self) -> None:
        """Begins to read anew, in a thread, if the last reading is old. Nobody waits for it."""
        now = time.monotonic()
        if now - self._read_at >= INTERVAL and (self._reading is None or self._reading.done()):
            self._read_at = now
            self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        try:
            self._gauges = await asyncio.to_thread(self._read_health)
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            self._gauges = ()
            if not self._is_missing:
                logger.warning("no metrics of the devices' health: %s", error)
            self._is_missing = True

    def collect(self) -> Iterable[Metric]:
        """The latest reading; the label is the number of a die or a GPU. A gauge without a known value is left out."""
        for name, text, values, label in self._gauges:
            family = GaugeMetricFamily(name, text, labels=[label])
            for index, value in values.items():
                if value is not None:
                    family.add_metric([str(index)], value)
            if family.samples:
                yield family
