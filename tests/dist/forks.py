"""Starts the ranks of tests as forks of one process that has imported the engine: no rank spends seconds on imports.

``run`` starts that process, `python -m tests.dist.forks`, once, and sends it one task after another, each a line of
JSON. Every rank is a process of its own, as it is when a command starts it. From its parent it has modules alone: no
engine was ever made there, and no thread started. Its environment variables are not in /proc, so a test that looks for
processes by a mark starts them by ``ranks.start``.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from lopa_ascend.parallel.launch import Rendezvous, free_port

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
TIMEOUT = 240
"""Most seconds of a task."""
PRELOADED = ("tests.dist.generate", "tests.dist.pages", "lopa_ascend.engine.ranks", "torch.distributed")


def run(world_size: int, module: str, arguments: Sequence[str], folder: Path) -> None:
    """Runs a module as every rank, and fails if one of them does.

    Args:
        world_size: number of ranks; 1 is a process that knows nothing of ranks.
        module: has a function ``main()``, which reads ``arguments`` from ``sys.argv``.
        folder: for what the ranks say on stderr.
    """
    port = free_port()
    meetings = [Rendezvous.on_this_machine(rank, world_size, port).environment() for rank in range(world_size)]
    errors = [folder / f"stderr.{rank}" for rank in range(world_size)]
    environments = meetings if world_size > 1 else [{}]
    statuses = _ask({"argv": [module, *arguments], "environments": environments, "errors": list(map(str, errors))})
    assert statuses == [0] * world_size, f"{statuses}\n" + "\n".join(file.read_text() for file in errors)


class Ended(NamedTuple):
    """A script that has ended."""

    status: int | None
    """None: it was killed after ``TIMEOUT``."""
    output: str
    error: str


def script(code: str, folder: Path, environment: Mapping[str, str]) -> Ended:
    """Runs a script as `python -c` would, but for the imports and what a script does at its very end."""
    file, output, error = (folder / f"script.{name}" for name in ("py", "output", "error"))
    file.write_text(code)
    task = {"argv": [str(file)], "environments": [dict(environment)], "errors": [str(error)]}
    (status,) = _ask(task | {"outputs": [str(output)]})
    return Ended(status, output.read_text(), error.read_text())


def _ask(task: dict[str, Any]) -> list[int | None]:
    """The exit statuses of a task's processes."""
    forks = server()
    assert forks.stdin is not None
    assert forks.stdout is not None
    forks.stdin.write(json.dumps(task) + "\n")
    forks.stdin.flush()
    answer = forks.stdout.readline()
    assert answer, "the process that forks ranks has ended"
    statuses: list[int | None] = json.loads(answer)
    return statuses


@functools.cache
def server() -> subprocess.Popen[str]:
    """The process that forks; it ends when its stdin closes."""
    command = [sys.executable, "-m", "tests.dist.forks"]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(process.communicate)
    return process


# ---- the process that forks ------------------------------------------------------------------------------------------


def main() -> None:
    for module in PRELOADED:
        importlib.import_module(module)
    for line in sys.stdin:
        print(json.dumps(_run_ranks(**json.loads(line))), flush=True)


def _run_ranks(
    argv: Sequence[str],
    environments: Sequence[dict[str, str]],
    errors: Sequence[str],
    outputs: Sequence[str] | None = None,
) -> list[int | None]:
    """Forks all ranks and waits for them; their exit statuses, None for those that were killed after ``TIMEOUT``."""
    ranks: dict[int, int] = {}
    outputs = outputs or [os.devnull] * len(environments)
    for rank, (environment, error, output) in enumerate(zip(environments, errors, outputs, strict=True)):
        pid = os.fork()
        if not pid:
            _be_rank(argv, environment, error, output)
        ranks[pid] = rank
    statuses: list[int | None] = [None] * len(environments)
    deadline = time.monotonic() + TIMEOUT
    while ranks and time.monotonic() < deadline:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            time.sleep(0.01)
        else:
            statuses[ranks.pop(pid)] = os.waitstatus_to_exitcode(status)
    for pid in ranks:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return statuses


def _be_rank(argv: Sequence[str], environment: dict[str, str], error: str, output: str) -> NoReturn:
    """What a fork does instead of returning."""
    status = 1
    try:
        os.dup2(os.open(os.devnull, os.O_RDWR), 0)  # neither the tasks nor the answers are for ranks
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
        os.dup2(os.open(error, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        os.environ.update(environment)
        sys.argv = list(argv)
        if argv[0].endswith(".py"):
            runpy.run_path(argv[0], run_name="__main__")
        else:
            importlib.import_module(argv[0]).main()
        status = 0
    finally:
        if status:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
