"""Free memory of the CPU, and errors that say that a device has none."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
MAX_KV_MEMORY = 4 * 2**30
"""Most bytes of a KV pool in CPU memory, which other programs use too."""


def free_memory(ranks: int) -> int:
    """Bytes that each of ``ranks`` processes can allocate without swapping, droppable page cache included: what the
    machine has available, or what the limit of this process's container leaves, if that is less."""
    limit = _container_limit()
    return (_available() if limit is None else max(0, min(_available(), limit))) // ranks


def _available() -> int:
    """MemAvailable of Linux; elsewhere half of the machine's memory."""
    kibibytes = _numbers(Path("/proc/meminfo")).get("MemAvailable:")
    if kibibytes is not None:
        return kibibytes * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _container_limit() -> int | None:
    """What a container's control group leaves, with droppable page cache; None without a limit."""
    try:
        limit, used = (int((CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
    except (OSError, ValueError):  # no container; or "max", which is no limit
        return None
    held = _numbers(CGROUP / "memory.stat")
    return limit - used + held.get("active_file", 0) + held.get("inactive_file", 0)


def _numbers(file: Path) -> dict[str, int]:
    """The numbers in the lines "name number ..." of a file, by name; none if there is no such file."""
    lines = file.read_text().splitlines() if file.exists() else []
    return {name: int(number) for name, number, *_ in map(str.split, lines)}


# ---- errors ----------------------------------------------------------------------------------------------------------


def causes(error: BaseException) -> Iterator[BaseException]:
    """An error and those before it. An error in a capture is followed by another one at the end of the capture."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error, or one before it, says that a device or this machine had no memory. The texts count as well:
    torch raises a plain RuntimeError on a CPU, and torch_npu for the workspace of a kernel."""
    return any(
        isinstance(cause, MemoryError) or "out of memory" in str(cause) or "can't allocate memory" in str(cause)
        for cause in causes(error)
    )
