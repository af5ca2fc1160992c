"""Clients that do not finish the head of a request."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
import uvicorn
from starlette.requests import Request
from starlette.responses import PlainTextResponse

from lopa_ascend.serve import http_connection
from lopa_ascend.serve.http_connection import HttpConnection

TIMEOUT = 0.3
LARGE = 32 * 2**20
"""More than the buffers of a connection hold."""
HEAD = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n"

Client = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@pytest.fixture(autouse=True)
def _short_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_connection, "HEAD_TIMEOUT", TIMEOUT)
    monkeypatch.setattr(http_connection, "STALL_TIMEOUT", TIMEOUT)


def against_a_server(client: Client) -> None:
    """Connects the client to a server that answers a request with its body, /early without reading the body, and
    /large with ``LARGE`` bytes."""

    async def echo(scope, receive, send):
        body = b"early" if scope["path"] == "/early" else await Request(scope, receive).body()
        answer = b"." * LARGE if scope["path"] == "/large" else body
        await PlainTextResponse(answer)(scope, receive, send)

    async def run() -> None:
        config = uvicorn.Config(echo, port=0, lifespan="off", http=HttpConnection, log_level="error")
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        reader, writer = await asyncio.open_connection(*server.servers[0].sockets[0].getsockname())
        try:
            await asyncio.wait_for(client(reader, writer), 10)
        finally:
            writer.close()
            server.should_exit = True
            await serving

    asyncio.run(run())


@pytest.mark.parametrize(("sent", "answer"), [(b"", b""), (b"POST / HT", b"HTTP/1.1 408"), (HEAD, b"HTTP/1.1 408")])
def test_a_head_that_is_not_finished_ends_the_connection(sent: bytes, answer: bytes):
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        start = asyncio.get_running_loop().time()
        writer.write(sent)
        assert (await reader.read())[: len(answer) or None] == answer
        assert asyncio.get_running_loop().time() - start >= 0.9 * TIMEOUT

    against_a_server(client)


def test_a_head_that_trickles_in_ends_the_connection():
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reading = asyncio.create_task(reader.read())
        for byte in HEAD:
            writer.write(bytes([byte]))
            await asyncio.sleep(TIMEOUT / 5)
            if reading.done():
                break
        assert reading.result().startswith(b"HTTP/1.1 408")

    against_a_server(client)


def test_a_body_that_goes_on_after_its_answer_has_a_limit():
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"POST /early HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n")
        await reader.readuntil(b"\r\n\r\nearly")
        start = asyncio.get_running_loop().time()
        writer.write(b"a")
        await asyncio.sleep(TIMEOUT / 2)
        writer.write(b"b")
        assert await reader.read() == b""
        assert 0.9 * TIMEOUT <= asyncio.get_running_loop().time() - start < 10 * TIMEOUT

    against_a_server(client)


def test_a_malformed_rest_of_a_body_after_its_answer_ends_the_connection(caplog: pytest.LogCaptureFixture):
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"POST /early HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n")
        await reader.readuntil(b"early")
        writer.write(b"no chunk\r\n")
        assert await reader.read() in (b"", b"\r\n0\r\n\r\n")

    against_a_server(client)
    assert not [record for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")]


def test_a_connection_goes_on_after_an_early_answer_and_the_rest_of_its_body():
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"POST /early HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n")
        await reader.readuntil(b"\r\n\r\nearly")
        writer.write(b"a")
        await asyncio.sleep(TIMEOUT / 2)
        writer.write(b"b")
        await asyncio.sleep(TIMEOUT / 2)
        writer.write(HEAD + b"\r\ncd")
        assert (await reader.readuntil(b"\r\n\r\ncd")).startswith(b"HTTP/1.1 200")

    against_a_server(client)


@pytest.mark.parametrize("stops", [True, False])
def test_a_client_that_stops_reading_is_left_and_a_slow_one_is_not(stops: bool):
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        if stops:
            await asyncio.sleep(3 * TIMEOUT)
        num_read = 0
        try:
            while num_read < LARGE and (piece := await reader.read(2**20)):
                num_read += len(piece)
                await asyncio.sleep(TIMEOUT / 50)
        except ConnectionError:
            pass
        assert (num_read < LARGE) == stops

    against_a_server(client)


def test_the_second_head_has_a_limit_too_and_bodies_have_none_here():
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + b"\r\na")
        await asyncio.sleep(2 * TIMEOUT)
        writer.write(b"b")
        assert (await reader.readuntil(b"\r\n\r\nab")).startswith(b"HTTP/1.1 200")
        await asyncio.sleep(2 * TIMEOUT)  # an idle connection is kept longer
        writer.write(HEAD + b"\r\ncd")
        assert (await reader.readuntil(b"\r\n\r\ncd")).startswith(b"HTTP/1.1 200")
        writer.write(HEAD)
        assert (await reader.read()).startswith(b"HTTP/1.1 408")

    against_a_server(client)
