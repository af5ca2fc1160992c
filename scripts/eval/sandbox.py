"""Runs programs that a model has written: in a process of their own, with little time and memory, and with neither
network nor files nor other processes.

The kernel holds the limits (rlimit, seccomp), whatever a program does inside Python. What it may import from the
standard library is imported before they hold. It gets nothing of this process's environment.

A program shares its process with its test, as in the published evaluations: it can do no harm outside, but one that
sets out to deceive its test can be counted as passed.
"""

from __future__ import annotations

import os
import platform
import secrets
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

CHILD = Path(__file__).with_name("sandbox_child.py")
TIMEOUT = 10.0
"""Seconds that a program may run, by the clock on the wall and on the processor."""
MEMORY = 1 << 30
"""Bytes of address space that it may take beside the interpreter's own."""
MACHINES = ("x86_64", "aarch64")


class SandboxError(RuntimeError):
    """Programs cannot be run safely on this machine; the message says why."""


@dataclass(frozen=True)
class Outcome:
    """How a program has ended."""

    passed: bool
    """It ran to its end without an error."""
    reason: str
    """"passed", "timeout", or the last line of what it had to say."""


def run(program: str, *, test: str = "", timeout: float = TIMEOUT, memory: int = MEMORY) -> Outcome:
    """Runs a program, and then its test, in the sandbox.

    Args:
        program: Python source, which nobody has looked at. It may import modules of the standard library.
        test: Python source that belongs to the problem, executed after the program in the same namespace. It may
            import installed packages as well, before the limits hold.
        timeout: seconds.
        memory: bytes.

    Raises:
        SandboxError: this machine cannot hold the limits.
    """
    check_machine()
    # A program that ends early, by exit or otherwise, does not say this and has not passed.
    token = secrets.token_hex(16)
    parts = [token, str(timeout), str(memory), program, test]
    message = b"".join(len(data).to_bytes(8, "little") + data for data in (p.encode(errors="replace") for p in parts))
    with tempfile.TemporaryFile() as report, tempfile.TemporaryDirectory() as folder:
        child = subprocess.Popen(
            [sys.executable, "-s", str(CHILD)],
            stdin=subprocess.PIPE,
            stdout=report,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={"PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1"},
            start_new_session=True,
        )
        try:
            child.communicate(message, timeout=timeout + 10)  # the child's own limit is the stricter one
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.communicate()
        report.seek(0)
        lines = report.read(1 << 16).decode(errors="replace").split("\n")
    return _outcome(lines, token, child.returncode)


def _outcome(lines: list[str], token: str, status: int) -> Outcome:
    if lines[0] == f"no sandbox {token}":
        raise SandboxError(f"the sandbox cannot be set up: {lines[1]}")
    if lines[0] == f"passed {token}":
        return Outcome(True, "passed")
    if lines[0] == f"failed {token}":
        return Outcome(False, lines[1])
    timed_out = -status in (signal.SIGXCPU, signal.SIGKILL, signal.SIGALRM)
    return Outcome(False, "timeout" if timed_out else f"ended with status {status}")


def passes(program: str, test: str) -> bool:
    """Whether a program runs, and its test after it."""
    return run(program, test=test).passed


@cache
def check_machine() -> None:
    """Refuses machines on which the limits cannot be held.

    Raises:
        SandboxError: the system is not Linux, or the processor is not one of MACHINES.
    """
    if sys.platform != "linux" or platform.machine() not in MACHINES:
        machine = f"{sys.platform} on {platform.machine()}"
        raise SandboxError(f"generated programs run on Linux on {' or '.join(MACHINES)} alone, and this is {machine}")
