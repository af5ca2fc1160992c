"""How much memory a device has left, and how much of it keys and values may take."""

from __future__ import annotations

import os
from pathlib import Path

MAX_CPU_KV_MEMORY = 4 * 2**30
"""Bytes of the KV pool on a CPU at most, since other programs use its memory too."""


def default_kv_memory(device: str, ranks: int) -> int:
    """Bytes of one rank's KV pool, once its weights are loaded.

    On a CPU half of what is free, at most 4 GiB. On an NPU four fifths: steps, graphs and collectives need the rest.

    Args:
        device: "cpu" or "npu".
        ranks: processes that share the memory of a CPU.
    """
    free = free_memory(device, ranks)
    return free * 4 // 5 if device == "npu" else min(MAX_CPU_KV_MEMORY, free // 2)


def free_memory(device: str, ranks: int) -> int:
    """Bytes that this process can allocate on its device.

    A process has an NPU to itself. On a CPU all ranks share what the machine can give without swapping, which includes
    page cache that can be dropped.

    Args:
        device: "cpu" or "npu".
        ranks: processes that share the memory of a CPU.
    """
    if device == "npu":
        from lopa_ascend.backend.npu import free_npu_memory

        return free_npu_memory()
    assert device == "cpu"
    return _free_on_this_machine() // ranks


def _free_on_this_machine() -> int:
    """MemAvailable of Linux; elsewhere half of the machine's memory."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                return int(value.split()[0]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
