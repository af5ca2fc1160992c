"""CPU seconds: of a server's processes, by what they do, from Linux's /proc; and of calls in this process."""

from __future__ import annotations

import os
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

PARTS = {
    r"ray::ProxyActor": "proxy",
    r"ray::ServeReplica:\w+:Ingress": "ingress",
    r"ray::ServeReplica": "replicas",
    r"ray::ServeController": "controller",
    r".*lopa_ascend\.serve\.link\.process": "engines",
    r".*-m lopa_ascend\.serve ": "HTTP",
}
"""How a command line begins -> the part. Other processes are "rest"."""
Used = dict[int, tuple[str, float]]
"""By process: its part, and its CPU seconds until now."""


def used_by(root: int) -> Used:
    """What a process, by its id, and its descendants have used."""
    parents: dict[int, int] = {}
    used: Used = {}
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
    return {process: used[process] for process in family & used.keys()}


def seconds_between(before: Used, after: Used) -> dict[str, float]:
    """CPU seconds by part. What a process that has ended in the meantime used is not known."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for process, (part, until_now) in after.items():
        seconds[part] += until_now - before.get(process, (part, 0.0))[1]
    return dict(seconds)


@contextmanager
def timed_calls(owner: object, *methods: str) -> Iterator[list[float]]:
    """Collects the CPU seconds of each call of some methods of an object, or of all objects of a class."""
    seconds: list[float] = []

    def timed(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            started = time.process_time()
            try:
                return method(*arguments)
            finally:
                seconds.append(time.process_time() - started)

        return call

    with ExitStack() as patches:
        for name in methods:
            patches.enter_context(mock.patch.object(owner, name, timed(getattr(owner, name))))
        yield seconds
