"""The launch scripts on CPUs: one node, and two "nodes" that are both this machine."""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.dist.ranks import KV_MEMORY
from tests.listeners import check_loopback_alone
from tests.ports import free_ports

ROOT = Path(__file__).resolve().parents[2]
PROMPT = "Tom has 12 apples. Tom buys 35 more. How many apples does Tom have now?"

pytestmark = pytest.mark.multirank


class Launched:
    """Processes that launch scripts have started, all of them known by a mark in their environment."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.stderr: list[Path] = []
        self.port = free_ports(2)
        self.url = f"http://127.0.0.1:{self.port}"
        self.scripts: list[subprocess.Popen[bytes]] = []
        self._mark = f"LAUNCH_TEST={uuid.uuid4()}"

    def launch(self, name: str, *flags: str) -> None:
        command = [str(ROOT / f"scripts/launch/{name}.sh"), "--device", "cpu", "--tp", "2", "--bp", "2"]
        command += ["--port", str(self.port), *flags]
        command += ["--", "--kv-cache-memory", str(KV_MEMORY)]
        name, _, value = self._mark.partition("=")
        environment = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", name: value}
        self.stderr.append(self._folder / f"stderr.{len(self.stderr)}")
        with self.stderr[-1].open("w") as stderr:
            self.scripts.append(subprocess.Popen(command, env=environment, cwd=ROOT, stderr=stderr))

    def meeting(self) -> tuple[str, ...]:
        """Flags that say where the ranks of a cluster meet."""
        return "--master-addr", "127.0.0.1", "--master-port", str(self.port + 1), "--interface", "lo"

    def processes(self) -> dict[int, str]:
        """Command lines of all that still run."""
        found = {}
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if self._mark.encode() in (process / "environ").read_bytes().split(b"\0"):
                    found[int(process.name)] = (process / "cmdline").read_text().replace("\0", " ")
            except (OSError, ValueError):
                continue
        return found

    def rank(self) -> int:
        """The process of some rank that is not 0."""
        return next(pid for pid, command in self.processes().items() if "lopa_ascend.engine.follower" in command)

    def is_healthy(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health").status_code == 200
        except httpx.TransportError:
            return False

    def await_health(self, wanted: bool, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self.is_healthy() is not wanted:
            assert time.monotonic() < deadline, f"/health did not become {wanted} in {seconds} s"
            assert [script.poll() for script in self.scripts] == [None] * len(self.scripts), self.said()
            time.sleep(0.05)

    def answer(self) -> str:
        body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 64}
        response = httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=60)
        text: str = response.raise_for_status().json()["choices"][0]["message"]["content"]
        return text

    def end(self, status: int = 0) -> None:
        """As an operator does it, who stops the script on every node."""
        for script in self.scripts:
            script.send_signal(signal.SIGTERM)
        assert [script.wait(timeout=30) for script in self.scripts] == [status] * len(self.scripts)
        assert ("Traceback" in self.said()) == bool(status), self.said()

    def said(self) -> str:
        """What the scripts and all that they have started have written to stderr."""
        return "".join(file.read_text() for file in self.stderr)


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[Launched]:
    servers = Launched(tmp_path)
    try:
        yield servers
    finally:
        for pid in servers.processes():
            os.kill(pid, signal.SIGKILL)
        for script in servers.scripts:
            script.wait()


def test_one_node_answers_comes_back_and_ends(launched: Launched):
    launched.launch("node", "--tp", "1")
    launched.await_health(True, 120)
    check_loopback_alone(launched.processes(), at_least=4)  # HTTP, the ranks' store, gloo of two ranks
    text = launched.answer()
    assert "47" in text
    os.kill(launched.rank(), signal.SIGKILL)
    launched.await_health(False, 5)
    launched.await_health(True, 120)
    assert launched.answer() == text
    launched.end()
    assert launched.processes() == {}


@pytest.mark.slow  # tests/unit/test_watch.py has a rank whose parent has ended
def test_ranks_end_when_their_torchrun_is_killed(launched: Launched):
    """They would hold ports and devices that a new start needs."""
    launched.launch("cluster", "--nnodes", "1", "--node-rank", "0", *launched.meeting(), "--tp", "1")
    launched.await_health(True, 120)
    launched.scripts[0].kill()  # it has become torchrun
    deadline = time.monotonic() + 10
    while launched.processes():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_two_nodes_answer_and_end(launched: Launched):
    for rank in ("0", "1"):
        launched.launch("cluster", "--node-rank", rank, *launched.meeting(), "--tp", "1")
    launched.await_health(True, 120)
    assert "47" in launched.answer()
    assert sum("lopa_ascend.engine.follower" in command for command in launched.processes().values()) == 1
    launched.end(status=1)  # of torchrun, with its SignalException
    assert launched.processes() == {}
