"""`python -m lopa_ascend.parallel.torchrun`: how it ends and what it refuses; `test_launch.py` serves under it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from lopa_ascend.parallel.launch import free_port
from lopa_ascend.parallel.torchrun import run
from tests.ports import listening

COMMAND = (sys.executable, "-m", "lopa_ascend.parallel.torchrun", "--nnodes", "1", "--nproc-per-node", "2")
pytestmark = pytest.mark.multirank


def start(port: int, *command: str) -> subprocess.Popen[str]:
    place = ("--master-addr", "127.0.0.1", "--master-port", str(port))
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


def test_a_signal_before_the_ranks_have_started_is_no_error_either() -> None:
    with start(free_port(), "true") as process:
        time.sleep(0.3)  # it imports torch for seconds
        process.terminate()
        assert process.wait() in (0, -signal.SIGTERM)  # the latter while Python itself starts
        assert "Traceback" not in process.stderr.read()


def test_a_rank_that_fails_is_told_without_a_traceback() -> None:
    with start(free_port(), "sh", "-c", "exit 7") as process:
        stderr = process.stderr.read()
        assert process.wait() == 1
        assert "exitcode  : 7" in stderr
        assert "Traceback" not in stderr


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
