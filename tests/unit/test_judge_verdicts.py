"""The judges end with a verdict, whatever a server does: it hangs, breaks off, has another form, or is not there."""

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from tests.judges import __main__ as command
from tests.judges import faults, fuzz, kill, probe, signals, soak, starve, tools
from tests.judges.client import CHAT, COMPLETIONS
from tests.judges.fuzz import Example
from tests.judges.probe import Probe, Quiet, Sample
from tests.judges.report import Options, Report
from tests.judges.server import Server

RESPONSES = "/v1/responses"


# ---- probes that are never answered ----------------------------------------------------------------------------------


class Hanging(Probe):
    """Probes that were answered until now, and never will be again."""

    def quiet(self, seconds: float) -> Quiet:
        return Quiet({"version": {"200 v"}, "completion": {"200 text"}}, {"version": 0.001, "completion": 0.001})


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Hanging:
    """The probes of a server that the judges ``starve`` and ``fuzz`` test, and that hangs."""
    monkeypatch.setattr(probe, "ALLOWED", 0.05)
    seen = Hanging()
    server = SimpleNamespace(
        url="http://127.0.0.1:9", process=None, health=lambda: 200, await_no_pages=lambda: 0, tracebacks=lambda: 0
    )
    for judge in (starve, fuzz):
        monkeypatch.setattr(judge, "serving", lambda *_: contextlib.nullcontext(server))
        monkeypatch.setattr(judge, "probing", lambda _: contextlib.nullcontext(seen))
    return seen


def answer_probes(seen: Probe) -> None:
    """Adds a quick answer to each probe."""
    now = time.monotonic()
    seen.samples += [Sample("version", now, 0.0, "200 v"), Sample("completion", now, 0.0, "200 text")]


def test_starve_fails_a_server_that_hangs_after_an_attack(
    hanging: Hanging, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    async def attack(*_: object) -> Counter[int | str]:
        answer_probes(hanging)
        return Counter({400: 4})

    monkeypatch.setattr(starve, "_attack", attack)
    monkeypatch.setattr(starve, "COSTLY", {"one_long_stop_string": 4})
    report = Report()
    starve.judge(Options(out=tmp_path), report)
    (failed,) = report.failed
    assert failed.startswith("4 x one_long_stop_string")


def test_fuzz_fails_a_server_that_hangs_at_the_end(hanging: Hanging, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(fuzz, "_fuzz", lambda *_: answer_probes(hanging))
    report = Report()
    fuzz.judge(Options(out=tmp_path), report)
    assert report.failed == ["2 probes beside them are quick and as ever"]


def test_probes_that_are_answered_again_are_waited_for():
    seen, quiet = (
        Probe(),
        Quiet({"version": {"200 v"}, "completion": {"200 text"}}, {"version": 0.0, "completion": 0.0}),
    )
    start = time.monotonic()

    async def answer_later() -> list[str]:
        asking = asyncio.create_task(asyncio.to_thread(seen.faults, start, quiet))
        await asyncio.sleep(0.2)
        answer_probes(seen)
        return await asking

    assert asyncio.run(answer_later()) == []
    assert [len(seen.since(start, name)) for name in probe.NAMES] == [1, 1]


def test_only_one_good_answer_each_is_a_steady_server():
    def is_steady(*versions: str) -> bool:
        return Quiet({"version": set(versions), "completion": {"200 text"}}, {}).is_steady

    assert is_steady("200 v")
    assert not is_steady("200 v", "200 w")
    assert not is_steady("ReadTimeout: timed out")


# ---- wrong answers to fuzz -------------------------------------------------------------------------------------------


@pytest.fixture
def status_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[Example, int, bytes], str]:
    """What fuzz makes of an answer, given as status and body, to an example."""

    def send(example: Example, status: int, body: bytes) -> str:
        transport = httpx.MockTransport(lambda _: httpx.Response(status, content=body))
        client = httpx.AsyncClient(transport=transport, base_url="http://judge")
        monkeypatch.setattr(fuzz, "connect", lambda *_: client)
        (found,) = asyncio.run(fuzz._send("http://judge", example, b"{}"))
        return found

    return send


@pytest.mark.parametrize(
    ("route", "stream", "status", "body"),
    [
        (COMPLETIONS, False, 500, b"Internal Server Error"),
        (COMPLETIONS, False, 400, b"Bad Request"),
        (COMPLETIONS, False, 400, b'{"error": "no"}'),
        (COMPLETIONS, False, 400, b'{"error": {"message": "", "code": "x"}}'),
        (COMPLETIONS, False, 200, b'{"error": {"message": "dead"}}'),
        (COMPLETIONS, False, 200, b'{"choices": ['),
        (COMPLETIONS, True, 200, b'data: {"error": {"message": "dead"}}\n\ndata: [DONE]\n\n'),
        (COMPLETIONS, True, 200, b'data: {"choices": []}\n\n'),
        (COMPLETIONS, True, 200, b"data: {\n\ndata: [DONE]\n\n"),
        (COMPLETIONS, True, 200, b""),
        (RESPONSES, True, 200, b'event: response.created\ndata: {"type": "response.created"}\n\n'),
        (RESPONSES, True, 200, b'data: {"type": "error", "message": "dead"}\n\ndata: {"type": "response.failed"}\n\n'),
    ],
)
def test_wrong_answers_are_not_taken_for_answers(status_of, route: str, stream: bool, status: int, body: bytes):
    found = status_of(Example(route, {"stream": stream}, 1), status, body)
    assert found.startswith(f"wrong answer with status {status}: ")


@pytest.mark.parametrize(
    ("route", "stream", "status", "body", "expected"),
    [
        (CHAT, False, 200, b'{"choices": []}', "200"),
        (RESPONSES, False, 200, b'{"error": null, "status": "completed"}', "200"),
        (CHAT, True, 200, b'data: {"choices": []}\n\ndata: [DONE]\n\n', "200"),
        (RESPONSES, True, 200, b'event: response.incomplete\ndata: {"type": "response.incomplete"}\n\n', "200"),
        (CHAT, True, 503, b'{"error": {"message": "full", "code": "queue_full"}}', "503 queue_full"),
    ],
)
def test_answers_and_refusals_are_taken(status_of, route: str, stream: bool, status: int, body: bytes, expected: str):
    assert status_of(Example(route, {"stream": stream}, 1), status, body) == expected


def fuzzed(monkeypatch: pytest.MonkeyPatch, send: Callable[[Example], Awaitable[list[str]]]) -> str | None:
    """The fault that fuzz finds in five seconds if ``send`` answers its examples."""
    monkeypatch.setattr(fuzz, "_send", lambda url, example, body: send(example))
    return fuzz._fuzz("http://nowhere", Options(out=Path(), fuzz_seconds=5.0), fuzz.Outcomes())


def test_a_fault_counts_if_time_runs_out_while_it_is_simplified(monkeypatch: pytest.MonkeyPatch):
    now = 0.0

    async def send(example: Example) -> list[str]:
        nonlocal now
        now = 6.0
        return ["500 internal_error"]

    monkeypatch.setattr(fuzz, "time", SimpleNamespace(monotonic=lambda: now))
    fault = fuzzed(monkeypatch, send)
    assert fault is not None
    assert fault.startswith("500 internal_error for Example(")
    assert "sent again" not in fault


def test_a_fault_counts_if_it_does_not_come_again(monkeypatch: pytest.MonkeyPatch):
    answers = iter(["500 internal_error"])

    async def send(example: Example) -> list[str]:
        return [next(answers, "200")]

    fault = fuzzed(monkeypatch, send)
    assert fault is not None
    assert fault.startswith("500 internal_error for Example(")
    assert fault.endswith("; not when it was sent again")


# ---- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., int]]:
    """Runs the command with arguments; returns its exit status."""
    handler = signal.getsignal(signal.SIGTERM)

    def run_command(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["judge", *arguments, "--out", str(tmp_path)])
        with pytest.raises(SystemExit) as ended:
            command.main()
        assert isinstance(ended.value.code, int)
        return ended.value.code

    yield run_command
    signal.signal(signal.SIGTERM, handler)


def test_an_exception_is_a_verdict_and_the_other_judges_run(run, monkeypatch: pytest.MonkeyPatch, capsys):
    def broken(options: Options, report: Report) -> None:
        report.check("one", False, 1)
        raise httpx.ConnectError("nobody there")

    monkeypatch.setattr(faults, "judge", broken)
    monkeypatch.setattr(starve, "judge", lambda options, report: tools.require("no_such_tool"))
    monkeypatch.setattr(soak, "judge", lambda options, report: report.check("two", True, 2))
    assert run("faults", "starve", "soak") == 1
    said = capsys.readouterr().out
    assert "FAILED  runs to its end without ConnectError: nobody there" in said
    assert "FAILED  runs to its end without ModuleNotFoundError: no_such_tool is not installed" in said
    assert "ok      two: 2" in said
    assert said.splitlines()[-4:] == [
        "FAILED",
        "faults: one",
        "faults: runs to its end without ConnectError",
        "starve: runs to its end without ModuleNotFoundError",
    ]


@pytest.mark.parametrize(("flag", "value"), [("--problems", "0"), ("--minutes", "nan")])
def test_senseless_values_are_refused(run, flag: str, value: str, capsys):
    assert run("accuracy", flag, value) == 2
    assert f"argument {flag}: must be a" in capsys.readouterr().err


def test_judges_that_end_a_server_are_refused_for_a_running_one(run, monkeypatch: pytest.MonkeyPatch, capsys):
    names: list[str] = []

    def find(name: str) -> SimpleNamespace:
        return SimpleNamespace(judge=lambda options, report: names.append(name.rpartition(".")[2]))

    monkeypatch.setattr(command, "importlib", SimpleNamespace(import_module=find))
    for name in ("kill", "ranks", "soak"):
        assert run("faults", name, "--url", "http://127.0.0.1:9") == 2
        assert f"{name} needs the processes of a server that it starts; leave --url out" in capsys.readouterr().err
    assert names == []
    assert run("--url", "http://127.0.0.1:9") == 0
    assert names == ["schema", "accuracy", "clients", "load", "faults", "starve", "fuzz"]
    assert "left out, because they need the processes of a server that they start: kill, ranks, structured, soak" in (
        capsys.readouterr().out
    )
    names.clear()
    assert run() == 0
    assert names == list(command.JUDGES)


# ---- signals under load ----------------------------------------------------------------------------------------------


async def signalled(running: int, chat: bytes | None) -> signals.Outcome:
    """What comes of a signal to a server on which no load builds up.

    Args:
        running: requests that its metrics say are running.
        chat: the answer to each chat request; None if there is none.
    """
    metrics = b"vllm:num_requests_running %d\nvllm:num_requests_waiting 0\n" % running
    metrics += b"vllm:diffusion_num_committed_tokens_total 99\n"

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        body = metrics if head.startswith(b"GET /metrics") else chat
        if body is None:
            await asyncio.sleep(60)
            return
        writer.write(b"HTTP/1.1 500 Oh\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        writer.close()

    with subprocess.Popen(["sleep", "60"], text=True) as process:
        try:
            server = await asyncio.start_server(serve, "127.0.0.1", 0)
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            outcome = await signals.signal_under_load(Server(url, process), process.pid, signal.SIGKILL, 2)
            assert process.poll() is None
            return outcome
        finally:
            server.close()
            process.kill()


def test_no_signal_if_a_client_is_answered_too_early():
    error = json.dumps({"error": {"message": "no"}}).encode()
    (fault,) = asyncio.run(signalled(0, error)).faults()
    assert fault == "a client did not have to wait: status 500: {'message': 'no'}"


def test_no_signal_if_the_load_does_not_come(monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setattr(signals, "GIVE_UP", 0.5)
    # So that the client does not give up first.
    monkeypatch.setattr(signals, "connect", lambda url, _: httpx.AsyncClient(base_url=url, timeout=60))
    outcome, report = asyncio.run(signalled(1, None)), Report()
    outcome.report("SIGKILL", report)
    assert report.failed == ["SIGKILL"]
    assert "2 requests were not under way after 0.5 s: {'vllm:num_requests_running': 1.0," in capsys.readouterr().out


def test_kill_reports_a_load_that_does_not_come(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    async def no_load(*_: object) -> signals.Outcome:
        return signals.Outcome(no_load="a client did not have to wait")

    server = SimpleNamespace(engine_pid=1)
    monkeypatch.setattr(kill, "serving", lambda *_: contextlib.nullcontext(server))
    monkeypatch.setattr(kill, "signal_under_load", no_load)
    report = Report()
    kill.judge(Options(out=tmp_path), report)
    assert report.failed == ["SIGKILL, 48 clients", "SIGKILL, 0 clients"]
