"""The commands and environments that the launch scripts print, and later start."""

import math
import os
from pathlib import Path

import pytest

from tests.launch_scripts import CLUSTER, CPU, ROOT, Scripts


@pytest.fixture
def scripts(tmp_path: Path) -> Scripts:
    return Scripts(tmp_path)


def torchrun(*flags: str) -> list[str]:
    return ["-m", "torch.distributed.run", *flags]


def serve(device: str, tp: int, bp: int, port: int = 8000) -> list[str]:
    sizes = ["--tensor-parallel-size", str(tp), "--branch-parallel-size", str(bp)]
    place = ["--distributed-timeout-seconds", "60", "--host", "127.0.0.1", "--port", str(port)]
    return ["-m", "lopa_ascend.serve", "--device", device, *sizes, *place]


def test_a_node_is_sixteen_dies(scripts: Scripts):
    ((environment, command),) = scripts.dry_run("node")
    environment.pop("LD_PRELOAD", None)
    assert environment == {
        "ASCEND_RT_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15",
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
    assert command == serve("npu", 4, 4)


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
        ((environment, _),) = scripts.dry_run("cluster", *CLUSTER, *arguments, "--bp=2", "--", *flags)
        assert environment[name] == "150"
    refused = scripts.run("cluster", "--dry-run", *CLUSTER, "--", "--shutdown-timeout=1e2")
    assert refused.returncode == 2
    assert "--shutdown-timeout 1e2: write seconds in digits" in refused.stderr


def test_a_cluster_has_one_command_but_for_the_rank_of_the_node(scripts: Scripts):
    ((environment, command),) = scripts.dry_run("cluster", *CLUSTER)
    assert environment["HCCL_SOCKET_IFNAME"] == "=eth0"  # without = eth01 would do as well
    assert environment["GLOO_SOCKET_IFNAME"] == "eth0"
    assert environment["CPU_AFFINITY_CONF"] == "1"
    place = ("--nnodes", "2", "--node-rank", "1", "--master-addr", "10.0.0.1", "--master-port", "29500")
    assert command == torchrun(*place, "--max-restarts", "3", "--nproc-per-node", "16") + serve("npu", 4, 8)
    ((_, first),) = scripts.dry_run("cluster", *CLUSTER, "--node-rank=0")
    assert [pair for pair in zip(command, first, strict=True) if pair[0] != pair[1]] == [("1", "0")]


@pytest.mark.parametrize(("name", "flags"), [("node", ()), ("node", ("--tp", "1", "--bp", "1")), ("cluster", CLUSTER)])
def test_the_self_test_has_the_environment_of_the_server(scripts: Scripts, name: str, flags: tuple[str, ...]):
    ((served, server),) = scripts.dry_run(name, *flags)
    ((tested, command),) = scripts.dry_run(name, *flags, "--selftest", "--", "--json", "report.json", PYTHONPATH="mine")
    assert tested == {**served, "PYTHONPATH": f"{ROOT}:mine"}
    size = {option: server[server.index(option) + 1] for option in ("--tensor-parallel-size", "--branch-parallel-size")}
    if name == "cluster":
        place, ranks = [*server[2 : server.index("--max-restarts")], "--max-restarts", "0"], "16"
    else:
        place, ranks = ["--standalone", "--local-addr", "127.0.0.1"], str(math.prod(map(int, size.values())))
    own = ["-m", "scripts.selftest", "--tensor-parallel-size", size["--tensor-parallel-size"], "--json", "report.json"]
    assert command == torchrun(*place, "--nproc-per-node", ranks, *own)


def test_a_cpu_needs_little(scripts: Scripts):
    cores = len(os.sched_getaffinity(0))
    ((environment, command),) = scripts.dry_run("node", *CPU)
    assert environment == {
        "OMP_NUM_THREADS": str(max(1, cores // 2)),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    assert command == serve("cpu", 2, 1)
    ((environment, _),) = scripts.dry_run("node", *CPU, "--tp", str(cores + 1))
    assert environment["OMP_NUM_THREADS"] == "1"


def test_what_the_user_has_set_wins(scripts: Scripts):
    own = {"HCCL_CONNECT_TIMEOUT": "300", "OMP_NUM_THREADS": "10", "OMP_PROC_BIND": ""}
    ((environment, _),) = scripts.dry_run("node", **own)
    assert environment | own == environment
    ((environment, _),) = scripts.dry_run("node", PYTORCH_ALLOC_CONF="expandable_segments:False")
    assert "PYTORCH_NPU_ALLOC_CONF" not in environment
    part = {"ASCEND_RT_VISIBLE_DEVICES": "8,9,10,11", "HCCL_IF_BASE_PORT": "50000"}
    ((environment, _),) = scripts.dry_run("node", "--bp", "1", **part)
    assert environment | part == environment
    # torch_npu splits all cores among the visible dies: binding would put servers of parts of a node on the same cores.
    assert environment["CPU_AFFINITY_CONF"] == "0"


@pytest.mark.parametrize(("flags", "own"), [(("--timeout", "1800"), "60"), ((), "1800")])
def test_hccl_gives_up_when_the_engine_does(scripts: Scripts, flags: tuple[str, ...], own: str):
    ((environment, command),) = scripts.dry_run("node", *flags, HCCL_EXEC_TIMEOUT=own)
    assert environment["HCCL_EXEC_TIMEOUT"] == "1800"
    assert command[command.index("--distributed-timeout-seconds") + 1] == "1800"


def test_sums_in_the_same_order_are_a_flag(scripts: Scripts):
    ((environment, command),) = scripts.dry_run("node")
    assert "HCCL_DETERMINISTIC" not in environment
    ((changed, same),) = scripts.dry_run("node", "--deterministic", HCCL_DETERMINISTIC="false")
    assert (changed, same) == ({**environment, "HCCL_DETERMINISTIC": "true"}, command)


def test_a_timeout_or_port_of_hccl_that_cannot_be_is_named(scripts: Scripts):
    done = scripts.run("node", "--dry-run", HCCL_EXEC_TIMEOUT="0")
    assert (done.returncode, done.stdout) == (2, "")
    assert "got '0', the value of HCCL_EXEC_TIMEOUT; set that or --timeout" in done.stderr
    done = scripts.run("node", "--dry-run", HCCL_IF_BASE_PORT="x")
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
