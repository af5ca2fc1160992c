"""How much memory a device has left."""

from __future__ import annotations

import os
from pathlib import Path

CPU_KV_MEMORY = 4 * 2**30
"""Bytes at most, for a CPU's memory is there for others too."""


def default_kv_memory(device: str, ranks: int) -> int:
    """Bytes at most of one rank's KV pool, once its weights are loaded: half of what is free, or four fifths on an NPU,
    where steps, graphs and collectives need the rest."""
    free = free_memory(device, ranks)
    return free * 4 // 5 if device == "npu" else min(CPU_KV_MEMORY, free // 2)


def free_memory(device: str, ranks: int) -> int:
    """Bytes that one of ``ranks`` processes can allocate. An NPU is a process's own. On a CPU they share what the
    machine has without swapping, page cache that can be dropped included."""
    if device == "npu":
        from lopa_ascend.backend.npu import free_npu_memory

        return free_npu_memory()
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
