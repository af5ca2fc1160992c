"""Ranks of one machine listen on its loopback interface alone, and others on the address that the user names.

test_serving.py looks at those of a server.
"""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from lopa_ascend.config import ParameterError
from lopa_ascend.parallel.launch import Rendezvous, listen
from lopa_ascend.parallel.store import serve_store
from lopa_ascend.parallel.watch import ProcessWatch
from tests.listeners import check_loopback_alone, own_address, refuses

LLM = """
import sys
from lopa_ascend import LLM
with LLM(tensor_parallel_size=2, max_model_len=128) as llm:
    print(*(process.pid for process in llm.engine._leader.followers), flush=True)
    sys.stdin.read()
"""
pytestmark = pytest.mark.multirank


def test_ranks_of_llm() -> None:
    process = subprocess.Popen([sys.executable, "-c", LLM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process:
        others = [int(pid) for pid in process.stdout.readline().split()]
        check_loopback_alone([process.pid, *others], at_least=3)  # the store, and gloo of two ranks
        process.stdin.close()
        assert process.wait(timeout=60) == 0


def test_a_store_listens_on_the_named_address_alone() -> None:
    outside = own_address()
    inner, outer = serve_store("127.0.0.1", 0), serve_store(outside, 0)
    assert refuses(outside, inner.port)
    assert refuses("127.0.0.1", outer.port)
    with socket.create_connection((outside, outer.port), timeout=5):
        pass


def test_the_watch_listens_on_the_named_address_alone() -> None:
    outside = own_address()
    for host, other in (("127.0.0.1", outside), (outside, "127.0.0.1")):
        watch = ProcessWatch.listen(2, 60, lambda message: None, host)
        try:
            assert refuses(other, watch.port)
            assert not refuses(host, watch.port)
        finally:
            watch.close()


def test_an_address_of_another_machine_is_refused() -> None:
    for host in ("203.0.113.7", "no.such.host.invalid"):
        with pytest.raises(
            OSError, match=f"the ranks cannot meet at {host} port 0 .*MASTER_ADDR must be an address of"
        ):
            listen(host, 0)


def test_a_name_that_means_loopback_is_refused_for_several_machines() -> None:
    """127.1 is read as a name is: it has the address 127.0.0.1."""
    Rendezvous(0, 2, "127.1", 29500, local=True).check_host()
    Rendezvous(1, 2, "127.1", 29500, local=False).check_host()  # rank 0 may have another address for it
    Rendezvous(0, 2, "127.0.0.1", 29500, local=False).check_host()  # somebody tries several "nodes" on one machine
    with pytest.raises(ParameterError, match=r"MASTER_ADDR is 127\.1, which is 127\.0\.0\.1 on this machine; name an"):
        Rendezvous(0, 2, "127.1", 29500, local=False).check_host()


def test_a_port_in_use_is_named() -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"at 127.0.0.1 port {port} .Address already in use"):
            listen("127.0.0.1", port)
