"""The processes of an engine's ranks on one machine: what is started for each, and how an end is explained."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from lopa_ascend.config import EngineConfig, ParameterError
from lopa_ascend.parallel.launch import (
    OTHER_RANK_FAILED,
    RankProcess,
    Rendezvous,
    explain_exit,
    kill_running,
    local_rank_processes,
)
from lopa_ascend.serve.link.spawn import ChildProcess

CONFIG = EngineConfig(tensor_parallel_size=2, branch_parallel_size=2)


def test_every_rank_gets_a_command_and_its_place() -> None:
    starts = local_rank_processes(CONFIG, 4321, ("python", "-m", "leader"))
    assert list(starts) == [0, 1, 2, 3]
    assert starts[0].command == ("python", "-m", "leader")
    for rank, start in starts.items():
        assert start.environment == os.environ | Rendezvous.on_this_machine(rank, 4, 4321).environment()
        assert (start.environment["RANK"], start.environment["MASTER_PORT"]) == (str(rank), "4321")
    for rank in (1, 2, 3):
        program, *module, config, with_stdin, with_parent = starts[rank].command
        assert (program, module) == (sys.executable, ["-m", "lopa_ascend.engine.follower"])
        assert msgspec.json.decode(config, type=EngineConfig) == CONFIG
        assert (with_stdin, with_parent) == ("--ends-with-stdin", "--ends-with-parent")


def test_a_process_that_is_rank_0_starts_the_others_alone() -> None:
    assert list(local_rank_processes(CONFIG, 4321)) == [1, 2, 3]


def test_a_malformed_variable_of_torchrun_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Rendezvous.on_this_machine(1, 2, 4321).environment()
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT", "LOCAL_WORLD_SIZE"):
        for variable, value in (whole | {name: "two"}).items():
            monkeypatch.setenv(variable, value)
        with pytest.raises(ParameterError, match=rf"{name}.*invalid literal for int\(\) with base 10: 'two'"):
            Rendezvous.from_environment()


def test_a_missing_variable_of_torchrun_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in Rendezvous.on_this_machine(1, 2, 4321).environment().items():
        monkeypatch.setenv(variable, value)
    monkeypatch.delenv("MASTER_ADDR")
    with pytest.raises(ParameterError, match="this process is one of several ranks; but MASTER_ADDR is missing"):
        Rendezvous.from_environment()


@pytest.mark.parametrize(
    ("statuses", "explanation"),
    [
        ({0: None, 1: None}, None),
        ({0: -signal.SIGKILL}, "SIGKILL"),
        ({0: 1}, "exit status 1"),
        ({1: 1}, "rank 1: exit status 1"),
        ({0: None, 1: -signal.SIGSEGV}, "rank 1: SIGSEGV"),
        ({0: OTHER_RANK_FAILED, 1: -signal.SIGKILL, 2: OTHER_RANK_FAILED}, "rank 1: SIGKILL"),
        ({0: OTHER_RANK_FAILED, 1: None}, "rank 0: ended because another rank had failed, which the log names"),
    ],
)
def test_an_end_is_explained_by_the_rank_that_caused_it(statuses: dict[int, int | None], explanation: str) -> None:
    assert explain_exit(statuses) == explanation


def test_running_processes_are_killed_and_ended_ones_left_alone() -> None:
    running = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    kill_running([running, ended])
    assert (running.wait(), ended.returncode) == (-signal.SIGKILL, 0)
    running.stdin.close()


def test_a_process_killed_as_it_ends_by_itself_keeps_its_status(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """As every engine does that refuses its start: two that wait for a process would be at odds in this moment."""

    async def status() -> int | None:
        process = ChildProcess(RankProcess(("/bin/sh", "-c", "exit 7"), dict(os.environ)))
        with suppress(OSError):  # it has been reaped
            while Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                pass
        kill_running([process])
        await process.ended.wait()
        return process.returncode

    async def statuses() -> set[int | None]:
        return {await status() for _ in range(100)}

    assert asyncio.run(statuses()) == {7}
    assert (capfd.readouterr().err, caplog.messages) == ("", [])
