"""Checks the network of a launch: interface, address of node 0, and ports."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

from scripts.checks.launch import Finding, Launch, fail, ok

EVERY_ADDRESS = ""


def check_network(launch: Launch, net: Path) -> Iterator[Finding]:
    """Checks that the interface is there, that the name of node 0 has an address, and that the ports are free.

    Args:
        launch: what is to be launched.
        net: /sys/class/net.
    """
    if launch.interface is not None and not (net / launch.interface).exists():
        known = ", ".join(sorted(entry.name for entry in net.iterdir()))
        yield fail(f"network: there is no interface {launch.interface}", f"choose --interface from {known}")
    try:
        socket.getaddrinfo(launch.master_addr, None)
    except OSError as error:
        yield fail(f"network: --master-addr {launch.master_addr} ({error.strerror})", "give the address of node 0")
    for port in launch.http_ports:
        yield _check_port(launch.host, port, "--port")
    for port in launch.master_ports:
        yield _check_port(EVERY_ADDRESS, port, "--master-port")


def _check_port(host: str, port: int, flag: str) -> Finding:
    """Whether this machine can listen on a port; ``flag`` moves it."""
    address = f"{host}:{port}" if host else str(port)
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
    except OSError as error:
        remedy = f"stop the program that uses it, or choose another {flag}"
        return fail(f"network: cannot listen on {address} ({error.strerror})", remedy)
    return ok(f"network: {address} is free")
