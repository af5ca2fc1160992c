"""The judges themselves: they must notice faults."""

import asyncio
import json
import random
from pathlib import Path

import httpx
import pytest
from hypothesis import given

from lopa_ascend.serve.api.completions import CompletionRequest
from lopa_ascend.serve.http.api_error import ApiError
from lopa_ascend.serve.http.body import read_body
from tests.judges import clients, faults, fuzz, soak
from tests.judges.attack import CLOSED, CUT_OFF, FULL, KINDS, LEFT, Attack, head, outcome_of, play
from tests.judges.client import COMPLETIONS, Answer, Ask, ask, chat
from tests.judges.hostile_bodies import UNSUPPORTED
from tests.judges.hostile_costs import COSTLY
from tests.judges.probe import Quiet, Sample
from tests.judges.report import Options, Report


async def answered(reply: bytes, *attacks: Attack, words: bool = False) -> list[int | str]:
    """What the attacks make of a server that answers everything with ``reply``; with ``words`` errors are in words."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(reply)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        if words:
            return [await outcome_of(f"http://127.0.0.1:{port}", attack) for attack in attacks]
        return [await play("127.0.0.1", port, attack) for attack in attacks]


def test_outcomes_of_attacks():
    body = json.dumps({"error": {"message": "no"}}).encode()
    refusal = b"HTTP/1.1 400 Bad Request\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    asked, lingering = Attack([head(COMPLETIONS, 0)], http=True), Attack([b"POST"], linger=0.0)
    assert asyncio.run(answered(refusal, asked, lingering)) == [400, LEFT]
    assert asyncio.run(answered(b"HTTP/1.1 500 Oh\r\nContent-Length: 0\r\n\r\n", Attack([b"x"]))) == [500]
    for cut in (b"", refusal[:30], refusal[:-1]):
        assert asyncio.run(answered(cut, asked)) == [CUT_OFF]
    assert asyncio.run(answered(b"", Attack([b"x"]))) == [CLOSED]


def test_an_answer_of_another_form_is_an_outcome_in_words():
    asked = Attack([head(COMPLETIONS, 0)], http=True)
    for reply, error in (
        (b"hello\r\n\r\n", "IndexError: "),
        (b"HTTP/1.1 oh\r\n\r\n", "ValueError: "),
        (b"HTTP/1.1 400 Bad Request\r\nX: " + b"a" * 2**20, "LimitOverrunError: "),
    ):
        (outcome,) = asyncio.run(answered(reply, asked, words=True))
        assert str(outcome).startswith(error)


def test_only_refusals_and_ends_are_right():
    hostile = faults.HostileOutcomes()
    for outcome in (400, 413, 499, LEFT, CLOSED, FULL):
        hostile.count("fine", 0, outcome)
    assert not hostile.wrong
    wrong = (200, 500, 503, CUT_OFF, "TimeoutError: ")
    for outcome in wrong:
        hostile.count(f"kind {outcome}", 7, outcome)
    assert hostile.wrong == {f"kind {outcome}": f"request 7: {outcome}" for outcome in wrong}


def test_every_kind_takes_part_and_is_reproducible():
    assert len(KINDS) >= 20
    assert set(faults._plan(1, 10)) == set(KINDS)
    assert len(faults._plan(1, 5000)) == 5000
    for name, (make, _) in KINDS.items():
        for seed in range(2 if name in COSTLY else 8):
            first, second = make(random.Random(seed)), make(random.Random(seed))
            assert list(first.chunks) == list(second.chunks)


def test_memory_growth_ignores_the_warm_up():
    seen = soak.Soak(memory=[soak.Memory(s, 100 if s < 100 else 200 + s // 100, 300) for s in range(500)])
    assert soak.warm_up_seconds(20) == 300
    assert 0.01 < seen.growth("http", warm_up=110) < 0.02
    assert seen.growth("http", warm_up=0) > 1
    assert seen.growth("engine", warm_up=0) == 0


def test_changed_answers_are_found():
    seen, request = soak.Soak(), chat("How many?", max_tokens=4)
    soak._compare(seen, request, "5")
    soak._compare(seen, chat("How many?", max_tokens=4, stream=True), "5")
    soak._compare(seen, chat("How many?", max_tokens=5), "6")
    assert not seen.faults
    soak._compare(seen, request, "6")
    assert len(seen.faults) == 1


def test_a_report_keeps_what_has_failed(capsys):
    report = Report()
    report.check("one", True, 1)
    report.check("two", False, 2)
    assert report.failed == ["two"]
    assert "FAILED  two: 2" in capsys.readouterr().out


def answer_of(request: Ask, body: bytes, status: int = 200, leave_after: int | None = None) -> Answer:
    async def run() -> Answer:
        transport = httpx.MockTransport(lambda _: httpx.Response(status, content=body))
        async with httpx.AsyncClient(transport=transport, base_url="http://judge") as client:
            return await ask(client, request, leave_after)

    return asyncio.run(run())


def test_answers_are_read():
    def event(**delta: object) -> bytes:
        return (
            b"data: "
            + json.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}).encode()
            + b"\n\n"
        )

    streamed = chat("?", stream=True)
    whole = answer_of(
        streamed, event(role="assistant", content="") + event(content="4") + event(content="2") + b"data: [DONE]\n\n"
    )
    assert whole.ok
    assert whole.texts == {0: "42"}
    assert not answer_of(streamed, event(content="4")).ok
    left = answer_of(streamed, event(content="4") + event(content="2") + event(content="!"), leave_after=2)
    assert (left.texts, left.done) == ({0: "42"}, False)
    failed = answer_of(streamed, event(content="4") + b'data: {"error": {"message": "dead"}}\n\ndata: [DONE]\n\n')
    assert (failed.ok, failed.error) == (False, {"message": "dead"})
    refused = answer_of(chat("?"), b'{"error": {"message": "full", "code": "queue_full"}}', 503)
    assert (refused.ok, refused.status) == (False, 503)
    assert refused.error == {"message": "full", "code": "queue_full"}
    plain = answer_of(chat("?"), b"Internal Server Error", 500)
    assert (plain.ok, plain.error) == (False, {"message": "not a JSON object: b'Internal Server Error'"})


def test_probes_that_are_slow_or_differ_are_faults():
    quiet = Quiet({"version": {"200 v"}, "completion": {"200 text"}}, {"version": 0.01, "completion": 0.2})
    assert (quiet.allowed("version"), quiet.allowed("completion")) == (1.1, 3.0)
    fine = [Sample("version", 1.0, 1.05, "200 v"), Sample("completion", 2.0, 2.9, "200 text")]
    assert quiet.faults(fine) == []
    for sample in (
        Sample("version", 1.0, 1.2, "200 v"),
        Sample("completion", 1.0, 3.1, "200 text"),
        Sample("completion", 1.0, 0.1, "200 other"),
    ):
        assert len(quiet.faults([*fine, sample])) == 1


def test_a_full_queue_is_no_fault_if_it_says_when_to_come_again():
    body = json.dumps({"error": {"message": "no", "code": "queue_full"}}).encode()
    asked = Attack([head(COMPLETIONS, 0)], http=True)
    for more, outcome in ((b"Retry-After: 1\r\n", FULL), (b"", 503)):
        answer = b"HTTP/1.1 503 No\r\n%sContent-Length: %d\r\n\r\n" % (more, len(body)) + body
        assert asyncio.run(answered(answer, asked)) == [outcome]


@given(fuzz.examples())
def test_what_is_fuzzed_is_limited_and_can_be_sent(example: fuzz.Example):
    assert example.work() <= fuzz.MAX_WORK
    assert 1 <= example.copies <= 6
    assert example.route in fuzz.BODIES


def test_fuzz_finds_and_shrinks_a_wrong_answer(monkeypatch: pytest.MonkeyPatch):
    async def send(url: str, example: fuzz.Example, body: bytes) -> list[str]:
        return ["500 internal_error" if example.route == "/tokenize" and "prompt" in example.fields else "200"]

    monkeypatch.setattr(fuzz, "_send", send)
    outcomes = fuzz.Outcomes()
    fault = fuzz._fuzz("http://nowhere", Options(out=Path(), fuzz_seconds=20.0), outcomes)
    assert fault is not None
    assert fault.startswith("500 internal_error for Example(route='/tokenize', fields={'prompt': ")
    assert fault.count(":") < 8
    assert outcomes.statuses["200"] > 0


@pytest.mark.parametrize(
    ("case", "answers", "error", "content"),
    [
        ("chat", ["42", "37"], None, True),
        ("chat", ["42", "5"], None, False),
        ("chat", ["42"], None, False),
        ("chat", ["42"], "400: unknown field", False),
        ("responses, stored", ["42"], "400: this server keeps no responses, set store: false", True),
        ("responses, stored", ["42"], "400: unknown field", False),
        ("responses, stored", ["42", "5"], None, False),
    ],
)
def test_what_a_client_must_get(case: str, answers: list[str], error: str | None, content: bool):
    assert clients.as_expected(case, {"answers": answers, "error": error}, ["42", "37"]) == content


@pytest.mark.parametrize("field", UNSUPPORTED)
def test_features_that_attacks_call_unsupported_are_refused(field: str):
    with pytest.raises(ApiError):
        read_body(CompletionRequest, json.dumps({"prompt": "hi", field: UNSUPPORTED[field]}).encode())
