"""Ranks that die, hang, or decide something else: everyone hears of it within seconds, and no process is left."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from lopa_ascend.engine.engine import Engine
from lopa_ascend.engine.leader import Leader
from lopa_ascend.parallel.collectives import RankError
from lopa_ascend.parallel.watch import BEAT_INTERVAL
from tests.dist import forks, ranks
from tests.judges.ranks import by_rank
from tests.judges.server import serving
from tests.judges.signals import signal_under_load
from tests.tiers import slow_but

pytestmark = pytest.mark.multirank

MARK = "LOPA_TEST_MARK"
QUESTION = {"messages": [{"role": "user", "content": "What is 12 + 30?"}], "max_tokens": 8}
SERVE = ("-m", "lopa_ascend.serve")


def flags(tp: int, bp: int, **others: float) -> list[str]:
    values = {"tensor-parallel-size": tp, "branch-parallel-size": bp, **others}
    return [text for name, value in values.items() for text in (f"--{name.replace('_', '-')}", str(value))]


def until(condition: Callable[[], Any], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.05)


class Family:
    """The processes that a test has started, and theirs: a mark in the environment tells them."""

    def __init__(self, mark: str):
        self._mark = f"{MARK}={mark}"

    def all(self) -> dict[int, list[str]]:
        """The environment of each that has not ended."""
        found = {}
        for entry in Path("/proc").iterdir():
            try:
                variables = (entry / "environ").read_text().split("\0") if entry.name.isdigit() else []
            except OSError:  # somebody else's, or ended meanwhile
                continue
            if self._mark in variables:
                found[int(entry.name)] = variables
        return found

    def rank(self, rank: int) -> int:
        """The only process that is this rank."""
        (pid,) = [pid for pid, variables in self.all().items() if f"RANK={rank}" in variables]
        return pid

    def ends(self, seconds: float) -> None:
        """Fails unless all have ended after so many seconds."""
        until(lambda: not self.all(), seconds)


@pytest.fixture(autouse=True)
def family(monkeypatch: pytest.MonkeyPatch) -> Iterator[Family]:
    forks.server()  # it outlives the test, and so has no mark
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(ranks.ROOT))
    family = Family(mark)
    try:
        yield family
        family.ends(5)
    finally:
        for pid in family.all():
            os.kill(pid, signal.SIGKILL)


@contextmanager
def started(command: Sequence[str], output: int = subprocess.PIPE) -> Iterator[subprocess.Popen[str]]:
    """A process, in a group of its own, that does not outlive a test."""
    with subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


# ---- the server ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tp", "bp", "rank"), slow_but([(1, 2, 0), (2, 1, 1), (2, 2, 0), (2, 2, 3)], [(2, 1, 1)]))
def test_killed_rank(tp: int, bp: int, rank: int, family: Family, tmp_path: Path) -> None:
    """One of each kind; the judge kills all four."""
    log = tmp_path / "log"
    with serving(None, log, *flags(tp, bp, max_num_seqs=4)) as server:
        outcome = asyncio.run(signal_under_load(server, family.rank(rank), signal.SIGKILL, clients=6))
    assert outcome.faults() == []
    # A rank that learns of it during an exchange names that exchange first.
    assert set(re.findall(r"rank . ends: (?:.*: )?(.*)", log.read_text())) == {f"rank {rank} has ended"}


@pytest.mark.parametrize(("tp", "bp", "rank"), slow_but([(2, 1, 0), (1, 2, 1)], [(1, 2, 1)]))
def test_hanging_rank(tp: int, bp: int, rank: int, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with serving(None, log, *flags(tp, bp, max_num_seqs=4, distributed_timeout_seconds=3)) as server:
        outcome = asyncio.run(signal_under_load(server, by_rank(server.pid)[rank], signal.SIGSTOP, clients=6))
    assert outcome.faults(notice_time=3 + BEAT_INTERVAL) == []
    assert f"rank {1 - rank} ends: rank {rank} has not answered for 3 s" in log.read_text()


def test_idle_server_lives_on_until_its_http_process_is_killed(family: Family, tmp_path: Path) -> None:
    with serving(
        None, tmp_path / "log", *flags(1, 2, distributed_timeout_seconds=2, kv_cache_memory=ranks.KV_MEMORY)
    ) as server:
        time.sleep(4)
        assert httpx.post(f"{server.url}/v1/chat/completions", json=QUESTION, timeout=60).status_code == 200
        assert len(family.all()) == 4  # two ranks, HTTP, and what renders templates
        os.kill(server.pid, signal.SIGKILL)
        family.ends(5)


def test_sizes_that_do_not_fit_are_refused(family: Family) -> None:
    command = [sys.executable, *SERVE, "--port", "0"]
    result = subprocess.run([*command, *flags(3, 1)], capture_output=True, text=True, timeout=60)
    message = "error: tensor_parallel_size: 3 does not split this model evenly; choose one of 1, 2, 4\n"
    assert (result.returncode, result.stdout, result.stderr) == (1, "", message)
    family.ends(5)
    meeting = {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    environment = os.environ | meeting
    result = subprocess.run([*command, *flags(2, 2)], env=environment, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert "are 4 ranks, but 3 were started; start a multiple of 2" in result.stderr


# ---- the Python API --------------------------------------------------------------------------------------------------

START = """
import json, os, signal, sys, time
from lopa_ascend import LLM, DecodingParams
from lopa_ascend.parallel.collectives import RankError
from tests.dist.ranks import KV_MEMORY

def generate(llm, count):
    params = DecodingParams(max_new_tokens=count, tau_conf=1.0, ignore_eos=True)  # one position a pass: many passes
    return llm.generate("hi", params, quiet=True)[0].token_ids

def children():
    with open(f"/proc/{os.getpid()}/task/{os.getpid()}/children") as file:
        return [int(pid) for pid in file.read().split()]

def followers():
    return [pid for pid in children() if "engine.follower" in open(f"/proc/{pid}/cmdline").read()]
"""
# Prints of each engine its tokens, the error, after how many seconds it came, and the processes left after close().
ENGINES = """
def engine(blow):
    llm, error, seconds = LLM(tensor_parallel_size=2, distributed_timeout_seconds=4, kv_cache_memory=KV_MEMORY), "", 0.0
    tokens = generate(llm, 8)
    if blow is not None:
        os.kill(*followers(), blow)
        struck = time.monotonic()
        try:
            while True:
                generate(llm, 8)
        except RankError as failure:
            error, seconds = str(failure), time.monotonic() - struck
    llm.close()
    print(json.dumps([tokens, error, seconds, children()]))

for blow in None, signal.SIGKILL, signal.SIGSTOP:
    engine(blow)
"""
# Closes an engine in the middle of a generation of another thread, and prints that thread's error.
CLOSED_BY_ANOTHER_THREAD = """
from threading import Thread
llm, errors = LLM(tensor_parallel_size=2, kv_cache_memory=KV_MEMORY), []

def run():
    try:
        generate(llm, 1500)
    except RankError as error:
        errors.append(str(error))

thread = Thread(target=run)
thread.start()
while not llm.engine.has_work():
    time.sleep(0.01)
llm.close()
thread.join()
print(json.dumps([errors, children()]))
"""
# Closes an engine by a signal in the middle of a step that takes longer than the heartbeat waits for the lock.
CLOSED_BY_A_SIGNAL = """
from lopa_ascend.engine.engine import Engine
llm, step = LLM(tensor_parallel_size=2, kv_cache_memory=KV_MEMORY), Engine.step

def slow_step(engine):
    with engine._leader.lock:
        signal.setitimer(signal.ITIMER_REAL, 0.8)
        time.sleep(1.2)
        return step(engine)

Engine.step = slow_step
signal.signal(signal.SIGALRM, lambda *_: llm.close())
try:
    generate(llm, 8)
except RankError:
    print(json.dumps(children()))
"""
# Prints the errors of the call in which the ranks differ, and of the next one.
DIFFERENT = """
from lopa_ascend.engine.engine import Engine
llm, errors = LLM(tensor_parallel_size=2, distributed_timeout_seconds=4, kv_cache_memory=KV_MEMORY), []

def differ(engine):
    raise RankError("rank 1 differs from rank 0")

Engine._make_step = differ
for _ in range(2):
    try:
        generate(llm, 8)
    except RankError as error:
        errors.append(str(error))
llm.close()
print(json.dumps([errors, children()]))
"""
# A compiler whose graphs are steps op by op, for all ranks.
GRAPHS = """
from lopa_ascend.backend.compiler import Eager
from lopa_ascend.graph import setup
events = []

class Graphs(Eager):
    mode, live = "inductor", 0
    def _compile(self, *args):
        self.live += 1
        return super()._compile(*args)
    def close(self):
        events.append("no graphs")
        self.live = 0

graphs = Graphs()
setup.load_compiler = lambda *_, **__: graphs
"""
# Rank 0 as on a GPU: torch's groups end only once no graph is left, and what is on its way to the host never comes.
AS_ON_A_GPU = """
import torch.distributed as dist
from lopa_ascend.backend.cpu.ops import CpuOps
from lopa_ascend.backend.cuda.graphs import wait_for
from lopa_ascend.parallel import mesh
destroy = dist.destroy_process_group

def destroy_without_graphs():
    while graphs.live:
        time.sleep(0.01)
    events.append("no groups")
    destroy()

class Never:
    blow, struck = None, None
    def query(self):
        if Never.struck is None:
            Never.struck = time.monotonic()
            os.kill(*followers(), Never.blow)
        return False

def read_never(ops, x, while_waiting):
    return lambda: wait_for(Never(), while_waiting)

dist.destroy_process_group = destroy_without_graphs
graph_options = {"graph_mode": "inductor", "max_num_seqs": 1, "graph_window_blocks": 2}

def make():
    made = LLM(tensor_parallel_size=2, distributed_timeout_seconds=4, kv_cache_memory=KV_MEMORY, **graph_options)
    assert graphs.live
    return made
"""
CLOSED_WITH_GRAPHS = """
def leave_with(blow):
    try:
        with make() as llm:
            generate(llm, 8)
            raise blow
    except Exception as error:
        return type(error).__name__

print(json.dumps([leave_with(KeyError()), events, children()]))
"""
REFUSED_WITH_GRAPHS = """
from lopa_ascend.engine.engine import Engine
def refuse(engine):
    raise KeyError("it cannot start")

Engine._choose_seed = refuse
try:
    make()
except KeyError as error:
    print(json.dumps([type(error).__name__, events, followers()]))
"""
CLOSED_ALTHOUGH_GROUPS_DO_NOT_END = """
graphs.close = lambda: None
llm = make()
mesh.ENDING_TIMEOUT, begin = 1.0, time.monotonic()
llm.close()
print(json.dumps([events, time.monotonic() - begin < 5, children()]))
"""
WAITS_FOR_A_DEVICE = """
failed, llm = "", make()
CpuOps.read_later = read_never
Never.blow = signal.{0}
try:
    with llm:
        generate(llm, 8)
except RankError as error:
    failed = str(error)
print(json.dumps([failed, time.monotonic() - Never.struck, events, children()]))
"""
STOPPED_AT_ONCE = """
from subprocess import Popen
start = Popen.__init__

def stopped(process, *args, **kwargs):
    start(process, *args, **kwargs)
    if "lopa_ascend.engine.follower" in args[0]:
        process.send_signal(signal.SIGSTOP)

Popen.__init__ = stopped
"""
STOPPED_BEFORE = """
from lopa_ascend.parallel.mesh import Mesh
call = Mesh.{0}

def stopped(*args):
    os.kill(followers()[0], signal.SIGSTOP)
    return call(*args)

Mesh.{0} = stopped
"""
GIVES_UP = """
begin, error = time.monotonic(), ""
try:
    LLM(tensor_parallel_size=2, distributed_timeout_seconds=2)
except RankError as wrong:
    error = str(wrong)
print(json.dumps([error, time.monotonic() - begin, followers()]))
"""
REFUSED_BY_A_FOLLOWER = """
from lopa_ascend.core import Request
llm = LLM(tensor_parallel_size=2, kv_cache_memory=KV_MEMORY)
llm.engine._leader.outbox.append(Request("no prompt", (), DecodingParams()))
try:
    generate(llm, 8)
except RankError as error:
    print(error)
llm.close()
"""
DOES_NOT_MEET = """
import os
import torch.distributed
if os.environ.get("RANK") == "1":
    torch.distributed.init_process_group = lambda *_, **__: os._exit(9)
"""
MEETS_NOBODY = """
from datetime import timedelta
from lopa_ascend import LLM
from lopa_ascend.parallel import mesh
mesh.MEETING_TIMEOUT = timedelta(seconds=5)
LLM(branch_parallel_size=2)
"""
ENDS = """
llm = LLM(branch_parallel_size=2, kv_cache_memory=KV_MEMORY)
print("begins", flush=True)
generate(llm, int(sys.argv[1]))
"""


def run_script(code: str, folder: Path) -> forks.Ended:
    """Runs a script after ``START``; its ranks are processes of their own, which the tests know by the mark."""
    return forks.script(
        START + code, folder, {name: os.environ[name] for name in (MARK, "OMP_NUM_THREADS", "PYTHONPATH")}
    )


def test_engines_one_after_another(tmp_path: Path) -> None:
    """One that is closed, one whose follower is killed, one whose follower hangs."""
    ended = run_script(ENGINES, tmp_path)
    assert ended.status == 0
    closed, killed, stopped = map(json.loads, ended.output.splitlines())
    assert closed[1] == ""
    assert killed[1].endswith("rank 1 has ended")
    assert stopped[1].endswith("rank 1 has not answered for 4 s")
    assert killed[2] < 2
    assert stopped[2] < 8
    assert [engine[3] for engine in (closed, killed, stopped)] == [[], [], []]
    assert closed[0] == killed[0] == stopped[0]


def run_as_on_gpus(code: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> forks.Ended:
    """Runs a script after ``AS_ON_A_GPU``, whose other ranks have ``GRAPHS`` too."""
    (folder / "sitecustomize.py").write_text(GRAPHS)
    monkeypatch.setenv("PYTHONPATH", f"{folder}:{ranks.ROOT}")
    return run_script(GRAPHS + AS_ON_A_GPU + code, folder)


@pytest.mark.parametrize("code", [CLOSED_WITH_GRAPHS, REFUSED_WITH_GRAPHS])
def test_graphs_end_before_the_groups_of_ranks(code: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """NCCL would wait for them for ever. Here an exception is under way: in a ``with`` block, or at the start."""
    ended = run_as_on_gpus(code, tmp_path, monkeypatch)
    assert json.loads(ended.output) == ["KeyError", ["no graphs", "no groups"], []], ended.error


def test_an_engine_closes_although_the_groups_of_ranks_do_not_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ended = run_as_on_gpus(CLOSED_ALTHOUGH_GROUPS_DO_NOT_END, tmp_path, monkeypatch)
    assert json.loads(ended.output) == [[], True, []]
    assert "the groups of ranks have not ended in 1 s" in ended.error


@pytest.mark.parametrize(
    ("blow", "why", "most"),
    slow_but(
        [("SIGKILL", "rank 1 has ended", 6), ("SIGSTOP", "rank 1 has not answered for 4 s", 12)],
        [("SIGKILL", "rank 1 has ended", 6)],
    ),
)
def test_a_rank_that_waits_for_its_device_hears_of_the_end_of_another(
    blow: str, why: str, most: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ended = run_as_on_gpus(WAITS_FOR_A_DEVICE.format(blow), tmp_path, monkeypatch)
    error, seconds, events, left = json.loads(ended.output)
    assert error in (
        f"a step failed: {why}",
        "a step failed: the device has not finished it in 4 s; a rank does not answer",
    )
    assert seconds < most
    assert (events, left) == (["no graphs", "no groups"], [])


WHILE_IT_STARTED = "rank 1 was stopped, by SIGSTOP or a debugger, for 2 s while it started"


@pytest.mark.parametrize(
    ("when", "why"),
    slow_but(
        [
            (STOPPED_AT_ONCE, WHILE_IT_STARTED),
            (STOPPED_BEFORE.format("_start_watch"), WHILE_IT_STARTED),
            (STOPPED_BEFORE.format("_connect"), "rank 1 has not answered for 2 s"),
            (STOPPED_BEFORE.format("start"), "rank 1 has not answered for 2 s"),
        ],
        [(STOPPED_AT_ONCE, WHILE_IT_STARTED)],
    ),
)
def test_a_rank_that_is_stopped_while_it_starts_is_given_up(when: str, why: str, tmp_path: Path) -> None:
    error, seconds, left = json.loads(run_script(when + GIVES_UP, tmp_path).output)
    assert error.endswith(why)
    assert seconds < 30
    assert left == []


def test_a_network_interface_that_is_not_there_is_named_once() -> None:
    command = [sys.executable, "-m", "lopa_ascend.serve", "--port", "0", "--branch-parallel-size", "2"]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "nothing0"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=ranks.TIMEOUT, env=environment)
    assert result.returncode == 1
    assert result.stderr.startswith(
        "error: tensor_parallel_size: GLOO_SOCKET_IFNAME names 'nothing0'; this machine has "
    )
    assert result.stderr.count("\n") == 1


def test_an_engine_that_has_failed_goes_on_saying_why(tmp_path: Path) -> None:
    why = "rank 1 differs from rank 0"
    assert json.loads(run_script(DIFFERENT, tmp_path).output) == [[why, f"this engine has ended: {why}"], []]


def test_an_engine_whose_message_to_the_others_failed_goes_on_saying_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RankError("rank 1 has ended")

    monkeypatch.setattr("lopa_ascend.engine.leader.send_message", fail)
    engine: Any = object.__new__(Engine)
    engine.mesh, engine._failure = SimpleNamespace(failure=None, world=None), None
    engine._leader = Leader(engine.mesh.world, lambda: None)
    engine.scheduler, engine._compiling = SimpleNamespace(running={}, waiting={}), {}
    for message in ("^rank 1 has ended", "^this engine has ended: rank 1 has ended"):
        with pytest.raises(RankError, match=message):
            engine.step()
    engine._leader.end()


def test_a_follower_that_cannot_go_on_says_why(tmp_path: Path) -> None:
    """It is sent a request without a prompt, which rank 0 would have refused before it sends it."""
    ended = run_script(REFUSED_BY_A_FOLLOWER, tmp_path)
    assert "rank 1 (bp 0, tp 1) has left: ParameterError: prompt: must not be empty" in ended.output
    assert "ParameterError" in ended.error  # the traceback of rank 1


def test_a_rank_that_ends_while_the_ranks_connect_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Rank 0 waits inside of torch then, where nothing but a timeout ends it."""
    (tmp_path / "sitecustomize.py").write_text(DOES_NOT_MEET)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ranks.ROOT}")
    ended = run_script(MEETS_NOBODY, tmp_path)
    assert ended.status == 1
    assert "RankError: rank 0: the ranks did not meet: rank 1 has ended" in ended.error


def test_an_engine_that_another_thread_closes_ends_between_two_steps(tmp_path: Path) -> None:
    ended = run_script(CLOSED_BY_ANOTHER_THREAD, tmp_path)
    assert (ended.status, ended.error) == (0, "")
    assert json.loads(ended.output) == [["this engine has ended: it was closed"], []]


def test_an_engine_that_a_signal_handler_closes_in_a_step_ends(tmp_path: Path) -> None:
    ended = run_script(CLOSED_BY_A_SIGNAL, tmp_path)
    assert (ended.status, ended.output) == (0, "[]\n")


@pytest.mark.parametrize("interrupted", [False, True])
def test_script_that_ends_without_close(interrupted: bool, family: Family) -> None:
    command = [sys.executable, "-c", START + ENDS, "1500" if interrupted else "8"]
    with started(command) as script:
        assert script.stdout.readline() == "begins\n"
        assert len(family.all()) == 3  # the script, a follower, and what renders templates
        if interrupted:
            time.sleep(0.5)
            os.killpg(script.pid, signal.SIGINT)  # as a terminal does
        stderr = script.communicate(timeout=10)[1]
    assert script.returncode == (-signal.SIGINT if interrupted else 0)
    assert stderr.rstrip().endswith("KeyboardInterrupt") if interrupted else stderr == ""
