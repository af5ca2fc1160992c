"""Checks of addresses, interfaces and HCCL's ports before a launch, and what the checks themselves need."""

from __future__ import annotations

import errno
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.launch.arguments import Launch
from scripts.launch.network import check_hccl_ports, check_network
from tests.ports import free_ports, has_ipv6

ROOT = Path(__file__).resolve().parents[2]
FOREIGN = "203.0.113.7"
"""An address that no machine has."""


@pytest.fixture
def launch() -> Launch:
    """Node 0 of two, whose ports are free."""
    port = free_ports(2)
    return Launch(device="cpu", tp=1, bp=2, nnodes=2, port=port, master_port=port + 1)


def failures(launch: Launch, net: Path = Path("/none")) -> list[str]:
    found = [str(finding) for finding in check_network(launch, net)]
    return [line.removeprefix("FAIL  network: ") for line in found if not line.startswith("ok")]


@pytest.mark.parametrize("name", ["10.0.0..1", "no.such.host.invalid"])
def test_what_is_no_address_is_named_with_its_flag(launch: Launch, name: str):
    (found,) = failures(replace(launch, master_addr=name))
    assert found.startswith(f"--master-addr {name} (")
    assert found.endswith("; give the address of node 0")
    (found,) = failures(replace(launch, host=name))
    assert found.startswith(f"cannot listen on {name}:{launch.port} (")
    assert found.endswith("; give an address of this machine by --host")


def test_an_address_of_another_machine_is_no_port_in_use(launch: Launch):
    reason = "(Cannot assign requested address); give an address of this machine by"
    expected = f"cannot listen on {FOREIGN}:{launch.master_port} {reason} --master-addr"
    assert failures(replace(launch, master_addr=FOREIGN)) == [expected]
    assert failures(replace(launch, master_addr=FOREIGN, node_rank=1)) == []
    assert failures(replace(launch, host=FOREIGN)) == [f"cannot listen on {FOREIGN}:{launch.port} {reason} --host"]


def test_a_port_that_this_user_may_not_take(launch: Launch, monkeypatch: pytest.MonkeyPatch):
    def bind(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(socket.socket, "bind", bind)
    shown = f"cannot listen on 127.0.0.1:{launch.port} (Permission denied); choose another --port: this user may not"
    assert failures(launch)[0].startswith(shown)


def test_node_0_needs_a_name_that_other_nodes_can_use(launch: Launch):
    """127.1 is read as a name is: it has the address 127.0.0.1. Other nodes look elsewhere."""
    for node_rank in (0, 1):
        (found,) = failures(replace(launch, master_addr="127.1", node_rank=node_rank))
        assert found.startswith(
            "--master-addr 127.1 is 127.0.0.1 on this machine, where no other node finds node 0; give"
        )
    assert failures(replace(launch, master_addr="127.1", nnodes=1)) == []
    assert failures(launch) == [], "127.0.0.1 is what somebody gives who tries two nodes on one machine"


@pytest.mark.skipif(not has_ipv6(), reason="needs IPv6")
def test_the_port_is_tried_where_the_ranks_will_meet(launch: Launch):
    """That a port is free in IPv4 says nothing of an IPv6 address."""
    with socket.create_server(("::1", launch.master_port), family=socket.AF_INET6):
        (found,) = failures(replace(launch, master_addr="::1"))
        assert failures(launch) == []
    assert found.startswith(f"cannot listen on [::1]:{launch.master_port} (Address already in use); stop the program")
    assert failures(replace(launch, host="::1", master_addr="::1")) == []


def test_a_file_of_the_bonding_driver_is_no_interface(launch: Launch, tmp_path: Path):
    (tmp_path / "bonding_masters").touch()
    for name in ("bond0", "lo"):
        (tmp_path / name).mkdir()
    known = "choose --interface from bond0, lo"
    for name in ("bonding_masters", "eth0", ".."):
        assert failures(replace(launch, interface=name), tmp_path) == [f"there is no interface {name}; {known}"]
    assert failures(replace(launch, interface="bond0"), tmp_path) == []


@pytest.mark.parametrize(
    ("base", "lines"),
    [
        (None, []),
        ("", []),
        ("50000", []),
        ("abc", ["HCCL_IF_BASE_PORT is 'abc'; set a number from 1024 to 65520, or unset it"]),
        ("080000", ["HCCL_IF_BASE_PORT is '080000'; set a number from 1024 to 65520, or unset it"]),
        ("1023", ["HCCL_IF_BASE_PORT is '1023'; set a number from 1024 to 65520, or unset it"]),
        ("65520", ["HCCL takes 65520 to 65551, beyond port 65535; set HCCL_IF_BASE_PORT to 65504 or less"]),
        ("65504", []),
        (
            "29490",
            ["HCCL takes 29490 to 29521, and this launch 29500; change --port, --master-port or HCCL_IF_BASE_PORT"],
        ),
        (
            "7970",
            ["HCCL takes 7970 to 8001, and this launch 8000; change --port, --master-port or HCCL_IF_BASE_PORT"],
        ),
    ],
)
def test_the_ports_of_hccl(base: str | None, lines: list[str]):
    found = check_hccl_ports(Launch(device="npu", tp=1, bp=1, master_port=29500), base)
    assert [str(finding) for finding in found] == [f"FAIL  ports: {line}" for line in lines]


def test_an_old_interpreter_is_told_what_to_do():
    code = "import runpy, sys\nsys.version_info = (3, 9, 7)\nrunpy.run_module('scripts.launch.__main__')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr == (
        f"{sys.executable} is older than Python 3.10; name another interpreter by PYTHON, e.g. PYTHON=python3.11\n"
    )
