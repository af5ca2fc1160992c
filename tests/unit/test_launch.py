"""The launch scripts: what they print, what they start, and what they refuse."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lopa_ascend.demo import DEMO_MODEL
from tests.ports import free_ports, has_ipv6, listening

ROOT = Path(__file__).resolve().parents[2]
CLUSTER = ("--node-rank", "1", "--master-addr", "10.0.0.1", "--interface", "eth0")
CPU = ("--device", "cpu", "--tp", "2", "--bp", "1")
# Takes the place of the interpreter: runs the checks, and records everything else that it was asked to run.
INTERPRETER = """\
#!{python}
import json, os, sys, time
if sys.argv[1] == "-c":
    sys.exit({missing})
if sys.argv[1].endswith("preflight.py"):
    os.execv("{python}", ["{python}", *sys.argv[1:]])
started = {{"command": sys.argv[1:], "environment": dict(os.environ)}}
with open(os.path.join("{folder}", f"{{os.getpid()}}.json"), "w") as file:
    json.dump(started, file)
if sys.argv[-2] == "--fail" and sys.argv[-1] == sys.argv[sys.argv.index("--port") + 1]:
    sys.exit(3)
time.sleep(float(os.environ.get("LINGER", 0)))
"""


class Scripts:
    """Runs launch scripts with an interpreter that starts nothing."""

    def __init__(self, folder: Path, missing: int = 0):
        self.folder, self.python = folder, folder / "python"
        self.python.write_text(INTERPRETER.format(python=sys.executable, folder=folder, missing=missing))
        self.python.chmod(0o755)

    def environment(self, variables: dict[str, str]) -> dict[str, str]:
        # Not this process's own environment: what it sets for OpenMP would win over what the scripts set.
        return {"PATH": os.environ["PATH"], "PYTHON": str(self.python), **variables}

    def run(self, name: str, *flags: str, **variables: str) -> subprocess.CompletedProcess[str]:
        command = [str(ROOT / f"scripts/launch_{name}.sh"), *flags]
        environment = self.environment(variables)
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, cwd=self.folder)

    def started(self) -> list[tuple[dict[str, str], list[str]]]:
        """Environment and command of each server that was started since the last call, by --master-port."""
        files = list(self.folder.glob("*.json"))
        runs = [json.loads(file.read_text()) for file in files]
        for file in files:
            file.unlink()
        runs.sort(key=lambda run: run["command"][run["command"].index("--master-port") + 1])
        return [(run["environment"], run["command"]) for run in runs]

    def dry_run(self, name: str, *flags: str, **variables: str) -> list[tuple[dict[str, str], list[str]]]:
        """Environment and command of each server, as a shell reads what is printed."""
        done = self.run(name, "--dry-run", *flags, **variables)
        assert done.returncode == 0, done.stderr
        assert self.started() == []
        subprocess.run(["bash", "-euc", done.stdout], env={}, check=True, timeout=60)
        own = {"PWD", "OLDPWD", "SHLVL", "_", "LC_CTYPE"}  # bash's and Python's
        return [({k: v for k, v in env.items() if k not in own}, command) for env, command in self.started()]


@pytest.fixture
def scripts(tmp_path: Path) -> Scripts:
    return Scripts(tmp_path)


def torchrun(*flags: str) -> list[str]:
    return ["-m", "lopa_ascend.parallel.torchrun", *flags]


def serve(device: str, tp: int, bp: int, port: int = 8000) -> list[str]:
    sizes = ["--tensor-parallel-size", str(tp), "--branch-parallel-size", str(bp)]
    place = ["--distributed-timeout-seconds", "60", "--host", "127.0.0.1", "--port", str(port)]
    return ["-m", "lopa_ascend.serve", "--device", device, *sizes, *place]


# ---- what is printed -------------------------------------------------------------------------------------------------


def test_a_node_is_sixteen_dies(scripts: Scripts):
    ((environment, command),) = scripts.dry_run("node")
    environment.pop("LD_PRELOAD", None)
    assert environment == {
        "ASCEND_RT_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15",
        "HCCL_BUFFSIZE": "200",
        "HCCL_CONNECT_TIMEOUT": "120",
        "HCCL_EXEC_TIMEOUT": "60",
        "HCCL_IF_BASE_PORT": "60000",
        "TASK_QUEUE_ENABLE": "1",
        "ACL_OP_INIT_MODE": "1",
        "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True",
        "CPU_AFFINITY_CONF": "1",
        "OMP_NUM_THREADS": "1",
        "OMP_PROC_BIND": "false",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    place = ("--nnodes", "1", "--master-addr", "127.0.0.1", "--master-port", "29500")
    assert command == torchrun(*place, "--nproc-per-node", "16", "--max-restarts", "3") + serve("npu", 4, 4)


def test_a_path_that_env_would_take_for_a_variable_is_refused(tmp_path: Path):
    folder = tmp_path / "run=1"
    folder.mkdir()
    refused = Scripts(folder).run("node", *CPU)
    assert refused.returncode == 2
    assert f"{folder}/python" in refused.stderr
    assert "a path with = cannot be launched" in refused.stderr


@pytest.mark.parametrize("flags", [("--shutdown-timeout", "120"), ("--shutdown-timeout=120.5",)])
def test_torchrun_lets_requests_end(scripts: Scripts, flags: tuple[str, ...]):
    """It kills ranks 30 s after a signal by default."""
    name = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
    for arguments in ((), CPU):
        ((environment, _),) = scripts.dry_run("node", *arguments, "--", *flags)
        assert environment[name] == "150"
    refused = scripts.run("node", "--", "--shutdown-timeout=1e2")
    assert refused.returncode == 2
    assert "--shutdown-timeout 1e2: write seconds in digits" in refused.stderr


def test_a_cluster_has_one_command_but_for_the_rank_of_the_node(scripts: Scripts):
    ((environment, command),) = scripts.dry_run("cluster", *CLUSTER)
    assert environment["HCCL_SOCKET_IFNAME"] == "=eth0"  # without = eth01 would do as well
    assert environment["GLOO_SOCKET_IFNAME"] == "eth0"
    assert environment["CPU_AFFINITY_CONF"] == "1"
    place = ("--nnodes", "2", "--node-rank", "1", "--master-addr", "10.0.0.1", "--master-port", "29500")
    assert command == torchrun(*place, "--nproc-per-node", "16", "--max-restarts", "3") + serve("npu", 4, 8)
    ((_, first),) = scripts.dry_run("cluster", *CLUSTER, "--node-rank=0")
    assert [pair for pair in zip(command, first, strict=True) if pair[0] != pair[1]] == [("1", "0")]


def test_replicas_share_nothing(scripts: Scripts):
    servers = scripts.dry_run("replicas", "--port", "9000")
    assert [environment["ASCEND_RT_VISIBLE_DEVICES"] for environment, _ in servers] == [
        "0,1,2,3",
        "4,5,6,7",
        "8,9,10,11",
        "12,13,14,15",
    ]
    assert [environment["HCCL_IF_BASE_PORT"] for environment, _ in servers] == ["60000", "60032", "60064", "60096"]
    # torch_npu splits all cores among the visible dies: binding would put every replica on the same cores.
    assert {environment["CPU_AFFINITY_CONF"] for environment, _ in servers} == {"0"}
    for replica, (_, command) in enumerate(servers):
        place = ("--nnodes", "1", "--master-addr", "127.0.0.1", "--master-port", str(29500 + replica))
        expected = torchrun(*place, "--nproc-per-node", "4", "--max-restarts", "3")
        assert command == expected + serve("npu", 4, 1, 9000 + replica)


@pytest.mark.parametrize(("name", "flags"), [("node", ()), ("node", ("--tp", "1", "--bp", "1")), ("cluster", CLUSTER)])
def test_the_self_test_has_the_environment_of_the_server(scripts: Scripts, name: str, flags: tuple[str, ...]):
    ((served, server),) = scripts.dry_run(name, *flags)
    ((tested, command),) = scripts.dry_run(name, *flags, "--selftest", "--", "--json", "report.json", PYTHONPATH="mine")
    assert tested == {**served, "PYTHONPATH": f"{ROOT}:mine"}
    ranks = server[: server.index("--max-restarts")]
    tp = server[server.index("--tensor-parallel-size") + 1]
    own = ["-m", "scripts.npu_selftest", "--tensor-parallel-size", tp, "--json", "report.json"]
    assert command == [*ranks, "--max-restarts", "0", *own]


def test_a_cpu_needs_little(scripts: Scripts):
    cores = len(os.sched_getaffinity(0))
    ((environment, command),) = scripts.dry_run("node", *CPU)
    assert environment == {
        "OMP_NUM_THREADS": str(max(1, cores // 2)),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    assert command[command.index("--nproc-per-node") + 1] == "2"
    servers = scripts.dry_run("replicas", *CPU, "--replicas", "2", "--tp", str(max(1, cores // 2)))
    assert [environment["OMP_NUM_THREADS"] for environment, _ in servers] == ["1", "1"]
    ((environment, _),) = scripts.dry_run("node", *CPU, "--tp", str(cores + 1))
    assert environment["OMP_NUM_THREADS"] == "1"


def test_what_the_user_has_set_wins(scripts: Scripts):
    own = {"HCCL_BUFFSIZE": "512", "OMP_NUM_THREADS": "10", "OMP_PROC_BIND": ""}
    ((environment, _),) = scripts.dry_run("node", **own)
    assert environment | own == environment
    ((environment, _),) = scripts.dry_run("node", PYTORCH_ALLOC_CONF="expandable_segments:False")
    assert "PYTORCH_NPU_ALLOC_CONF" not in environment
    ((environment, _),) = scripts.dry_run("node", "--bp", "1", ASCEND_RT_VISIBLE_DEVICES="8,9,10,11")
    assert environment["ASCEND_RT_VISIBLE_DEVICES"] == "8,9,10,11"
    two = ("--replicas", "2", "--tp", "2")
    servers = scripts.dry_run("replicas", *two, ASCEND_RT_VISIBLE_DEVICES="8,9,12,13", HCCL_IF_BASE_PORT="50000")
    assert [environment["ASCEND_RT_VISIBLE_DEVICES"] for environment, _ in servers] == ["8,9", "12,13"]
    assert [environment["HCCL_IF_BASE_PORT"] for environment, _ in servers] == ["50000", "50032"]


@pytest.mark.parametrize(("flags", "own"), [(("--timeout", "1800"), "60"), ((), "1800")])
def test_hccl_gives_up_when_the_engine_does(scripts: Scripts, flags: tuple[str, ...], own: str):
    ((environment, command),) = scripts.dry_run("node", *flags, HCCL_EXEC_TIMEOUT=own)
    assert environment["HCCL_EXEC_TIMEOUT"] == "1800"
    assert command[command.index("--distributed-timeout-seconds") + 1] == "1800"


def test_a_timeout_or_port_of_hccl_that_cannot_be_is_named(scripts: Scripts):
    done = scripts.run("node", "--dry-run", HCCL_EXEC_TIMEOUT="0")
    assert (done.returncode, done.stdout) == (2, "")
    assert "got '0', the value of HCCL_EXEC_TIMEOUT; set that or --timeout" in done.stderr
    done = scripts.run("replicas", "--dry-run", HCCL_IF_BASE_PORT="x")
    assert (done.returncode, done.stdout) == (1, "")
    assert "FAIL  ports: HCCL_IF_BASE_PORT is 'x'; set a number from 1024 to 65520" in done.stderr
    assert scripts.run("node", "--dry-run", *CPU, HCCL_IF_BASE_PORT="x").returncode == 0


def test_nothing_is_preloaded_that_is_not_there(scripts: Scripts):
    ((environment, _),) = scripts.dry_run("node")
    assert Path(environment.get("LD_PRELOAD", "/")).exists()
    ((environment, _),) = scripts.dry_run("node", LD_PRELOAD="")
    assert environment.get("LD_PRELOAD", "") == ""


def test_flags_reach_the_server_as_they_were(scripts: Scripts):
    odd = ["--stop", "a b", "$HOME", "it's", "", "x=y", "--tau-conf=0.8", "--", "\n"]
    ((_, command),) = scripts.dry_run("node", "--model=my model", "--lora-path", "l=1", "--", *odd)
    assert command[-len(odd) - 4 :] == ["--model", "my model", "--lora-path", "l=1", *odd]


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


@pytest.mark.parametrize("name", ["node", "cluster", "replicas"])
def test_it_starts_what_it_prints(scripts: Scripts, name: str):
    port = free_ports(4)
    flags = [*CPU, "--port", str(port), "--master-port", str(port + 2), "--model", str(DEMO_MODEL)]
    flags += {
        "cluster": ["--nnodes=1", *CLUSTER, "--node-rank=0", "--interface=lo", "--master-addr=127.0.0.1"],
        "replicas": ["--replicas=2"],
    }.get(name, [])
    flags += ["--", "--stop", "$a 'b"]
    printed = scripts.dry_run(name, *flags)
    several = name == "replicas"
    done = scripts.run(name, *flags, LINGER="1" if several else "0")  # until the other one has started too
    assert done.returncode == int(several), done.stderr  # a replica should not end by itself
    started = scripts.started()
    assert [command for _, command in started] == [command for _, command in printed]
    for (real, _), (said, _) in zip(started, printed, strict=True):
        assert real | said == real


def test_a_replica_that_ends_takes_the_others_along(scripts: Scripts):
    port = free_ports(6)
    flags = ["--device", "cpu", "--tp", "1", "--replicas", "3", "--port", str(port), "--master-port", str(port + 3)]
    begin = time.monotonic()
    done = scripts.run("replicas", *flags, "--", "--fail", str(port + 1), LINGER="50")
    assert time.monotonic() - begin < 20
    assert done.returncode == 1
    assert "replica 1 has ended; ending the others" in done.stderr
    assert "replica 0 has" not in done.stderr
    assert done.stdout.splitlines() == [f"replica {i}: http://127.0.0.1:{port + i}" for i in range(3)]
    assert not any(alive(file) for file in scripts.folder.glob("*.json"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_all_replicas(scripts: Scripts, number: signal.Signals):
    port = free_ports(6)
    flags = ["--device", "cpu", "--tp", "1", "--replicas", "3", "--port", str(port), "--master-port", str(port + 3)]
    host, shown = ("::1", "[::1]") if has_ipv6() else ("127.0.0.1", "127.0.0.1")
    command = [str(ROOT / "scripts/launch_replicas.sh"), *flags, "--host", host, "--", "--ssl-certfile", "x"]
    environment = scripts.environment({"LINGER": "50"})
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        wait_until(lambda: len(list(scripts.folder.glob("*.json"))) == 3)
        # Ctrl-C in a terminal is for the script, which passes it on.
        assert all(os.getsid(int(file.stem)) == int(file.stem) for file in scripts.folder.glob("*.json"))
        process.send_signal(number)
        assert process.wait(timeout=20) == 0
        assert process.stdout.read().startswith(f"replica 0: https://{shown}:{port}\n")
    assert not any(alive(file) for file in scripts.folder.glob("*.json"))


def alive(file: Path) -> bool:
    """Whether the process that wrote this file still runs."""
    return Path("/proc", file.stem).exists()


def wait_until(condition) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("name", ["node", "cluster", "replicas"])
def test_help_teaches(scripts: Scripts, name: str):
    done = scripts.run(name, "--tp", "2", "--help")
    assert done.returncode == 0
    assert "tensor parallel size: ranks that split each forward pass (4)" in done.stdout
    assert f"launch_{name}.sh --" in done.stdout


def test_the_second_server_of_the_help_has_dies_and_ports_of_its_own(scripts: Scripts):
    (example,) = [line for line in scripts.run("node", "--help").stdout.splitlines() if "VISIBLE_DEVICES=" in line]
    variables, flags = example.split("launch_node.sh")
    ((second, command),) = scripts.dry_run("node", *flags.split(), **dict(v.split("=") for v in variables.split()))
    ((first, default),) = scripts.dry_run("node")
    assert int(second["HCCL_IF_BASE_PORT"]) == int(first["HCCL_IF_BASE_PORT"]) + 32
    for flag in ("--port", "--master-port"):
        assert command[command.index(flag) + 1] != default[default.index(flag) + 1]


def test_only_a_cpu_gets_an_environment_made(tmp_path: Path):
    scripts = Scripts(tmp_path, missing=1)
    done = scripts.run("node", "--dry-run", *CPU)
    assert f"{ROOT}/.venv/bin/python" in done.stdout
    assert f"{ROOT}/.venv/bin/python" not in scripts.run("node", "--dry-run").stdout
    ((_, command),) = Scripts(tmp_path).dry_run("node", *CPU, PYTHON="./python")
    assert command[1] == "lopa_ascend.parallel.torchrun"
    done = scripts.run("node", PYTHON="no-such-python")
    assert (done.returncode, "no no-such-python" in done.stderr) == (2, True)


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "flags", "message"),
    [
        ("node", ["--nnodes", "2"], "unknown flag --nnodes (the server's own go after --)"),
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
        ("replicas", ["--replicas", "0"], "argument --replicas: must be an integer"),
        ("node", [*CPU, "--selftest"], "--selftest tests NPUs, and --device is cpu"),
        ("replicas", ["--selftest"], "--selftest is a flag of launch_node.sh"),
        ("node", ["--device", "gpu"], "invalid choice: 'gpu'"),
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
            "replicas",
            ["--port", "29498"],
            ["ports: --port 29498 and --master-port 29500 overlap; change one of them"],
        ),
        (
            "replicas",
            ["--port", "65533"],
            ["ports: 4 replicas go beyond port 65535; lower --port or --master-port"],
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
