"""Checks the network of a launch: interface, address of node 0, and ports."""

from __future__ import annotations

import errno
import re
import socket
from collections.abc import Iterator
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from scripts.launch.arguments import LAST_PORT, Launch
from scripts.launch.findings import Finding, fail, ok

LOOPBACK = ("127.0.0.1", "::1", "localhost")
"""What somebody gives on purpose who tries several "nodes" on one machine."""
HCCL_BASE_PORT = "HCCL_IF_BASE_PORT"
HCCL_FIRST_PORT = 60000
"""Where the launch scripts let HCCL's ports begin, unless ``HCCL_BASE_PORT`` is set."""
HCCL_BASE_PORTS = range(1024, 65521)
"""What HCCL accepts as ``HCCL_BASE_PORT`` (CANN, environment variables of HCCL)."""
HCCL_PORTS = 32
"""Ports that HCCL takes for each server of a node."""


def check_network(launch: Launch, net: Path) -> Iterator[Finding]:
    """Checks that the interface is there, that node 0 has an address for others, and that the ports are free.

    Args:
        launch: what is to be launched.
        net: /sys/class/net.
    """
    if launch.interface is not None:
        # With the bonding driver the folder also has files.
        known = sorted(entry.name for entry in net.iterdir() if entry.is_dir())
        if launch.interface not in known:
            yield fail(
                f"network: there is no interface {launch.interface}", f"choose --interface from {', '.join(known)}"
            )
    for port in launch.http_ports:
        yield _check_port(launch.host, port, "--host", "--port")
    unusable = _check_master(launch)
    if unusable is not None:
        yield unusable
        return
    for port in launch.master_ports:
        yield _check_port(launch.master_addr, port, "--master-addr", "--master-port")


def _check_master(launch: Launch) -> Finding | None:
    """Why the ranks cannot meet at the address of node 0, as far as its name tells; None if nothing is known of it."""
    host = launch.master_addr
    try:
        _, (address, *_) = _resolved(host, launch.master_port)
    except OSError as error:
        return fail(f"network: --master-addr {host} ({error.strerror})", "give the address of node 0")
    # Node 0 would wait for the others, which look for it elsewhere. An IPv6 address may end with a %scope.
    if launch.nnodes > 1 and host not in LOOPBACK and ip_address(address.partition("%")[0]).is_loopback:
        what = f"network: --master-addr {host} is {address} on this machine, where no other node finds node 0"
        return fail(what, "give the address of node 0 on the network between the nodes")
    return None


def _check_port(host: str, port: int, host_flag: str, port_flag: str) -> Finding:
    """Whether this machine can listen on a port of one of its addresses; the flags move both."""
    shown = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        family, address = _resolved(host, port)
        with socket.socket(family) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            remedy = f"stop the program that uses it, or choose another {port_flag}"
        elif error.errno == errno.EACCES:
            remedy = f"choose another {port_flag}: this user may not take that one"
        else:
            remedy = f"give an address of this machine by {host_flag}"
        return fail(f"network: cannot listen on {shown} ({error.strerror})", remedy)
    return ok(f"network: {shown} is free")


def _resolved(host: str, port: int | None) -> tuple[int, tuple[Any, ...]]:
    """The family and the socket address of a host's first address, at which a server would listen.

    Raises:
        OSError: it has none.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except UnicodeError as error:  # such as 10.0.0..1
        raise socket.gaierror(socket.EAI_NONAME, "neither a name nor an address") from error
    return family, address


def check_hccl_ports(launch: Launch, base: str | None) -> Iterator[Finding]:
    """Checks that the ports that HCCL will take are ports, and not those of the server. Needs no look at the machine.

    Args:
        launch: what is to be launched.
        base: the value of ``HCCL_BASE_PORT``; None if it is not set.
    """
    text = base or str(HCCL_FIRST_PORT)
    if not re.fullmatch(r"[1-9][0-9]{3,4}", text) or int(text) not in HCCL_BASE_PORTS:
        allowed = f"set a number from {HCCL_BASE_PORTS[0]} to {HCCL_BASE_PORTS[-1]}, or unset it"
        yield fail(f"ports: {HCCL_BASE_PORT} is {base!r}", allowed)
        return
    ports = range(int(text), int(text) + HCCL_PORTS)
    taken = f"ports: HCCL takes {ports[0]} to {ports[-1]}"
    if ports[-1] > LAST_PORT:
        highest = LAST_PORT + 1 - len(ports)
        yield fail(f"{taken}, beyond port {LAST_PORT}", f"set {HCCL_BASE_PORT} to {highest} or less")
    if shared := sorted({*launch.http_ports, *launch.master_ports} & {*ports}):
        listed = ", ".join(map(str, shared))
        yield fail(f"{taken}, and this launch {listed}", f"change --port, --master-port or {HCCL_BASE_PORT}")
