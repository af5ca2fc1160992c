"""The commands of ``scripts.bench``: their --help, what they refuse, and what the load on a server is made of."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import pytest

from lopa_ascend.demo import HELD_OUT
from scripts.arguments import InputError, named_value
from scripts.bench import ranks
from scripts.bench.__main__ import COMMANDS, main
from scripts.bench.processes import seconds_between, used_by
from scripts.bench.serve import Answer, ask, figures, make_bodies, one_server


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert end.value.code == 0
    assert f"bench {command} " in capsys.readouterr().out


def test_no_command_loads_torch_for_its_help() -> None:
    program = (
        "import contextlib, io, sys; from scripts.bench.__main__ import COMMANDS, main\n"
        "for command in COMMANDS:\n"
        "    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):\n"
        "        main([command, '--help'])\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parents[2], check=True)


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("ranks --tp 0", "--tp: must be a whole number from 1 on, got '0'"),
        ("ranks --tp 1 --bp 1", "one rank sends nothing"),
        ("decode --rounds 0", "--rounds: must be a whole number from 1 on, got '0'"),
        ("decode --engine graph_mode=inductor", "a compiled step cannot be divided into parts"),
        ("decode --params tau=0.9", "tau: unknown option; choose from"),
        ("decode --engine max_model_len=long", "max_model_len: must be"),
        ("grammars --tokenizer tests", "tests has no tokenizer"),
        ("serve --requests -1", "--requests: must be a whole number from 1 on, got '-1'"),
        ("serve --url http://host -- --max-num-seqs 1", "give one of them"),
    ],
)
def test_senseless_values_are_refused(command: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(command.split())
    assert end.value.code == 2
    assert expected in capsys.readouterr().err


# ---- a server under load ---------------------------------------------------------------------------------------------


def test_a_load_has_as_many_requests_as_are_asked_for() -> None:
    fields = dict(map(named_value, ("num_branches=3", "window_attention=full")))
    problems = HELD_OUT.read_text(encoding="utf-8").count("\n")
    bodies = make_bodies(problems + 1, 8, fields)
    assert len(bodies) == problems + 1
    assert bodies[0] == bodies[-1]
    assert (bodies[0]["max_tokens"], bodies[0]["num_branches"], bodies[0]["window_attention"]) == (8, 3, "full")


def test_the_figures_of_a_load() -> None:
    answers = [Answer(10, 2, 1, 0.1, 0.5), Answer(30, 6, 3, 0.2, 1.5)]
    assert figures(2, answers, seconds=2.0, cpu={"engines": 0.5}) == {
        "clients": 2, "requests/s": 1.0, "tokens/s": 20.0, "TPF": 5.0,
        "first p50, ms": 100.0, "first p99, ms": 200.0, "answer p50, ms": 500.0, "answer p99, ms": 1500.0, "pieces": 2,
        "CPU, ms": {"engines": 250.0},
    }  # fmt: skip


def answer_of(content: bytes, status: int = 200) -> Answer:
    """What a client takes from a response."""

    async def sent() -> Answer:
        transport = httpx.MockTransport(lambda request: httpx.Response(status, content=content))
        async with httpx.AsyncClient(base_url="http://server", transport=transport) as http:
            return await ask(http, {"stream": True})

    return asyncio.run(sent())


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields, ensure_ascii=False).encode() + b"\n\n"


def test_a_stream_is_counted_by_its_pieces_and_usage() -> None:
    texts = [{"delta": {"role": "assistant"}}, {"delta": {"content": "4\u2028"}}, {"delta": {"content": "2"}}]
    events = b"".join(event(choices=[text]) for text in texts)
    events += event(choices=[], usage={"completion_tokens": 3}, lopa={"num_forwards": 2})
    answer = answer_of(events + b"data: [DONE]\n\n")
    assert (answer.pieces, answer.tokens, answer.forwards) == (2, 3, 2)
    assert 0 < answer.first <= answer.seconds
    with pytest.raises(RuntimeError, match="cut off"):
        answer_of(events)
    with pytest.raises(RuntimeError, match="dead"):
        answer_of(event(error={"message": "dead"}) + b"data: [DONE]\n\n")
    with pytest.raises(RuntimeError, match="status 503: full"):
        answer_of(b"full", 503)


def test_a_server_that_does_not_start_says_why() -> None:
    with (
        mock.patch.object(sys, "executable", "/bin/echo"),
        pytest.raises(RuntimeError, match="did not start:\n-m lopa_ascend.serve .* --no-such-flag"),
        one_server(["--no-such-flag"]),
    ):
        pass


BUSY = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ninput()"


def test_the_seconds_of_a_server_are_those_of_its_processes_by_what_they_do() -> None:
    command = [sys.executable, "-c", BUSY, "lopa_ascend.serve.link.process"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as engine:
        assert engine.stdout.readline()
        whole, alone = used_by(os.getpid()), used_by(engine.pid)
        whole = {process: whole[process] for process in (os.getpid(), engine.pid)}  # servers of other tests may run
        engine.communicate(b"\n")
    assert alone == {engine.pid: whole[engine.pid]}
    ((part, seconds),) = seconds_between({}, alone).items()
    assert part == "engines"
    assert seconds >= 0.25  # /proc counts whole ticks
    assert seconds_between(alone, whole) == {"engines": 0.0, "rest": whole[os.getpid()][1]}


def test_a_fault_of_ours_has_its_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def fail(error: ValueError) -> None:
        def run(_: object) -> int:
            raise error

        monkeypatch.setattr(ranks, "run", run)
        main(["ranks"])

    with pytest.raises(ValueError, match="shapes differ"):
        fail(ValueError("shapes differ"))
    with pytest.raises(SystemExit):
        fail(InputError("choose a larger --tp"))
    assert "ranks: error: choose a larger --tp" in capsys.readouterr().err
