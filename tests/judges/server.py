"""The server that is judged: starts it, and reads its metrics, its log, and the state of its processes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.judges.report import Report

ROOT = Path(__file__).resolve().parents[2]
ENGINE = "lopa_ascend.serve.link.process"
"""The module that the engine process runs."""
PAGE = os.sysconf("SC_PAGE_SIZE")
"""Bytes of a page of memory."""
READ_TIMEOUT = 60
"""Seconds for an answer about the server."""


class Server:
    """A running server.

    Args:
        url: where the server answers.
        process: the server's process; None if it was not started here.
        log: file with the server's output; None if it was not started here.
    """

    def __init__(self, url: str, process: subprocess.Popen[str] | None = None, log: Path | None = None):
        self.url, self.process, self.log = url.rstrip("/"), process, log

    @property
    def pid(self) -> int:
        """Process id.

        Raises:
            ValueError: the server was not started here.
        """
        if self.process is None:
            raise ValueError(f"this judge needs the processes of a server that it starts; leave --url {self.url} out")
        return self.process.pid

    @property
    def engine_pid(self) -> int:
        """Process id of the engine.

        Raises:
            RuntimeError: the server has no such child.
        """
        found = [pid for pid in children(self.pid) if ENGINE in command_line(pid)]
        if len(found) != 1:
            seen = {pid: command_line(pid) for pid in children(self.pid)}
            raise RuntimeError(f"expected one child running {ENGINE}, found {seen}")
        return found[0]

    @property
    def model(self) -> str:
        """The name of the model that is served."""
        name: str = httpx.get(f"{self.url}/v1/models", timeout=READ_TIMEOUT).json()["data"][0]["id"]
        return name

    def metrics(self) -> dict[str, float]:
        """The samples of /metrics by name, summed over labels."""
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(httpx.get(f"{self.url}/metrics", timeout=READ_TIMEOUT).text):
            for sample in family.samples:
                found[sample.name] = found.get(sample.name, 0.0) + sample.value
        return found

    def await_no_pages(self, seconds: float = 30.0) -> float:
        """Waits until no KV page is in use; returns 0, or the pages that are still in use after ``seconds``."""
        deadline = time.monotonic() + seconds
        while (pages := self.metrics()["lopa:pages_in_use"]) and time.monotonic() < deadline:
            time.sleep(0.2)
        return pages

    def health(self) -> int:
        """Status code of /health."""
        return httpx.get(f"{self.url}/health", timeout=READ_TIMEOUT).status_code

    def tracebacks(self) -> int:
        """Number of Python tracebacks in the log."""
        return self.log.read_text(errors="replace").count("Traceback (most recent call last)") if self.log else 0


def check_afterwards(server: Server, report: Report) -> None:
    """Checks, after all requests, that the server is healthy, uses no KV page and has printed no traceback."""
    report.check("/health afterwards", (status := server.health()) == 200, status)
    report.check("pages in use afterwards", (pages := server.await_no_pages()) == 0, pages)
    report.check("tracebacks in the server's log", not server.tracebacks(), server.tracebacks())


@contextmanager
def serving(url: str | None, log: Path, *flags: str) -> Iterator[Server]:
    """A server to judge, which is ended after the ``with`` block if it was started here.

    Args:
        url: a running server; None to start one.
        log: file for the output of a server that is started.
        flags: flags for a server that is started.
    """
    if url is not None:
        yield Server(url)
        return
    command = [sys.executable, "-m", "lopa_ascend.serve", "--port", "0", *flags]
    # One thread: OpenMP's default would compete with the clients for the cores.
    env = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", **os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    try:
        yield Server(_await_url(process, log), process, log)
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            raise


def _await_url(process: subprocess.Popen[str], log: Path) -> str:
    """Waits until a server serves, and returns its URL; its output goes to ``log`` from now on.

    Raises:
        RuntimeError: the server has ended.
    """
    assert process.stdout is not None
    lines, settled, urls = process.stdout, threading.Event(), []

    def copy() -> None:
        with log.open("w", buffering=1) as file:
            for line in lines:
                file.write(line)
                if line.startswith("serving   "):
                    urls.append(line.split()[1])
                    settled.set()
        settled.set()

    threading.Thread(target=copy, name="log", daemon=True).start()
    settled.wait()
    if not urls:
        raise RuntimeError(f"the server did not start:\n{log.read_text(errors='replace')}")
    return urls[0]


def children(pid: int) -> list[int]:
    """Process ids of a process's children, without their children."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                # The name, in brackets, may hold anything; the parent is the second field after it.
                parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
            except OSError:  # ended meanwhile
                continue
            if int(parent) == pid:
                found.append(int(entry.name))
    return found


def command_line(pid: int) -> str:
    """The command line of a process; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def ended(pid: int) -> bool:
    """Whether a process has ended: all its threads are gone, although its parent may not have asked for its status."""
    process = Path(f"/proc/{pid}")
    try:
        state = (process / "stat").read_text().rpartition(")")[2].split()[0]
        return state == "Z" and len(list((process / "task").iterdir())) == 1
    except OSError:
        return True


def resident(pid: int) -> int:
    """Bytes of memory that a process holds.

    Raises:
        OSError: the process has ended.
    """
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE


def peak_resident(pid: int) -> int:
    """Most bytes of memory that a process has held so far.

    Raises:
        OSError: the process has ended.
    """
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 2**10
