"""The watch over real processes that are killed, stopped and continued: what each of the others reports, and when."""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from lopa_ascend.parallel import watch
from lopa_ascend.parallel.watch import ProcessWatch

ROOT = Path(__file__).resolve().parents[2]
HOST = "127.0.0.1"
SCRIPT = """
import sys
from lopa_ascend.parallel.watch import ProcessWatch

rank, size, timeout = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
fail = lambda message: print(message, flush=True)
if rank == 0:
    watch = ProcessWatch.listen(size, timeout, fail, "127.0.0.1")
    print(watch.port, watch.token, flush=True)
else:
    port, token = sys.argv[4:]
    watch = ProcessWatch.connect("127.0.0.1", int(port), token, rank, timeout, fail)
    print("joined", flush=True)
sys.stdin.read()
"""


class Rank:
    """A process with a watch, and the lines that it prints."""

    def __init__(self, *args: object) -> None:
        command = [sys.executable, "-c", SCRIPT, *map(str, args)]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self._lines.put(line.rstrip())

    def line(self, seconds: float) -> str:
        """The next line; raises queue.Empty if none comes within ``seconds``."""
        return self._lines.get(timeout=seconds)

    def signal(self, number: int) -> None:
        """Sends a signal; returns when the process has stopped, if the signal stops it."""
        self.process.send_signal(number)
        if number == signal.SIGSTOP:
            os.waitpid(self.process.pid, os.WUNTRACED)

    def end(self) -> list[str]:
        """Ends the process; returns the lines that were not read."""
        self.process.kill()
        self.process.wait()
        self._reader.join()
        self.process.stdin.close()
        self.process.stdout.close()
        return list(self._lines.queue)


@contextmanager
def ranks(size: int, timeout: float) -> Iterator[list[Rank]]:
    """Processes that have joined the watch. At the end of a test none may have reported more than the test has read."""
    with ExitStack() as stack:
        started: list[Rank] = []

        def start(*args: object) -> None:
            started.append(Rank(*args))
            stack.callback(started[-1].process.kill)

        start(0, size, timeout)
        port, token = started[0].line(20).split()
        for rank in range(1, size):
            start(rank, size, timeout, port, token)
        assert [rank.line(20) for rank in started[1:]] == ["joined"] * (size - 1)
        yield started
        assert [rank.end() for rank in started] == [[]] * size


def heard(all_ranks: list[Rank], seconds: float) -> list[str]:
    """What each rank reports within ``seconds`` from now, "" if nothing."""
    end = time.monotonic() + seconds
    lines = []
    for rank in all_ranks:
        try:
            lines.append(rank.line(max(0.0, end - time.monotonic())))
        except queue.Empty:
            lines.append("")
    return lines


def test_all_learn_of_a_death_at_once_though_one_of_them_is_stopped() -> None:
    with ranks(5, timeout=60) as (leader, first, stopped, dies, last):
        stopped.signal(signal.SIGSTOP)
        dies.signal(signal.SIGKILL)
        assert heard([leader, first, last], 1) == ["rank 3 has ended"] * 3
        last.signal(signal.SIGKILL)
        leader.signal(signal.SIGKILL)
        stopped.signal(signal.SIGCONT)
        assert heard([stopped], 1) == ["rank 3 has ended"]
        assert heard([first], 0.3) == [""]


def test_all_learn_of_the_death_of_rank_0() -> None:
    with ranks(3, timeout=60) as (leader, *others):
        leader.signal(signal.SIGKILL)
        assert heard(others, 1) == ["rank 0 has ended"] * 2


def test_all_learn_of_a_hang_and_so_does_the_one_that_hung() -> None:
    """Rank 1 of one group and rank 0 of another, at the same time because this takes seconds."""
    with ranks(3, timeout=2) as one, ranks(3, timeout=2) as other:
        hung = [one[1], other[0]]
        for rank in hung:
            rank.signal(signal.SIGSTOP)
        live = [one[0], one[2], *other[1:]]
        assert heard(live, 0.8) == [""] * 4
        messages = ["rank 1 has not answered for 2 s", "rank 0 has not answered for 2 s"]
        assert heard(live, 3.2) == [messages[0], messages[0], messages[1], messages[1]]
        for rank in hung:
            rank.signal(signal.SIGCONT)
        assert heard(hung, 1) == messages


def test_who_was_suspended_does_not_blame_others_for_it() -> None:
    with ranks(3, timeout=2) as (leader, *others):
        for rank in (*others, leader):
            rank.signal(signal.SIGSTOP)
        time.sleep(2.7)
        leader.signal(signal.SIGCONT)
        assert heard([leader], 0.5) == [""]
        for rank in others:
            rank.signal(signal.SIGCONT)
        assert heard([leader, *others], 0.5) == [""] * 3
        others[0].signal(signal.SIGKILL)
        assert heard([leader, others[1]], 1) == ["rank 1 has ended"] * 2


class Group:
    """Watches in this process; ``said`` receives (rank, message) of each callback."""

    def __init__(self, size: int):
        self.said: queue.Queue[tuple[int, str]] = queue.Queue()
        self.watches = [ProcessWatch.listen(size, 2, lambda message: self.said.put((0, message)), HOST)]
        self.port, self.token = self.watches[0].port, self.watches[0].token

    def follow(self, rank: int) -> ProcessWatch:
        def failed(message: str) -> None:
            self.said.put((rank, message))

        self.watches.append(ProcessWatch.connect(HOST, self.port, self.token, rank, 2, failed))
        return self.watches[-1]

    def connect(self, line: str) -> socket.socket:
        """A connection without a watch behind it that has sent ``line``."""
        connection = socket.create_connection((HOST, self.port), timeout=3)
        connection.sendall(line.encode())
        return connection

    def everything(self, seconds: float) -> list[tuple[int, str]]:
        time.sleep(seconds)
        return sorted(self.said.get() for _ in range(self.said.qsize()))


def ended(connection: socket.socket) -> bool:
    """Whether the other end closes, before the connection's timeout."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.fixture
def group() -> Iterator[Group]:
    group = Group(4)
    yield group
    for end in group.watches:
        end.close()


def threads() -> int:
    return sum(thread.name == "watch" for thread in threading.enumerate())


def test_a_goodbye_is_no_failure(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence between beats is no failure either; a connection that never sends a line is dropped."""
    monkeypatch.setattr(watch, "GREETING_TIMEOUT", 2)
    before, silent = threads(), group.connect("")
    one, _, _ = (group.follow(rank) for rank in (1, 2, 3))
    start = time.monotonic()
    one.close()
    one.close()
    assert time.monotonic() - start < 0.5
    assert group.everything(3.3) == []
    with silent:
        assert ended(silent)
    assert threads() == before + 2
    group.watches[0].close()
    assert group.everything(0.3) == []
    assert threads() == before - 1


def test_who_does_not_know_the_token_is_dropped_and_not_missed(group: Group) -> None:
    with ExitStack() as stack:
        group.connect("").close()
        wrong = ["GET / HTTP/1.1\r\n", f"{'0' * 32} 1\n", f"0\n{group.token} 1\n", "x" * 5000]
        wrong += [f"{group.token} {rank}\n" for rank in ("0", "4", "-1", "one", "")]
        for line in wrong:
            assert ended(stack.enter_context(group.connect(line))), line
        for rank in (1, 2):
            group.follow(rank)
        again = stack.enter_context(group.connect(f"{group.token} 1\n"))
        assert ended(again)
        late = stack.enter_context(group.connect(group.token[:5]))
        late.sendall(f"{group.token[5:]} 3\n".encode())
        assert group.everything(0.3) == []
        with pytest.raises(ConnectionRefusedError):  # all have joined
            group.connect("")
        late.close()
        assert group.everything(0.3) == [(rank, "rank 3 has ended") for rank in (0, 1, 2)]


def test_ranks_that_are_joining_when_another_one_ends_are_told_of_it() -> None:
    """Rank 0 is stopped while rank 1 ends and ranks 2 and 3 connect, so that it finds all three at once."""
    with ExitStack() as stack:
        leader = Rank(0, 4, 60)
        stack.callback(leader.end)
        port, token = leader.line(20).split()

        def connect(rank: int) -> socket.socket:
            connection = stack.enter_context(socket.create_connection((HOST, int(port)), timeout=3))
            connection.sendall(f"{token} {rank}\n".encode())
            return connection

        ends = connect(1)
        time.sleep(0.2)
        leader.signal(signal.SIGSTOP)
        ends.close()
        joining = [connect(rank) for rank in (2, 3)]
        leader.signal(signal.SIGCONT)
        for connection in joining:
            with connection.makefile() as lines:
                assert lines.read().splitlines()[-1] == "failed rank 1 has ended"


def test_what_is_no_message_is_a_failure(group: Group) -> None:
    message = "rank 1 has sent b'what', which is no message"
    with group.connect(f"{group.token} 1\n\nwhat\n") as connection, connection.makefile() as lines:
        assert lines.read() == f"failed {message}\n"
    assert group.everything(0.1) == [(0, message)]


def test_a_failure_is_told_once(group: Group) -> None:
    connections = [group.connect(f"{group.token} {rank}\n") for rank in (1, 2)]
    group.follow(3)
    time.sleep(0.2)
    for connection in connections:
        connection.close()
    (first, message), *others = group.everything(0.5)
    assert (first, others) == (0, [(3, message)])
    assert message in ("rank 1 has ended", "rank 2 has ended")


@pytest.mark.parametrize(
    ("failure", "heard_as"),
    [
        ("rank 1 has left: ValueError", "rank 1 has left: ValueError"),
        ("out of memory\n  tried 2 GiB\n", "out of memory tried 2 GiB"),
        ("\N{FISH CAKE WITH SWIRL DESIGN}" * 2000, "\N{FISH CAKE WITH SWIRL DESIGN}" * 250),  # four bytes each
    ],
)
def test_a_rank_that_leaves_for_a_failure_says_which(failure: str, heard_as: str) -> None:
    heard: list[queue.Queue[str]] = [queue.Queue() for _ in range(3)]
    leader = ProcessWatch.listen(3, 60, heard[0].put, HOST)
    followers = [ProcessWatch.connect(HOST, leader.port, leader.token, rank, 60, heard[rank].put) for rank in (1, 2)]
    followers[0].close(failure)
    assert [heard[rank].get(timeout=2) for rank in (0, 2)] == 2 * [heard_as]
    for each in (leader, *followers):
        each.close()
    assert all(queue.empty() for queue in heard)


def test_a_rank_whose_parent_has_ended_says_so() -> None:
    heard: list[queue.Queue[str]] = [queue.Queue() for _ in range(2)]
    another = os.getpid()  # not the parent of this process
    leader = ProcessWatch.listen(2, 60, heard[0].put, HOST, parent=os.getppid())
    follower = ProcessWatch.connect(HOST, leader.port, leader.token, 1, 60, heard[1].put, parent=another)
    message = f"the process that started the ranks on {socket.gethostname()} has ended"
    assert [each.get(timeout=5) for each in heard] == 2 * [message]
    for each in (leader, follower):
        each.close()
