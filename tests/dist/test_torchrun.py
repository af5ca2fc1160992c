"""`python -m lopa_ascend.parallel.torchrun`: how it ends and what it refuses; `test_launch.py` serves under it."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

import pytest

from lopa_ascend.parallel import torchrun
from lopa_ascend.parallel.launch import free_port
from lopa_ascend.parallel.torchrun import run
from tests.ports import listening

COMMAND = (sys.executable, "-m", "lopa_ascend.parallel.torchrun", "--nproc-per-node", "2")
ONE_NODE = ("--nnodes", "1")
pytestmark = pytest.mark.multirank


def start(port: int, *command: str, nodes: Sequence[str] = ONE_NODE) -> subprocess.Popen[str]:
    place = (*nodes, "--master-addr", "127.0.0.1", "--master-port", str(port))
    return subprocess.Popen([*COMMAND, *place, "--no-python", *command], stderr=subprocess.PIPE, text=True)


def test_a_signal_is_no_error_and_leaves_nothing_behind() -> None:
    """Also a signal that comes while only some ranks have started: stderr closes when the last one has ended."""
    with start(free_port(), "sh", "-c", "echo started >&2; exec sleep 60") as process:
        line = ""
        while "started" not in line:
            line = process.stderr.readline()
        begin = time.monotonic()
        process.terminate()
        stderr = process.stderr.read()
        assert process.wait() == 0
        assert time.monotonic() - begin < 20
        assert "Traceback" not in stderr


def test_a_rank_that_is_just_starting_is_ended_too() -> None:
    """Its environment is empty for a moment; here it stays so."""
    with subprocess.Popen(["sleep", "60"], env={}) as starting, subprocess.Popen(["sleep", "1"]) as other:
        torchrun._end_ranks()
        assert starting.wait(20) == -signal.SIGKILL
        assert other.wait(20) == 0  # no rank


def test_a_signal_before_the_ranks_have_started_is_no_error_either() -> None:
    with start(free_port(), "true") as process:
        time.sleep(0.3)  # it imports torch for seconds
        process.terminate()
        assert process.wait() in (0, -signal.SIGTERM)  # the latter while Python itself starts
        assert "Traceback" not in process.stderr.read()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_node_that_waits_for_the_others(number: signal.Signals) -> None:
    """torch waits outside of Python, where no handler of Python runs."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with start(port, "true", nodes=("--nnodes", "2", "--node-rank", "1")) as process:
            silent.accept()  # it asks node 0, which never answers
            assert ends_quietly(process, number)
    with start(port, "true", nodes=("--nnodes", "2", "--node-rank", "0")) as process:
        wait_for_port(port)
        time.sleep(1)  # from listening to waiting for node 1
        assert ends_quietly(process, number)


def ends_quietly(process: subprocess.Popen[str], number: signal.Signals) -> bool:
    """Whether a signal ends a process soon, with status 0 and without a traceback."""
    begin = time.monotonic()
    process.send_signal(number)
    stderr = process.stderr.read()
    return process.wait() == 0 and time.monotonic() - begin < 5 and "Traceback" not in stderr


def wait_for_port(port: int) -> None:
    while True:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.05)


def test_a_rank_that_fails_is_told_without_a_traceback() -> None:
    with start(free_port(), "sh", "-c", "exit 7") as process:
        stderr = process.stderr.read()
        assert process.wait() == 1
        assert "exitcode  : 7" in stderr
        assert "Traceback" not in stderr


def test_nodes_that_do_not_come_are_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torchrun, "NODES_TIMEOUT", 1)
    port = str(free_port())
    place = ("--nnodes", "2", "--node-rank", "0", "--master-addr", "127.0.0.1", "--master-port", port)
    assert run([*place, "--nproc-per-node", "1", "--no-python", "true"]) == 1
    assert f"error: not all of 2 nodes met at 127.0.0.1:{port} within 1 s" in capsys.readouterr().err


def test_a_port_in_use_is_one_line() -> None:
    with listening() as port, start(port, "true") as process:
        stderr = process.stderr.read()
        assert process.wait() == 1
        assert f"error: [Errno 98] the ranks cannot meet at 127.0.0.1 port {port} (Address already in use)" in stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--master-addr", "127.0.0.1"], "--master-port is missing"),
        (["--standalone", "--master-port", "1"], "other rendezvous are not supported"),
        (["--rdzv-backend", "c10d", "--master-port", "1"], "other rendezvous are not supported"),
    ],
)
def test_other_rendezvous_are_refused(flags: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(["--nnodes", "1", *flags, "--no-python", "true"])
