"""The launch scripts: what they start, and what they refuse."""

import signal
import subprocess
import time
from pathlib import Path

import pytest

from lopa_ascend.demo import DEMO_MODEL
from tests.launch_scripts import CLUSTER, CPU, ROOT, Scripts
from tests.ports import free_ports, listening


@pytest.fixture
def scripts(tmp_path: Path) -> Scripts:
    return Scripts(tmp_path)


# ---- what is started -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [("--graph-mode", "eager"), ("--graph-mode=eager",)])
def test_the_checks_know_the_graph_mode_of_the_server(scripts: Scripts, flags: tuple[str, ...]):
    refused = "environment: TASK_QUEUE_ENABLE is '2'"
    assert refused in scripts.run("node", TASK_QUEUE_ENABLE="2").stderr
    eager = scripts.run("node", "--", *flags, TASK_QUEUE_ENABLE="2").stderr
    assert "no variable is in the way of graph mode eager" in eager
    assert refused not in eager
    wrong = scripts.run("node", "--", "--graph-mode", "inductor")
    assert wrong.returncode == 2
    assert "--graph-mode: must be one of npugraph_ex, ge, eager, got 'inductor'" in wrong.stderr


@pytest.mark.parametrize("name", ["node", "cluster"])
def test_it_starts_what_it_prints(scripts: Scripts, name: str):
    port = free_ports(4)
    flags = [*CPU, "--port", str(port), "--model", str(DEMO_MODEL)]
    flags += {
        "cluster": ["--nnodes=1", *CLUSTER, "--node-rank=0", "--interface=lo", "--master-addr=127.0.0.1"]
        + ["--master-port", str(port + 2)],
    }.get(name, [])
    flags += ["--", "--stop", "$a 'b"]
    printed = scripts.dry_run(name, *flags)
    done = scripts.run(name, *flags)
    assert done.returncode == 0, done.stderr
    started = scripts.started()
    assert [command for _, command in started] == [command for _, command in printed]
    for (real, _), (said, _) in zip(started, printed, strict=True):
        assert real | said == real


@pytest.mark.parametrize(("restarts", "starts"), [("0", 1), ("3", 4)])
def test_a_server_that_fails_is_started_again(scripts: Scripts, restarts: str, starts: int):
    port = str(free_ports(1))
    flags = [*CPU, "--port", port, "--max-restarts", restarts]
    done = scripts.run("node", *flags, "--", "--fail", port)
    assert done.returncode == 3
    assert len(scripts.started()) == starts


def test_an_npu_server_is_started_again_only_if_the_checks_still_pass(scripts: Scripts):
    """Its die may be why it has failed."""
    log = scripts.folder / "log"
    checks = f"echo check >> {log}; [ $(grep -c check {log}) -lt 3 ]"
    scripts.python.write_text(
        f"#!/bin/sh\ncase $1 in */__main__.py) {checks};; *) echo server >> {log}; exit 3;; esac\n"
    )
    assert scripts.run("node").returncode == 1
    assert log.read_text().split() == ["check", "server", "check", "server", "check"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_the_server_of_a_node(scripts: Scripts, number: signal.Signals):
    command = [str(ROOT / "scripts/launch/node.sh"), *CPU, "--port", str(free_ports(1))]
    with subprocess.Popen(command, env=scripts.environment({"LINGER": "50"}), stderr=subprocess.PIPE) as process:
        wait_until(lambda: len(list(scripts.folder.glob("*.json"))) == 1)
        process.send_signal(number)
        assert process.wait(timeout=20) == 128 + signal.SIGTERM  # what this program ends with; a server with 0
        assert b"starting it again" not in process.stderr.read()
    assert not any(alive(file) for file in scripts.folder.glob("*.json"))


def alive(file: Path) -> bool:
    """Whether the process that wrote this file still runs."""
    return Path("/proc", file.stem).exists()


def wait_until(condition) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("name", ["node", "cluster"])
def test_help_teaches(scripts: Scripts, name: str):
    done = scripts.run(name, "--tp", "2", "--help")
    assert done.returncode == 0
    assert "tensor parallel size: ranks that split each forward pass (4)" in done.stdout
    assert f"{name}.sh --" in done.stdout


def test_the_second_server_of_the_help_has_dies_and_ports_of_its_own(scripts: Scripts):
    (example,) = [line for line in scripts.run("node", "--help").stdout.splitlines() if "VISIBLE_DEVICES=" in line]
    variables, flags = example.split("node.sh")
    ((second, command),) = scripts.dry_run("node", *flags.split(), **dict(v.split("=") for v in variables.split()))
    ((first, default),) = scripts.dry_run("node")
    assert int(second["HCCL_IF_BASE_PORT"]) == int(first["HCCL_IF_BASE_PORT"]) + 32
    assert command[command.index("--port") + 1] != default[default.index("--port") + 1]


def test_only_a_cpu_gets_an_environment_made(tmp_path: Path):
    scripts = Scripts(tmp_path, missing=1)
    done = scripts.run("node", "--dry-run", *CPU)
    assert f"{ROOT}/.venv/bin/python" in done.stdout
    assert f"{ROOT}/.venv/bin/python" not in scripts.run("node", "--dry-run").stdout
    ((_, command),) = Scripts(tmp_path).dry_run("node", *CPU, PYTHON="./python")
    assert command[1] == "lopa_ascend.serve"
    done = scripts.run("node", PYTHON="no-such-python")
    assert (done.returncode, "no no-such-python" in done.stderr) == (2, True)


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "flags", "message"),
    [
        ("node", ["--nnodes", "2"], "unknown flag --nnodes (the server's own go after --)"),
        ("node", ["--replicas", "2"], "replicas are removed here: python -m lopa_ascend.serve --replicas N"),
        ("node", ["--tp"], "--tp needs a value"),
        ("node", ["--port="], "--port needs a value"),
        ("node", ["tp"], "unexpected tp"),
        ("node", ["--=2"], "unknown flag --"),
        ("node", ["--", "--model=M"], "--model goes before --"),
        ("node", ["--", "--tensor-parallel-size", "2"], "it is --tp here"),
        ("node", ["--", "--branch-parallel-size=2"], "it is --bp here"),
        ("node", ["--", "--distributed-timeout-seconds", "2"], "it is --timeout here"),
        ("cluster", CLUSTER[2:], "--node-rank is missing"),
        ("cluster", CLUSTER[:2], "--master-addr is missing"),
        ("cluster", CLUSTER[:4], "--interface is missing"),
        ("node", ["--tp", "08"], "argument --tp: must be an integer from 1 to 4096, got '08'"),
        ("node", ["--bp", "x[$(touch broken)]"], "argument --bp: must be an integer"),
        ("node", ["--timeout", "1"], "argument --timeout: must be an integer from 2 to 86400, got '1'"),
        ("node", ["--master-port=1"], "--master-port is a flag of cluster.sh; the ranks of one node choose a port"),
        ("node", [*CPU, "--selftest"], "--selftest tests NPUs, and --device is cpu"),
        ("node", ["--device", "gpu"], "argument --device: must be npu or cpu, got 'gpu'"),
    ],
)
def test_wrong_flags(scripts: Scripts, name: str, flags: list[str], message: str):
    done = scripts.run(name, "--dry-run", *flags)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert not (scripts.folder / "broken").exists()


@pytest.mark.parametrize(
    ("name", "flags", "lines"),
    [
        (
            "cluster",
            [*CLUSTER, "--bp", "3", "--node-rank", "2"],
            [
                "mesh: tp 4 x bp 3 = 12 ranks on 2 nodes would cut a TP group in two; choose --bp as a multiple of 2",
                "mesh: --node-rank 2 of 2 nodes; choose one from 0 to 1",
            ],
        ),
        (
            "cluster",
            [*CLUSTER, "--port", "29500"],
            ["ports: --port and --master-port are both 29500; change one of them"],
        ),
    ],
)
def test_arguments_that_cannot_be(scripts: Scripts, name: str, flags: list[str], lines: list[str]):
    done = scripts.run(name, "--dry-run", *flags)
    assert (done.returncode, done.stdout) == (1, "")
    assert [line.removeprefix("FAIL  ") for line in done.stderr.splitlines() if line.startswith("FAIL")] == lines


def test_all_failures_are_told_at_once_and_nothing_starts(scripts: Scripts, tmp_path: Path):
    with listening() as port:
        flags = ["--port", str(port), "--model", str(tmp_path / "none"), "--master-addr", "no.such.host.invalid"]
        done = scripts.run("cluster", *CLUSTER[:2], *flags, "--interface=none0", "--node-rank=0", "--bp=2")
    assert done.returncode == 1
    assert scripts.started() == []
    topics = {line[6:].partition(":")[0] for line in done.stderr.splitlines() if line.startswith("FAIL")}
    assert topics >= {"CANN", "network", "model"}
    problem = f"cannot listen on 127.0.0.1:{port} (Address already in use)"
    assert f"{problem}; stop the program that uses it, or choose another --port" in done.stderr
    assert "there is no interface none0; choose --interface from " in done.stderr
    assert "--master-addr no.such.host.invalid (" in done.stderr
