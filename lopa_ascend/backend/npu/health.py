"""Health of this machine's dies, by npu-smi and hccn_tool, which come with the driver. Needs neither torch_npu nor
CANN."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lopa_ascend.backend.device import Ask, Gauge, ask

LEVELS = ("OK", "Warning", "Alarm", "Critical")
"""npu-smi's names of a die's health, from the best; UNKNOWN is one that does not exist or has not started."""


@dataclass(frozen=True)
class Die:
    """One die. None: not known."""

    index: int
    """Its number for ASCEND_RT_VISIBLE_DEVICES: dies are counted from 0, whatever their names are."""
    npu: int
    """npu-smi's number of its card."""
    chip: int
    """Its number on the card."""
    physical: int
    """Its number for hccn_tool."""
    health: str
    """One of ``LEVELS``, or UNKNOWN."""
    temperature: int | None
    """Degrees Celsius."""
    memory_errors: int | None = None
    """Errors of several bits, which cannot be corrected, since the die was reset."""
    bad_pages: int | None = None
    """Pages with such errors that are in use until the die is reset."""
    link: str | None = None
    """"UP" or "DOWN": the link to the network between nodes."""

    @property
    def fault(self) -> str | None:
        if self.health in ("Critical", "UNKNOWN"):
            return f"health {self.health}"
        if self.bad_pages:
            return f"memory pages with errors of several bits that are in use until a reset: {self.bad_pages}"
        return None

    @property
    def warning(self) -> str | None:
        if self.health != LEVELS[0]:
            return f"health {self.health}"
        return f"memory errors of several bits: {self.memory_errors}" if self.memory_errors else None


def read_dies(ask: Ask = ask, *, with_links: bool = False) -> list[Die]:
    """The dies of this machine, or of this container; ``with_links``: with their links to the network between nodes.

    Raises:
        OSError, subprocess.SubprocessError: npu-smi is missing, fails or hangs.
        ValueError: what it says is not understood.
    """
    return [_complete(die, ask, with_links) for die in parse_table(ask(("npu-smi", "info")))]


def gauges(dies: Sequence[Die]) -> list[Gauge]:
    levels = {die.index: LEVELS.index(die.health) if die.health in LEVELS else len(LEVELS) for die in dies}
    links = {die.index: None if die.link is None else int(die.link == "UP") for die in dies}
    text = f"Health by npu-smi: {', '.join(f'{level} {name}' for level, name in enumerate(LEVELS))}, 4 unknown."
    errors = {die.index: die.memory_errors for die in dies}
    return [
        Gauge("lopa:die_alarm", text, levels),
        Gauge("lopa:die_temperature_celsius", "Temperature of a die.", {die.index: die.temperature for die in dies}),
        Gauge("lopa:die_memory_errors", "Memory errors of several bits since a die was reset.", errors),
        Gauge("lopa:die_link_up", "Whether a die's link to the network between nodes is up.", links),
    ]


def _complete(die: Die, ask: Ask, with_links: bool) -> Die:
    memory = _answer(ask, "npu-smi", "info", "-t", "ecc", "-i", str(die.npu), "-c", str(die.chip))
    link = _answer(ask, "hccn_tool", "-i", str(die.physical), "-link", "-g") if with_links else ""
    errors, pages = parse_memory(memory)
    return replace(die, memory_errors=errors, bad_pages=pages, link=parse_link(link))


def _answer(ask: Ask, *command: str) -> str:
    """A command's output; nothing if this driver does not have it, or only for root."""
    try:
        return ask(command)
    except (OSError, subprocess.SubprocessError):
        return ""


def parse_table(text: str) -> list[Die]:
    """The dies in the table of `npu-smi info`. ValueError if there are none.

    A die has two lines: card, name, health, power and temperature; then chip, with the die's physical number beside it
    on a 910C, bus and memory. A table of processes follows.
    """
    first = re.compile(r"\|\s*(\d+)\s+\S+\s*\|\s*([A-Za-z]+)\s*\|\s*\S+\s+(\d+|-|NA)\s")
    second = re.compile(r"\|\s*(\d+)(?:\s+(\d+))?\s*\|\s*(?:[0-9A-Fa-fx]{4}:\S+|NA)\s*\|")
    dies: list[Die] = []
    above: re.Match[str] | None = None
    for line in text.splitlines():
        if above is not None and (below := second.match(line)):
            temperature = int(above[3]) if above[3].isdecimal() else None
            npu, chip, physical = int(above[1]), int(below[1]), int(below[2] or above[1])
            dies.append(Die(len(dies), npu, chip, physical, above[2], temperature))
        above = first.match(line)
    if not dies:
        raise ValueError("npu-smi info shows no die")
    return dies


def parse_memory(text: str) -> tuple[int | None, int | None]:
    """(errors of several bits since the last reset, pages with such errors in use) by `npu-smi info -t ecc`."""

    def count(name: str) -> int | None:
        found = re.search(rf"^\s*(?:HBM )?{name}\s*:\s*(\d+)\s*$", text, re.MULTILINE)
        return None if found is None else int(found[1])

    return count("Double[ -][Bb]it Error Count"), count("(?:Double Bit Next-Isolated Pages|Pending Retire Page) Count")


def parse_link(text: str) -> str | None:
    """ "UP" or "DOWN", by `hccn_tool -i N -link -g`."""
    found = re.search(r"^\s*link status\s*:\s*(\w+)\s*$", text, re.MULTILINE)
    return None if found is None else found[1]
