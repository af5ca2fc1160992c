"""The processes of a deployment, which tests end."""

import os
import signal
from pathlib import Path

ENGINE = "lopa_ascend.serve.link.process"
RANK = "lopa_ascend.engine.follower"


def _parents() -> dict[int, int]:
    """The parent of every process."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):  # it has ended
            continue
    return parents


def below(root: int, text: str) -> list[int]:
    """The processes with this text in their command line that ``root`` has started, itself or by others."""
    parents, found = _parents(), []
    for pid in parents:
        ancestor = pid
        while ancestor > 1 and ancestor != root:
            ancestor = parents.get(ancestor, 0)
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if ancestor == root and pid != root and text in command:
            found.append(pid)
    return sorted(found)


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
