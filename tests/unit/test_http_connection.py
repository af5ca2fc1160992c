"""Clients that do not finish the head of a request."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import cast

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
        address = server.servers[0].sockets[0].getsockname()
        reader, writer = await asyncio.open_connection(*address, limit=2**12)
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


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> list[HttpConnection]:
    """The server's connections, whose buffers in the kernel are as large as the kernel allows."""
    made: list[HttpConnection] = []

    def connection_made(connection: HttpConnection, transport: asyncio.Transport) -> None:
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**22)
        make(connection, transport)
        made.append(connection)

    make = HttpConnection.connection_made
    monkeypatch.setattr(HttpConnection, "connection_made", connection_made)
    return made


def test_a_client_that_reads_less_than_the_kernel_waits_for_is_a_slow_one(connections: list[HttpConnection]):
    """The kernel takes more of an answer only once a third of its own buffer is free."""

    async def client(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**13)
            slow.setblocking(False)
            await loop.sock_connect(slow, writer.get_extra_info("peername"))
            await loop.sock_sendall(slow, b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n")
            await asyncio.sleep(TIMEOUT / 3)  # all buffers are full
            for _step in range(40):
                await asyncio.sleep(TIMEOUT / 10)
                assert await loop.sock_recv(slow, 2**11)
            assert not connections[1].transport.is_closing()

    against_a_server(client)


def test_a_client_that_leaves_a_small_part_unread_is_left(connections: list[HttpConnection]):
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        cast(asyncio.Transport, writer.transport).pause_reading()
        while not (waiting := connections[0].transport.get_write_buffer_size()):
            writer.write(HEAD.replace(b"2", b"16384") + b"\r\n" + b"." * 2**14)
            await asyncio.sleep(0.002)
        assert waiting < 2**16
        await asyncio.sleep(3 * TIMEOUT)
        assert connections[0].transport.is_closing()

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
