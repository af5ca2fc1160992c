"""The CPU seconds of a server's processes, by what they do. Reads Linux's /proc."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from pathlib import Path

PARTS = {
    r"ray::ProxyActor": "proxy",
    r"ray::ServeReplica:\w+:Ingress": "ingress",
    r"ray::ServeReplica": "replicas",
    r".*lopa_ascend\.serve\.link\.process": "engines",
    r".*-m lopa_ascend\.serve ": "HTTP",
}
"""How a command line begins -> the part. Other processes are "rest"."""


def cpu_seconds(root: int) -> dict[str, float]:
    """CPU seconds of a process and its descendants that run now, by part.

    Args:
        root: id of the process.
    """
    parents: dict[int, int] = {}
    used: dict[int, tuple[str, float]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()
            command = (folder / "cmdline").read_text("utf-8", "replace").replace("\0", " ")
        except OSError:  # it has ended
            continue
        part = next((name for pattern, name in PARTS.items() if re.match(pattern, command, re.DOTALL)), "rest")
        parents[int(folder.name)] = int(fields[1])
        used[int(folder.name)] = part, (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    family, found = {root}, {root}
    while found:
        found = {process for process, parent in parents.items() if parent in found}
        family |= found
    seconds: defaultdict[str, float] = defaultdict(float)
    for part, share in (used[process] for process in family & used.keys()):
        seconds[part] += share
    return seconds
