"""Ports for tests: free ones, one in use, and whether there is IPv6."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager


def free_ports(count: int) -> int:
    """The first of so many neighbours that nobody listens on, below those that the system hands out by itself."""
    # Far from the first ones of another process of tests, which may have been started right before or after this one.
    for first in range(20000 + os.getpid() * 97 % 10000, 32000, count):
        try:
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("", port))
        except OSError:
            continue
        return first
    raise AssertionError("no free ports")


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@contextmanager
def listening() -> Iterator[int]:
    """A port of 127.0.0.1 on which somebody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]
