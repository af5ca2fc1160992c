"""Clients that do not finish the head of a request, or do not read the answer."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import cast

import pytest
import uvicorn
from starlette.requests import Request
from starlette.responses import PlainTextResponse, StreamingResponse

from lopa_ascend.serve.http import connections
from lopa_ascend.serve.http.connections import Connection, RareWarnings

TIMEOUT = 0.3
LARGE = 32 * 2**20
"""More than the buffers of a connection hold."""
PIECE = 2**16
"""Bytes of an answer that the server sends at once."""
HEAD = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n"

Client = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@pytest.fixture(autouse=True)
def _short_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_TIMEOUT", TIMEOUT)
    monkeypatch.setattr(connections, "STALL_TIMEOUT", TIMEOUT)


def against_a_server(client: Client) -> None:
    """Connects the client to a server that answers a request with its body, /early without reading the body, and
    /large with ``LARGE`` bytes."""

    async def echo(scope, receive, send):
        body = b"early" if scope["path"] == "/early" else await Request(scope, receive).body()
        large = StreamingResponse(b"." * PIECE for _ in range(LARGE // PIECE))
        await (large if scope["path"] == "/large" else PlainTextResponse(body))(scope, receive, send)

    async def run() -> None:
        config = uvicorn.Config(echo, port=0, lifespan="off", http=Connection, log_level="error")
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        address = server.servers[0].sockets[0].getsockname()
        reader, writer = await asyncio.open_connection(*address, limit=2**12)
        try:
            await asyncio.wait_for(client(reader, writer), 10)
        finally:
            writer.close()
            server.should_exit = True
            await serving

    asyncio.run(run())


async def read_to_the_end(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read()
    except ConnectionResetError:
        return b""


@pytest.mark.parametrize("sent", [b"", b"\r\n", b"POST / HT", HEAD])
def test_a_head_that_is_not_finished_ends_the_connection(sent: bytes):
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        start = asyncio.get_running_loop().time()
        writer.write(sent)
        assert await read_to_the_end(reader) == b""
        assert asyncio.get_running_loop().time() - start >= 0.9 * TIMEOUT

    against_a_server(client)


def test_a_head_that_trickles_in_ends_the_connection():
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reading = asyncio.create_task(read_to_the_end(reader))
        for byte in HEAD:
            writer.write(bytes([byte]))
            await asyncio.sleep(TIMEOUT / 5)
            if reading.done():
                break
        assert reading.result() == b""

    against_a_server(client)


def head_of(size: int, *, in_url: bool) -> bytes:
    """A head of so many bytes, in its address or in its fields."""
    start, end = b"GET /", b" HTTP/1.1\r\nHost: x\r\n\r\n"
    rest = size - len(start + end)
    if in_url:
        return start + b"a" * rest + end
    fields = b"".join(b"X-%05d: %s\r\n" % (n, b"a" * 989) for n in range(rest // 1000))
    return start + end[:-2] + fields + b"X-%s: \r\n" % (b"a" * (rest - len(fields) - 6)) + b"\r\n"


@pytest.mark.parametrize("in_url", [False, True])
@pytest.mark.parametrize("pieces", [1, 3])
def test_a_head_above_the_limit_is_refused_however_it_comes(in_url: bool, pieces: int):
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(head_of(2**16 - 100, in_url=in_url))
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        head = head_of(70_000, in_url=in_url)
        for start in range(0, len(head), -(-len(head) // pieces)):
            writer.write(head[start : start + -(-len(head) // pieces)])
            await asyncio.sleep(TIMEOUT / 10)
        said = await read_to_the_end(reader)
        assert said.startswith(b"HTTP/1.1 431 Request Header Fields Too Large")
        assert b"head of the request is too long" in said

    against_a_server(client)


def test_a_body_that_goes_on_after_its_answer_has_a_limit():
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"POST /early HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n")
        await reader.readuntil(b"\r\n\r\nearly")
        start = asyncio.get_running_loop().time()
        writer.write(b"a")
        await asyncio.sleep(TIMEOUT / 2)
        writer.write(b"b")
        assert await read_to_the_end(reader) == b""
        assert 0.9 * TIMEOUT <= asyncio.get_running_loop().time() - start < 10 * TIMEOUT

    against_a_server(client)


def test_a_malformed_rest_of_a_body_after_its_answer_ends_the_connection(caplog: pytest.LogCaptureFixture):
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"POST /early HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n")
        await reader.readuntil(b"early")
        writer.write(b"no chunk\r\n")
        assert await read_to_the_end(reader) == b""

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


def test_a_client_that_leaves_a_small_part_unread_is_left(monkeypatch: pytest.MonkeyPatch):
    made: list[Connection] = []

    def connection_made(connection: Connection, transport: asyncio.Transport) -> None:
        make(connection, transport)
        made.append(connection)

    make = Connection.connection_made
    monkeypatch.setattr(Connection, "connection_made", connection_made)

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        cast(asyncio.Transport, writer.transport).pause_reading()
        while not (waiting := made[0].transport.get_write_buffer_size()):
            writer.write(HEAD.replace(b"2", b"16384") + b"\r\n" + b"." * 2**14)
            await asyncio.sleep(0.002)
        assert waiting < 2**16
        await asyncio.sleep(3 * TIMEOUT)
        assert made[0].transport.is_closing()

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
        assert await read_to_the_end(reader) == b""

    against_a_server(client)


def test_a_head_without_end_ends_the_connection():
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n")
        for _ in range(200):
            writer.write(b"X: " + b"x" * 1000 + b"\r\n")
            await asyncio.sleep(0.001)
            if reader.at_eof() or reader.exception() is not None:
                return
        assert (await reader.readline()).startswith(b"HTTP/1.1 400 ")

    against_a_server(client)


@pytest.mark.parametrize("method", [b"GET", b"POST"])
def test_a_client_that_would_rather_speak_http_2_is_answered(method: bytes):
    """Java's client asks so in its first request."""

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upgrade = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA\r\n"
        for _ in range(2):
            writer.write(method + b" / HTTP/1.1\r\nHost: x\r\n" + upgrade + b"Content-Length: 2\r\n\r\nab")
            assert (await reader.readuntil(b"\r\n\r\nab")).startswith(b"HTTP/1.1 200 ")

    against_a_server(client)


def test_the_rest_of_a_body_is_no_request():
    """So nothing is taken out of it: a proxy would count its bytes."""

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"POST /early HTTP/1.1\r\nHost: x\r\nContent-Length: 40\r\n\r\n")
        await reader.readuntil(b"\r\n\r\nearly")
        writer.write(b"GET / HTTP/1.1\r\nUpgrade: x\r\n\r\n".ljust(40))
        await asyncio.sleep(TIMEOUT / 5)
        writer.write(HEAD + b"\r\ncd")
        assert (await reader.readuntil(b"\r\n\r\ncd")).startswith(b"HTTP/1.1 200")

    against_a_server(client)


def test_the_same_warning_is_logged_once_a_minute(monkeypatch: pytest.MonkeyPatch):
    now = [0.0]
    monkeypatch.setattr("lopa_ascend.serve.http.connections.time.monotonic", lambda: now[0])
    rare = RareWarnings()

    def is_logged(text: str, level: int = logging.WARNING) -> bool:
        return bool(rare.filter(logging.LogRecord("x", level, "", 0, text, (), None)))

    assert [is_logged("a"), is_logged("a"), is_logged("b"), is_logged("a", logging.INFO)] == [True, False, True, True]
    no_file = "socket.accept() out of system resource\nsocket: <socket fd="
    assert [is_logged(f"{no_file}{number}", logging.ERROR) for number in range(3)] == [True, False, False]
    now[0] = 60.0
    assert is_logged("a")
