"""Starts the ranks of a test as processes and collects what they made."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lopa_ascend.parallel.launch import Rendezvous, free_port
from tests.dist import forks
from tests.dist.forks import ENVIRONMENT, ROOT, TIMEOUT

__all__ = ["ENVIRONMENT", "KV_MEMORY", "ROOT", "TIMEOUT", "finish", "generate", "start"]

KV_MEMORY = 2**27
"""Bytes of the KV pool of one rank of the bundled model. The default is for 32 long requests: up to 1.5 GiB, which a
process of a test would spend a second on getting from the system."""


def start(world_size: int, *command: str) -> list[subprocess.Popen[str]]:
    """``command`` of Python as every rank."""
    port = free_port()
    processes = []
    for rank in range(world_size):
        meeting = Rendezvous.on_this_machine(rank, world_size, port).environment() if world_size > 1 else {}
        environment = {**os.environ, **ENVIRONMENT, **meeting}
        process = subprocess.Popen(
            [sys.executable, *command], cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True
        )
        processes.append(process)
    return processes


def finish(processes: Sequence[subprocess.Popen[str]], timeout: float = TIMEOUT) -> list[str]:
    """Waits for all, so many seconds for each; their stderr. Fails if one failed."""
    try:
        errors = [process.communicate(timeout=timeout)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert not any(process.returncode for process in processes), "\n".join(errors)
    return errors


def generate(world_size: int, jobs: Sequence[dict[str, Any]], folder: Path) -> list[list[dict[str, Any]]]:
    """The outputs of each job, the same on all ranks."""
    job, out = folder / "job.json", folder / "out"
    job.write_text(json.dumps(jobs))
    forks.run(world_size, "tests.dist.generate", [str(job), str(out)], folder)
    outputs = [json.loads(Path(f"{out}.{rank}").read_text()) for rank in range(world_size)]
    assert all(other == outputs[0] for other in outputs[1:])
    return outputs[0]
