"""Reading bodies, keys and ids, and times, each without a server."""

import asyncio
import json
import logging
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse

from lopa_ascend import core
from lopa_ascend.config import DecodingParams
from lopa_ascend.process.thread_turns import aside
from lopa_ascend.serve.cli import parse_args
from lopa_ascend.serve.config import ServeConfig
from lopa_ascend.serve.endpoint import Frames
from lopa_ascend.serve.http import body
from lopa_ascend.serve.http.access import Access, allow_origins, hosts_of
from lopa_ascend.serve.http.api_error import ApiError
from lopa_ascend.serve.http.body import THREADS, Intake
from lopa_ascend.serve.link.generation import MAX_UNREAD, Generation
from lopa_ascend.serve.observe.greeting import _blocks_line, _graphs_line, _recommended_lines, _sampling_line
from lopa_ascend.serve.observe.metrics import Timeline, summary
from lopa_ascend.serve.server import bind, listen
from lopa_ascend.types import GenerationOutput, Progress, TokenRun, Update

JSON_TYPE = (b"content-type", b"application/json")


def scope(path: str = "/v1/models", *headers: tuple[bytes, bytes], root_path: str = "") -> dict[str, Any]:
    return {
        "type": "http",
        "method": "POST",
        "path": root_path + path,
        "root_path": root_path,
        "headers": list(headers),
    }


async def take(receive: Any, *headers: tuple[bytes, bytes], limit: int = 10) -> bytes:
    taking = Intake(limit)
    try:
        return await taking.take(Request(scope("/", JSON_TYPE, *headers), receive), bytes)
    finally:
        await taking.close()


def test_bodies_that_wait_for_a_process_let_others_go_on():
    ended = threading.Event()

    def wait(_: bytes) -> None:
        with aside():
            assert ended.wait(60)

    async def run() -> bytes:
        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b"{}", "more_body": False}

        request = Request(scope("/", JSON_TYPE), receive)
        intake = Intake(10)
        waiting = [asyncio.create_task(intake.take(Request(request.scope, receive), wait)) for _ in range(3 * THREADS)]
        await asyncio.sleep(0)
        answer = await intake.take(request, bytes)
        assert not any(task.done() for task in waiting)
        ended.set()
        await asyncio.gather(*waiting)
        await intake.close()
        return answer

    assert asyncio.run(run()) == b"{}"


async def read(pieces: list[bytes], *headers: tuple[bytes, bytes], limit: int = 10, hang: bool = False) -> bytes:
    async def receive() -> dict[str, Any]:
        if pieces:
            return {"type": "http.request", "body": pieces.pop(0), "more_body": True}
        if hang:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": b"", "more_body": False}

    return await take(receive, *headers, limit=limit)


def status(*arguments: Any, **keywords: Any) -> tuple[int, dict[str, str]]:
    with pytest.raises(ApiError) as error:
        asyncio.run(read(*arguments, **keywords))
    assert error.value.code == {413: "request_too_large", 408: "body_timeout"}[error.value.status]
    return error.value.status, error.value.headers


def test_body_sizes():
    assert asyncio.run(read([b"12345", b"67890"])) == b"1234567890"
    close = {"Connection": "close"}
    assert status([b"12345", b"678901"]) == (413, {})
    pieces = [b"1" * 10] * 20
    assert status(pieces) == (413, close)
    assert len(pieces) == 11, "it was read further than is worth while"
    assert status([b"1" * 10] * 8) == (413, {}), "the client looks for the answer once it has sent everything"
    untouched = [b"1"]
    assert status(untouched, (b"content-length", b"1000")) == (413, close)
    assert untouched


def test_clients_that_stop_sending(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(body, "BODY_TIMEOUT", 0.05)
    assert status([b"{"], hang=True) == (408, {"Connection": "close"})


def test_a_body_that_trickles_in_is_given_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(body, "BODY_TIMEOUT", 0.2)

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(0.02)
        return {"type": "http.request", "body": b"1", "more_body": True}

    with pytest.raises(ApiError, match="did not arrive within 0.2 s") as error:
        asyncio.run(take(receive, limit=1000))
    assert error.value.status == 408


def test_client_that_leaves():
    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    with pytest.raises(ClientDisconnect):
        asyncio.run(take(receive))


async def answer(app: Any, request: dict[str, Any]) -> tuple[int, dict[bytes, bytes], bytes]:
    messages: list[Any] = []

    async def send(message: Any) -> None:
        messages.append(message)

    async def receive() -> Any:
        raise AssertionError("nobody reads the body")

    await app(request, receive, send)
    return messages[0]["status"], dict(messages[0]["headers"]), messages[1]["body"]


def test_keys_and_ids():
    app = Access(PlainTextResponse("fine"), "key")
    assert asyncio.run(answer(app, scope()))[0] == 401
    assert asyncio.run(answer(app, scope("/v1/models", (b"authorization", b"Bearer \xff"))))[0] == 401
    request = scope("/v1/models", (b"authorization", b"Bearer key"), (b"x-request-id", b"mine"))
    code, headers, _ = asyncio.run(answer(app, request))
    assert (code, headers[b"x-request-id"]) == (200, b"mine")
    assert asyncio.run(answer(app, scope("/v1/models", (b"authorization", b"bearer  key"))))[0] == 200
    own, wrong = (b"x-api-key", b"key"), (b"authorization", b"Bearer other")
    for found, expected in (((own,), 200), ((own, wrong), 200), (((b"x-api-key", b"other"), wrong), 401)):
        assert asyncio.run(answer(app, scope("/v1/models", *found)))[0] == expected
    for key in ("voilà", "…\x85", "Å\xa0"):
        for header in ((b"authorization", b"Bearer \t" + key.encode() + b" "), (b"x-api-key", key.encode())):
            assert asyncio.run(answer(Access(PlainTextResponse("fine"), key), scope("/v1/models", header)))[0] == 200
    for path in ("/health", "/ready", "/version"):
        assert asyncio.run(answer(app, scope(path)))[0] == 200
        assert asyncio.run(answer(app, scope(path, root_path="/api")))[0] == 200
    for path in ("//health", "/health/", "//health//"):
        assert asyncio.run(answer(app, scope(path)))[0] == 200
    assert asyncio.run(answer(app, scope("/health/../v1/models")))[0] == 401
    assert asyncio.run(answer(app, scope("//v1//models/")))[0] == 401
    assert asyncio.run(answer(Access(PlainTextResponse("fine"), None), scope()))[0] == 200


PAGE = (b"origin", b"http://elsewhere.example")
TEXT_OF_A_PAGE = (b"content-type", b"text/plain; charset=application/json")
JSON = (b"content-type", b"application/json; charset=utf-8")


@pytest.mark.parametrize("route", ["/start_profile", "/stop_profile", "/abort_request", "/v1/infill", "/new"])
def test_what_a_browser_sends_without_asking_changes_nothing(route: str):
    app = Access(PlainTextResponse("fine"), None)
    for status, headers in ((400, (PAGE,)), (400, (PAGE, TEXT_OF_A_PAGE)), (200, (PAGE, JSON)), (200, ())):
        code, _, body = asyncio.run(answer(app, {**scope(route, *headers), "method": "POST"}))
        assert code == status
        assert (b"invalid_content_type" in body) == (status == 400)
    assert asyncio.run(answer(app, {**scope(route, PAGE), "method": "GET"}))[0] == 200


def test_no_answer_is_shown_in_a_frame_of_another_page():
    own = PlainTextResponse("fine", headers={"Content-Security-Policy": "default-src 'none'"})
    for app, path in ((PlainTextResponse("fine"), "/docs"), (PlainTextResponse("fine"), "/refused"), (own, "/")):
        key = "key" if path == "/refused" else None
        policy = asyncio.run(answer(Access(app, key), scope(path)))[1][b"content-security-policy"]
        assert policy == (b"default-src 'none'" if app is own else b"frame-ancestors 'none'")


@pytest.mark.parametrize("root", ["", "/api"])
def test_slashes_too_many_change_no_route(root: str):
    async def show(scope: Any, receive: Any, send: Any) -> None:
        await PlainTextResponse(scope["path"])(scope, receive, send)

    def seen(path: str) -> bytes:
        return asyncio.run(answer(Access(show, None), scope(path, root_path=root)))[2]

    for path in ("/v1/completions", "/v1/completions/", "//v1///completions//"):
        assert seen(path) == f"{root}/v1/completions".encode()
    for path in ("/", "//", ""):
        assert seen(path) == f"{root}/".encode()


def test_a_refusal_ends_the_connection_unless_the_body_is_short():
    app = Access(PlainTextResponse("fine"), "key")
    chunked = (b"transfer-encoding", b"chunked")
    for headers, ends in (
        ([], False),
        ([(b"content-length", b"100")], False),
        ([(b"content-length", b"100000")], True),
    ):
        assert (b"connection" in asyncio.run(answer(app, scope("/x", *headers)))[1]) == ends
    assert asyncio.run(answer(app, scope("/x", chunked)))[1][b"connection"] == b"close"


def test_a_server_for_this_machine_answers_its_own_names_alone():
    def called(name: str, address: str = "127.0.0.1", **flags: Any) -> int:
        config = ServeConfig(**flags)
        app = Access(PlainTextResponse("fine"), config.api_key, hosts_of(config, address))
        headers = [(b"host", name.encode()), (b"authorization", b"Bearer key")]
        return asyncio.run(answer(app, scope("/v1/models", *headers)))[0]

    for name in ("127.0.0.1:8000", "localhost", "LOCALHOST:1", "[::1]:8000"):
        assert called(name) == 200
    assert called("evil.example:8000") == called("127.0.0.1.evil.example") == 403
    assert called("page.example", allowed_origins=("https://page.example:444",)) == 200
    assert called("[2001:db8::1]:8443", allowed_origins=("http://[2001:db8::1]:8443",)) == 200
    for flags in ({"allowed_origins": ("*",)}, {"api_key": "key"}, {"address": "0.0.0.0"}, {"address": "192.0.2.1"}):
        assert called("evil.example", **flags) == 200
    assert called("[0:0:0:0:0:0:0:1]:80", "::1", host="0:0:0:0:0:0:0:1") == 200
    for address in ("::1", "::ffff:127.0.0.1"):
        assert called("evil.example", address) == 403


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_an_event_does_not_wait_until_the_client_has_acknowledged_the_one_before(host: str):
    async def connected(listener: socket.socket) -> int:
        accepted: asyncio.Future[asyncio.StreamWriter] = asyncio.get_running_loop().create_future()
        server = await asyncio.start_server(lambda _, writer: accepted.set_result(writer), sock=listener)
        async with server:
            _, writer = await asyncio.open_connection(*listener.getsockname()[:2])
            (await accepted).close()
            writer.close()
            return accepted.result().get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

    with bind(ServeConfig(host=host, port=0)) as listener:
        assert asyncio.run(connected(listener))


@pytest.mark.parametrize("host", ["127.0.0.2", "127.1", "LOCALHOST"])
def test_any_form_of_a_loopback_address_is_for_this_machine_alone(host: str):
    with bind(ServeConfig(host=host, port=0)) as listener:
        address = listener.getsockname()[0]
    hosts = hosts_of(ServeConfig(host=host), address)
    assert hosts is not None
    assert {host.lower(), address, "localhost"} <= hosts
    assert "evil.example" not in hosts


def test_an_address_that_cannot_be_used_is_named():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(OSError, match=f"--host 127.0.0.1 --port {port}: Address already in use"):
            bind(ServeConfig(port=port))
    with pytest.raises(OSError, match="--host nowhere.invalid --port 80: "):
        bind(ServeConfig(host="nowhere.invalid", port=80))


def test_of_two_servers_that_start_at_one_address_the_later_one_is_refused():
    """Until one of them listens, the address is free for both."""
    with bind(ServeConfig(port=0)) as one:
        config = ServeConfig(port=one.getsockname()[1])
        with bind(config) as other:
            listen(one, config)
            with pytest.raises(OSError, match=f"--host 127.0.0.1 --port {config.port}: Address already in use"):
                listen(other, config)


def test_of_two_servers_that_start_at_one_path_the_earlier_one_is_refused(tmp_path: Path):
    config = ServeConfig(uds=str(tmp_path / "socket"))
    with bind(config) as earlier:
        later = bind(config)
        with pytest.raises(OSError, match=f"--uds {config.uds}: another server has taken the path"):
            listen(earlier, config)
    listen(later, config)
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(config.uds))
    later.close()
    assert not any(tmp_path.iterdir())


def test_our_own_failures_are_answered_and_logged(caplog: pytest.LogCaptureFixture):
    async def broken(*_: Any) -> None:
        raise KeyError("x")

    with caplog.at_level(logging.ERROR):
        code, headers, text = asyncio.run(answer(Access(broken, None), scope()))
    assert (code, json.loads(text)["error"]["code"]) == (500, "internal_error")
    assert headers[b"x-request-id"].decode() in caplog.text
    assert "KeyError" in caplog.text


def step(number: int, tokens: int, output: GenerationOutput | None = None) -> tuple[Update, Progress]:
    update = Update("r-0", TokenRun(), number, 40, 50 * number, 0, 2, canvas_positions=49 * number)
    return update, Progress(TokenRun((7,) * tokens, (0.5,) * tokens), "", output)


def test_times_of_a_request():
    choices = [Timeline(5, arrived=10.0), Timeline(5, arrived=10.0)]
    first = choices[0]
    output = GenerationOutput((1,), TokenRun((7,) * 4), "", "length", None, 3, 40, 150)
    for now, (update, progress) in ((12.0, step(1, 0)), (13.0, step(2, 3)), (15.0, step(3, 4, output))):
        first.advance(now, 0.5, update, progress)
    assert (first.begun, first.prefilled, first.first_token, first.ended) == (11.5, 12.0, 13.0, 15.0)
    assert (first.gaps, first.num_forwards, first.canvas_positions) == ([2.0], 3, 147)
    numbers = summary(choices, 16.0, "error")
    assert (numbers["ttft_s"], numbers["latency_s"], numbers["finish_reason"]) == (3.0, 6.0, "error,length")
    assert (numbers["prompt_tokens"], numbers["completion_tokens"], numbers["tpf"]) == (10, 4, 1.333)
    assert summary([Timeline(5, 0.0)], 1.0, "abort")["finish_reason"] == "abort"


def test_a_request_that_is_aborted_while_it_waits_has_not_begun():
    choices = [Timeline(5, arrived=10.0)]
    choices[0].advance(12.0, 0.5, *step(0, 0, GenerationOutput((1,), TokenRun(), "", "abort", None, 0, 0, 0)))
    assert (choices[0].begun, choices[0].prefilled) == (None, None)
    assert summary(choices, 12.0, "abort")["finish_reason"] == "abort"


@pytest.mark.parametrize("trace", [False, True])
def test_a_slow_reader_of_a_trace_ends_its_stream_and_other_updates_are_merged(trace: bool):
    taken_out: list[Generation] = []
    generation = Generation("r", [core.Request("", (1,), DecodingParams())], trace, taken_out.append)

    async def read() -> list[object]:
        for number in range(MAX_UNREAD + 1):
            assert not taken_out
            update = Update("r-0", TokenRun((number,), (0.5,)), number, number, number, 0, 0)
            generation.post(0, update, Progress(TokenRun((number,)), ""))
        seen: list[object] = []
        try:
            async for _, update, _ in generation.updates():
                seen.append(len(update.token_ids))
                if not trace:
                    break
        except ApiError as error:
            seen.append(error.code)
        return seen

    assert asyncio.run(read()) == ([1] * MAX_UNREAD + ["slow_reader"] if trace else [MAX_UNREAD + 1])
    assert taken_out == ([generation] if trace else [])


def test_the_greeting_says_which_sampling_defaults_are_not_used(tmp_path):
    config = parse_args(["--model", str(tmp_path), "--temperature", "0.2"])
    assert _sampling_line(config, DecodingParams(**config.decoding)) == ""
    (tmp_path / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.2, "top_p": 0.9}')
    assert "not used: top_p 0.9 of generation_config" in _sampling_line(config, DecodingParams(**config.decoding))
    assert "not used: do_sample True, temperature 0.2, top_p" in _sampling_line(config, DecodingParams())


def test_the_greeting_doubts_blocks_of_a_model_that_nobody_says_was_trained_for_them(tmp_path):
    def line(*argv: str) -> str:
        config = parse_args(list(argv))
        return _blocks_line(config, DecodingParams(**config.decoding))

    model = ["--model", str(tmp_path)]
    assert "no --lora-path" in line(*model)
    assert "no --lora-path" in line(*model, "--decoding", "d2f")
    for whole_canvas in (["--decoding", "parallel"], ["--base", "parallel"], ["--decoding", "vanilla"]):
        assert line(*model, *whole_canvas) == ""
    assert line(*model, "--lora-path", str(tmp_path)) == ""
    assert line() == ""  # the bundled model recommends how it is decoded
    (tmp_path / "generation_config.json").write_text('{"lopa_ascend": {"block_size": 16}}')
    assert line(*model) == ""


def test_the_greeting_says_who_recommends_the_decoding(tmp_path):
    def lines(*argv: str) -> list[str]:
        return _recommended_lines(parse_args(["--model", str(tmp_path), *argv])).splitlines()

    assert lines() == []
    (tmp_path / "config.json").write_text('{"model_type": "sdar"}')
    (tmp_path / "generation_config.json").write_text('{"lopa_ascend": {"tau_conf": 0.9}}')
    assert lines() == [
        "          decoding, tau_add, block_size: as generate.py of SDAR and config.json recommend",
        "          tau_conf: as generation_config.json recommends",
    ]
    assert lines("--block-size", "8", "--tau-conf", "0.8") == [
        "          decoding, tau_add: as generate.py of SDAR and config.json recommend"
    ]


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ([], ""),
        (["--decoding", "d2f"], ""),
        (["--decoding", "vanilla"], "decoding vanilla"),
        (["--base", "parallel"], "base parallel"),
        (["--temperature", "0.7"], "temperature 0.7"),
        (["--acceptance", "factor"], "acceptance factor"),
        (["--num-branches", "auto"], "num_branches auto"),
        (["--num-branches", "auto", "--branch-acceptance", "exact"], ""),
        (["--branch-acceptance", "exact", "--tau-add", "0"], "tau_add 0"),
        (["--branch-acceptance", "exact", "--lookahead-depth", "2"], "lookahead_depth 2"),
    ],
)
def test_the_greeting_names_a_default_that_no_graph_can_decode(flags: list[str], reason: str):
    config = parse_args(["--graph-mode", "inductor", *flags])
    line = _graphs_line(config.engine, DecodingParams(**config.decoding))
    assert reason in line
    assert bool(line) == bool(reason)
    eager = parse_args(["--graph-mode", "eager", *flags])
    assert _graphs_line(eager.engine, DecodingParams(**eager.decoding)) == ""


def test_comments_wait_for_a_client_that_reads_slowly_and_can_be_switched_off():
    sent: list[bytes] = []

    async def stream() -> None:
        may_go_on = asyncio.Event()

        async def send(message: Any) -> None:
            sent.append(message["body"])
            await may_go_on.wait()

        frames = Frames(send, b": comment")
        await asyncio.wait_for(frames.keep_alive(0), 5)
        comments = asyncio.create_task(frames.keep_alive(0.01))
        first = asyncio.create_task(frames.send(b"data: 1"))
        await asyncio.sleep(0.1)
        assert sent == [b"data: 1"]
        may_go_on.set()
        await first
        while len(sent) < 4:
            await asyncio.sleep(0.01)
        comments.cancel()

    asyncio.run(stream())
    assert set(sent[1:]) == {b": comment"}


def test_a_star_lets_web_pages_of_all_origins_read_answers():
    def allowed(origin: str, *allowed_origins: str) -> str | None:
        app = FastAPI()
        allow_origins(app, allowed_origins)
        return TestClient(app).get("/", headers={"Origin": origin}).headers.get("access-control-allow-origin")

    assert allowed("https://example.org", "*") == allowed("http://localhost:3000", "*") == "*"
    assert allowed("https://example.org") is None
    assert allowed("http://localhost:3000") == "http://localhost:3000"
