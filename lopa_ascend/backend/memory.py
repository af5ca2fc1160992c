"""How much memory a device has left."""

from __future__ import annotations

import os
from pathlib import Path


def free_memory(device: str, ranks: int = 1) -> int:
    """Bytes that one of ``ranks`` processes can allocate without swapping, page cache that can be dropped included. On
    a CPU they share what the machine has."""
    assert device == "cpu"
    return _free_on_this_machine() // ranks


def _free_on_this_machine() -> int:
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                return int(value.split()[0]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
