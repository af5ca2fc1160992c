"""`python -m lopa_ascend.serve --replicas 2`, one of whose engines is killed. CI runs this."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.replicas.processes import ENGINE, below, kill

pytest.importorskip("ray", reason="the extra ray is not installed")
START_TIME = 80
QUESTION = {"messages": [{"role": "user", "content": "What is 12 + 30?"}]}
LONG = {**QUESTION, "max_tokens": 256, "ignore_eos": True}


class Served:
    """The command while it runs."""

    def __init__(self, process: subprocess.Popen[str], log: Path):
        self.process, self.log = process, log
        self.url = ""

    def wait(self) -> None:
        deadline = time.monotonic() + START_TIME
        while time.monotonic() < deadline and self.process.poll() is None:
            if found := re.search(r"^serving +(\S+)", self.log.read_text(), re.M):
                self.url = found[1]
                return
            time.sleep(0.2)
        raise AssertionError(self.log.read_text()[-3000:])

    def sample(self, name: str) -> float:
        """The sum of a metric's samples."""
        text = httpx.get(f"{self.url}/metrics", timeout=30).text
        return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    log = tmp_path_factory.mktemp("replicas") / "log"
    command = (sys.executable, "-m", "lopa_ascend.serve", "--replicas", "2", "--port", "0")
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, text=True, env=environment)
    running = Served(process, log)
    try:
        running.wait()
        yield running
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0, log.read_text()[-3000:]
    finally:
        process.kill()
        process.wait()


def test_a_killed_engine_costs_whole_answers_nothing_but_time(served: Served):
    before = httpx.post(f"{served.url}/v1/chat/completions", json=LONG, timeout=60).json()["choices"]
    engines = below(served.process.pid, ENGINE)
    assert len(engines) == 2
    asked = threading.Barrier(9)

    def ask() -> httpx.Response:
        asked.wait()
        return httpx.post(f"{served.url}/v1/chat/completions", json=LONG, timeout=60)

    with ThreadPoolExecutor(8) as threads:
        answers = [threads.submit(ask) for _ in range(8)]
        asked.wait()
        while not (served.sample("vllm:num_requests_running") or any(answer.done() for answer in answers)):
            time.sleep(0.05)
        kill(engines[0])
        found = [answer.result() for answer in answers]
    assert [answer.status_code for answer in found] == [200] * 8, [answer.text for answer in found]
    assert all(answer.json()["choices"] == before for answer in found)
    deadline = time.monotonic() + 60
    while served.sample("lopa:engines") != 2 or len(below(served.process.pid, ENGINE)) != 2:
        assert time.monotonic() < deadline, served.log.read_text()[-3000:]
        time.sleep(0.5)
    assert httpx.get(f"{served.url}/ready").status_code == 200


def listeners(root: int) -> set[tuple[str, int]]:
    """The addresses, in the kernel's form, and ports at which processes that ``root`` has started listen."""
    found = set()
    for pid in below(root, ""):
        sockets = set()
        for link in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                sockets.add(os.readlink(link))
            except FileNotFoundError:  # closed meanwhile
                continue
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                    address, _, port = fields[1].partition(":")
                    found.add((address, int(port, 16)))
    return found


def test_strangers_reach_nothing(served: Served):
    """All listen on the loopback interface, but for Serve's replicas, which want the cluster's token."""
    grpc = pytest.importorskip("grpc")
    loopback = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
    found = listeners(served.process.pid)
    open_ports = [port for address, port in found if address not in loopback]
    assert len(found) > len(open_ports) > 0
    for port in open_ports:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = channel.unary_unary("/ray.serve.ASGIService/HandleRequest")
            with pytest.raises(grpc.RpcError) as refusal:
                call(b"", timeout=10)
        assert refusal.value.code() is grpc.StatusCode.UNAUTHENTICATED, (port, refusal.value)


def test_the_routes_are_those_of_one_engine(served: Served):
    models = httpx.get(f"{served.url}/v1/models").json()["data"]
    assert [model["id"] for model in models] == ["demo"]
    with httpx.stream("POST", f"{served.url}/v1/chat/completions", json={**QUESTION, "stream": True}) as response:
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    text = "".join(json.loads(line[6:])["choices"][0]["delta"].get("content") or "" for line in lines[:-1])
    assert text.endswith("#### 42")
    unknown = httpx.post(f"{served.url}/v1/chat/completions", json={**QUESTION, "model": "other"})
    assert unknown.status_code == 404
    assert "'demo'" in unknown.json()["error"]["message"]


def test_more_ranks_than_the_cluster_has_are_refused():
    command = (sys.executable, "-m", "lopa_ascend.serve", "--replicas", "4000", "--tensor-parallel-size", "1")
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run((*command, "--port", "0"), capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 1
    assert f"want 4000 CPU, and the cluster has {os.cpu_count()} on 1 node(s)" in done.stderr
