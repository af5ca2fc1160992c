"""Who listens where: the listening sockets of processes, and an address of this machine that others can reach."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

import pytest

_LISTEN = "0A"


def own_address() -> str:
    """An address of this machine that is not loopback; skips the test if there is none."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("192.0.2.1", 9))  # sends nothing
            address: str = probe.getsockname()[0]
    except OSError:
        pytest.skip("this machine has no address but loopback")
    return address


def listening_sockets(pids: Iterable[int]) -> set[tuple[IPv4Address | IPv6Address, int]]:
    """Address and port of every TCP socket on which one of these processes listens."""
    inodes = set()
    for pid in pids:
        for file in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                target = os.readlink(file)
            except OSError:
                continue
            if target.startswith("socket:["):
                inodes.add(target.removeprefix("socket:[").removesuffix("]"))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == _LISTEN and inode in inodes:
                address, port = local.split(":")
                words = [bytes.fromhex(address[i : i + 8])[::-1] for i in range(0, len(address), 8)]
                found.add((ip_address(b"".join(words)), int(port, 16)))
    return found


def refuses(address: str, port: int) -> bool:
    """Whether nobody listens there."""
    try:
        with socket.create_connection((address, port), timeout=5):
            return False
    except ConnectionRefusedError:
        return True


def check_loopback_alone(pids: Iterable[int], at_least: int) -> None:
    """Checks that processes listen on loopback addresses alone, and that others are refused.

    Args:
        pids: the processes.
        at_least: sockets on which they must listen, so that the test sees them.
    """
    found = listening_sockets(pids)
    assert len(found) >= at_least, found
    assert all(address.is_loopback for address, _ in found), found
    outside = own_address()
    assert [port for _, port in found if not refuses(outside, port)] == []
