"""Clients that mean no good: whatever they send, their neighbours wait no second longer, and nothing grows."""

import json
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path

import pytest

from lopa_ascend.serve.http import connections
from tests.e2e.conftest import ServerProcess, running
from tests.e2e.serving import refused
from tests.tiers import slow_but

MAX_DELAY = 1.0
"""Most seconds by which a neighbour may be delayed."""
BUSY_MACHINE = 5
"""How many times as long as in a quiet second a neighbour may wait besides: tests run beside others."""
KEY = "correct horse"
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
GET = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"


def address(server: ServerProcess) -> tuple[str, int]:
    host, port = server.url.partition("://")[2].split(":")
    return host, int(port)


def connect(server: ServerProcess, timeout: float = 30) -> socket.socket:
    return socket.create_connection(address(server), timeout=timeout)


def read_all(connection: socket.socket) -> bytes:
    try:
        return b"".join(iter(lambda: connection.recv(65536), b""))
    except ConnectionResetError:
        return b""


def memory(server: ServerProcess) -> int:
    """Bytes that the process that speaks HTTP holds."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return 1024 * int(status.partition("VmRSS:")[2].split()[0])


class Neighbour:
    """A client that asks for the version all the time."""

    def __init__(self, server: ServerProcess):
        self.slowest = 0.0
        self._connection, self._is_over = HTTPConnection(*address(server), timeout=60), threading.Event()
        self._thread = threading.Thread(target=self._ask_all_the_time)
        self._thread.start()

    def _ask_all_the_time(self) -> None:
        while not self._is_over.wait(0.02):
            start = time.monotonic()
            self._connection.request("GET", "/version")
            assert self._connection.getresponse().read().startswith(b'{"version"')
            self.slowest = max(self.slowest, time.monotonic() - start)

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join()
        self._connection.close()


@contextmanager
def neighbour(server: ServerProcess) -> Iterator[None]:
    """A context in which a neighbour must not wait."""
    other = Neighbour(server)
    time.sleep(1)
    quiet, other.slowest = other.slowest, 0.0
    try:
        yield
        time.sleep(0.1)
    finally:
        other.stop()
    assert 0 < other.slowest < MAX_DELAY + BUSY_MACHINE * quiet


BODIES: dict[str, bytes] = {
    "combining characters": json.dumps(
        {"prompt": "x", "bad_words": ["a" + "\u0300" * 30_000 + "\u0316" * 30_000]}
    ).encode(),
    "ids that hash alike": json.dumps(
        {"prompt": "x", "stop_token_ids": [k * (2**61 - 1) for k in range(1, 22_000)]}
    ).encode(),
    "long numbers": b'{"prompt": "x", "seed": [[' + b"1e308," * 170_000 + b"1]]}",
    "lists": b'{"prompt": [' + b"[]," * 340_000 + b"[]]}",
    "names": b'{"prompt": "x", ' + b",".join(b'"%d":0' % number for number in range(90_000)) + b"}",
    "nested lists": b'{"prompt": ' + b"[" * 10**6,
    "nested objects": b'{"a":' * 200_000,
    "messages": b'{"messages": [' + b'{"role":"user"},' * 60_000 + b"{}]}",
    "a text": json.dumps({"prompt": "Tom has 3 boxes. " * 60_000}).encode(),
}


@pytest.mark.parametrize("name", BODIES)
def test_no_body_makes_a_neighbour_wait(server: ServerProcess, name: str):
    assert len(BODIES[name]) <= 2**20
    with neighbour(server):
        for _ in range(3):
            start = time.monotonic()
            route = "/v1/chat/completions" if name == "messages" else "/v1/completions"
            answer = server.http.post(route, content=BODIES[name], headers={"Content-Type": "application/json"})
            assert refused(answer)["message"]
            assert time.monotonic() - start < 5


def in_chunks(body: bytes) -> bytes:
    return b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"


@pytest.mark.parametrize("key", slow_but([None, KEY], [KEY]))
def test_bodies_that_come_byte_by_byte_in_chunks(model_dir: Path, key: str | None):
    data = in_chunks(json.dumps({"prompt": "x" * 300_000}).encode())

    def send(server: ServerProcess, answers: list[bytes]) -> None:
        with closing(connect(server)) as connection:
            try:
                connection.sendall(HEAD + CHUNKED + data)
            except (ConnectionResetError, BrokenPipeError):
                pass  # refused early
            answers.append(connection.recv(65536) if key is None else read_all(connection))

    with running("--model", str(model_dir), *(() if key is None else ("--api-key", key))) as server:
        answers: list[bytes] = []
        with neighbour(server):
            threads = [threading.Thread(target=send, args=(server, answers)) for _ in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    status = b"HTTP/1.1 400 " if key is None else b"HTTP/1.1 401 "
    assert len(answers) == 8
    assert {answer[:13] for answer in answers} <= {status, b""}


def test_a_small_body_in_chunks_of_a_byte_is_answered(server: ServerProcess):
    body = in_chunks(json.dumps({"prompt": "x", "max_tokens": 2}).encode())
    with closing(connect(server)) as connection:
        for place in range(0, len(body), 7):
            connection.sendall((HEAD + CHUNKED if place == 0 else b"") + body[place : place + 7])
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")


WHOLE = b"e\r\n" + b'{"prompt": ""}' + b"\r\n0\r\n"
"""A body in one chunk, before its trailers."""


@pytest.mark.parametrize(("start", "part"), [(WHOLE, b"a: b\r\n"), (WHOLE, b"x"), (b"1;", b"x")])
def test_what_frames_a_body_is_limited(server: ServerProcess, start: bytes, part: bytes):
    """Trailers, one trailer without end, and what extends a chunk."""
    before = memory(server)
    with closing(connect(server)) as connection, neighbour(server):
        connection.sendall(HEAD + CHUNKED + start)
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            connection.sendall(part * (100_000_000 // len(part)))
    assert memory(server) - before < 16 * 2**20


def send_chunks_until_refused(connection: socket.socket) -> int:
    """Sends a body without end, and returns how many bytes of it the server took."""
    connection.sendall(HEAD + CHUNKED)
    for number in range(1000):
        try:
            connection.sendall(b"100000\r\n" + b"x" * 2**20 + b"\r\n")
        except (ConnectionResetError, BrokenPipeError):
            return number * 2**20
    raise AssertionError("the server took all of it")


def test_bodies_hold_no_more_memory_than_their_connections_allow(server: ServerProcess):
    before = memory(server)
    body = b'{"prompt": "' + b"x" * (2**20 - 100)
    open_connections = [connect(server) for _ in range(50)]
    for connection in open_connections:
        connection.sendall(HEAD + b"Content-Length: 1000000\r\n\r\n" + body[:900_000])
    time.sleep(1)
    assert memory(server) - before < 4 * 50 * 2**20
    for connection in open_connections:
        connection.close()
    with closing(connect(server)) as connection, neighbour(server):
        assert 8 * 2**20 <= send_chunks_until_refused(connection) < 100 * 2**20
    assert memory(server) - before < 4 * 50 * 2**20


def test_many_idle_connections_are_closed(model_dir: Path):
    """With 256 files 64 are answered, and 128 are open at most; those that send no request are closed, too."""
    with running("--model", str(model_dir), prefix=("sh", "-c", 'ulimit -n 256; exec "$@"', "sh")) as server:
        idle = [connect(server) for _ in range(100)]
        with closing(connect(server)) as connection:
            connection.sendall(GET)
            assert connection.recv(65536).startswith(b"HTTP/1.1 503 ")
        idle += [connect(server) for _ in range(300)]
        time.sleep(1)
        start = time.monotonic()
        for connection in idle:
            connection.settimeout(connections.HEAD_TIMEOUT + 5)
            assert read_all(connection) == b""
            connection.close()
        assert time.monotonic() - start < connections.HEAD_TIMEOUT + 5
        with neighbour(server):
            for _ in range(20):
                with closing(connect(server)) as connection:
                    connection.sendall(b"\x16\x03\x01 junk\r\n\r\n")
                    assert read_all(connection).startswith(b"HTTP/1.1 400 ")
        _, log = server.stop(15)
    assert len(log) < 20_000
    assert log.count("Too many connections.") == 1
    assert log.count("Invalid HTTP request received.") == 1
    assert "Traceback" not in log


def test_handshakes_have_a_time_limit(model_dir: Path, tmp_path: Path):
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
    subprocess.run([*command, "-out", certificate, "-keyout", key], check=True, capture_output=True)
    arguments = ("--model", str(model_dir), "--ssl-certfile", str(certificate), "--ssl-keyfile", str(key))
    with running(*arguments) as server:
        with closing(connect(server)) as connection:
            start = time.monotonic()
            assert read_all(connection) == b""
            assert 8 < time.monotonic() - start < 15
        context = ssl.create_default_context(cafile=str(certificate))
        context.check_hostname = False
        with context.wrap_socket(connect(server)) as secure:
            secure.sendall(GET)
            assert secure.recv(100).startswith(b"HTTP/1.1 200 ")
