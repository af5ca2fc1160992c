"""The health of this machine's NPUs in /metrics."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import time
from collections.abc import Iterable, Mapping

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from lopa_ascend.backend.npu.health import LEVELS, Ask, Die, ask, read_dies

logger = logging.getLogger("uvicorn.error")

INTERVAL = 60.0
"""Seconds for which what was read holds: npu-smi takes seconds."""


class Dies(Collector):
    """The dies of this machine as they were when somebody asked for metrics last.

    Args:
        ask: runs npu-smi and hccn_tool.
    """

    def __init__(self, ask: Ask = ask) -> None:
        self._ask, self._dies = ask, list[Die]()
        self._reading: asyncio.Task[None] | None = None
        self._read_at = -INTERVAL
        self._is_missing = False

    def refresh(self) -> None:
        """Begins to read anew, in a thread, unless the last reading still holds. Nobody waits for it."""
        now = time.monotonic()
        if now - self._read_at >= INTERVAL and (self._reading is None or self._reading.done()):
            self._read_at = now
            self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        try:
            self._dies = await asyncio.to_thread(read_dies, self._ask, with_links=True)
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            self._dies = []
            if not self._is_missing:
                logger.warning("no metrics of the dies' health: %s", error)
            self._is_missing = True

    def collect(self) -> Iterable[Metric]:
        """The latest reading; the label is a number for ASCEND_RT_VISIBLE_DEVICES."""
        levels = {die.index: LEVELS.index(die.health) if die.health in LEVELS else len(LEVELS) for die in self._dies}
        links = {die.index: None if die.link is None else int(die.link == "UP") for die in self._dies}
        text = f"Health by npu-smi: {', '.join(f'{level} {name}' for level, name in enumerate(LEVELS))}, 4 unknown."
        yield from _gauge("lopa:die_alarm", text, levels)
        text = "Temperature of a die."
        yield from _gauge("lopa:die_temperature_celsius", text, {die.index: die.temperature for die in self._dies})
        text = "Memory errors of several bits since a die was reset."
        yield from _gauge("lopa:die_memory_errors", text, {die.index: die.memory_errors for die in self._dies})
        yield from _gauge("lopa:die_link_up", "Whether a die's link to the network between nodes is up.", links)


def _gauge(name: str, text: str, values: Mapping[int, int | None]) -> Iterable[Metric]:
    """A gauge of the dies of which the value is known; nothing if it is known of none."""
    family = GaugeMetricFamily(name, text, labels=["die"])
    for index, value in values.items():
        if value is not None:
            family.add_metric([str(index)], value)
    if family.samples:
        yield family
