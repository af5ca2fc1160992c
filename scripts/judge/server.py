"""The server under judgement: its processes, their memory, its metrics."""

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

ROOT = Path(__file__).resolve().parents[2]
ENGINE = "lopa_ascend.serve.engine.engine_process"
PAGE = os.sysconf("SC_PAGE_SIZE")


class Server:
    """A running server. ``process`` is None for one that somebody else started, and ``log`` then too."""

    def __init__(self, url: str, process: subprocess.Popen[str] | None = None, log: Path | None = None):
        self.url, self.process, self.log = url.rstrip("/"), process, log

    @property
    def pid(self) -> int:
        if self.process is None:
            raise ValueError(f"this judge looks at processes, and that of {self.url} is not ours: leave --url out")
        return self.process.pid

    @property
    def engine_pid(self) -> int:
        """Raises RuntimeError if the engine process is not there."""
        found = [pid for pid in children(self.pid) if ENGINE in command(pid)]
        if len(found) != 1:
            seen = {pid: command(pid) for pid in children(self.pid)}
            raise RuntimeError(f"expected one child running {ENGINE}, found {seen}")
        return found[0]

    @property
    def model(self) -> str:
        name: str = httpx.get(f"{self.url}/v1/models", timeout=60).json()["data"][0]["id"]
        return name

    def metrics(self) -> dict[str, float]:
        """Sums over the labels of every sample in /metrics."""
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(httpx.get(f"{self.url}/metrics", timeout=60).text):
            for sample in family.samples:
                found[sample.name] = found.get(sample.name, 0.0) + sample.value
        return found

    def await_no_pages(self, seconds: float = 30.0) -> float:
        """Pages in use: 0 as soon as it is, else what they are after ``seconds``."""
        deadline = time.monotonic() + seconds
        while (pages := self.metrics()["lopa:pages_in_use"]) and time.monotonic() < deadline:
            time.sleep(0.2)
        return pages

    def tracebacks(self) -> int:
        return self.log.read_text(errors="replace").count("Traceback (most recent call last)") if self.log else 0


@contextmanager
def serving(url: str | None, log: Path, *flags: str) -> Iterator[Server]:
    """The server at ``url``, or, without one, a server of our own with these flags, whose output goes to ``log``."""
    if url is not None:
        yield Server(url)
        return
    command = [sys.executable, "-m", "lopa_ascend.serve", "--port", "0", *flags]
    # One thread, for OpenMP's default would fight with the clients for the cores.
    env = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", **os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    try:
        yield Server(_greeted(process, log), process, log)
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            raise


def _greeted(process: subprocess.Popen[str], log: Path) -> str:
    """Copies the server's output to ``log`` from now on; returns its URL once it serves."""
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
    """Of the process itself, not of its children."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                # The name, in brackets, may hold anything; the parent is the second field behind it.
                parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
            except OSError:  # ended meanwhile
                continue
            if int(parent) == pid:
                found.append(int(entry.name))
    return found


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def ended(pid: int) -> bool:
    """Whether all threads of the process are gone, and at most its parent has not seen it yet."""
    process = Path(f"/proc/{pid}")
    try:
        state = (process / "stat").read_text().rpartition(")")[2].split()[0]
        return state == "Z" and len(list((process / "task").iterdir())) == 1
    except OSError:
        return True


def resident(pid: int) -> int:
    """Bytes of memory that the process holds; OSError if it has ended."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE
