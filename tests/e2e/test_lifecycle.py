"""Two processes through everything that can happen to them: death, hangs, full queues, impatient clients, signals."""

import json
import os
import shlex
import signal
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import ServerProcess, running
from tests.ports import free_ports
from tests.tiers import slow_but

# One token a forward pass, for tens of seconds: what cannot end by itself while a test looks on.
ENDLESS = {"prompt": "x", "max_tokens": 4000, "ignore_eos": True, "tau_conf": 1.0, "tau_add": 1.0, "tau_act": 1.0}
SHORT = {"prompt": "x", "max_tokens": 4}
ROUTE = "/v1/completions"


def until(condition: Callable[[], Any], seconds: float) -> Any:
    """The first true value of what can only be asked for."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.02)
    return value


def exists(pid: int) -> bool:
    """Whether a process runs; zombies do not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def metric(server: ServerProcess, name: str) -> float:
    (line,) = [line for line in server.http.get("/metrics").text.splitlines() if line.startswith(name + "{")]
    return float(line.rpartition(" ")[2])


class Stream:
    """A streamed answer that has begun, read by a thread."""

    def __init__(self, server: ServerProcess, body: dict[str, Any]):
        self._began = threading.Event()
        self._pool = ThreadPoolExecutor(1)
        self._read: Future[tuple[list[str], float]] = self._pool.submit(self._run, server, body)

    def _run(self, server: ServerProcess, body: dict[str, Any]) -> tuple[list[str], float]:
        events = []
        with httpx.stream("POST", server.url + ROUTE, json={**body, "stream": True}, timeout=60) as answer:
            for line in answer.iter_lines():
                if line:
                    events.append(line.removeprefix("data: "))
                    self._began.set()
        return events, time.monotonic()

    def begun(self) -> "Stream":
        assert self._began.wait(60)
        return self

    def end(self) -> tuple[list[str], float]:
        """All events, and when the last one came."""
        return self._read.result(60)


def whole(server: ServerProcess, body: dict[str, Any]) -> tuple[httpx.Response, float]:
    answer = httpx.post(server.url + ROUTE, json=body, timeout=60)
    return answer, time.monotonic()


def health(server: ServerProcess) -> int:
    return httpx.get(server.url + "/health", timeout=5).status_code


def unexpected(stderr: str) -> list[str]:
    """The lines of stderr that are no part of a log: uvicorn's of a start and a stop, ours of an answer."""
    return [line for line in stderr.splitlines() if not line.startswith(("INFO:     ", '{"event": "finished", '))]


def refusal(answer: httpx.Response) -> tuple[int, str]:
    """Status and code of an error."""
    return answer.status_code, answer.json()["error"]["code"]


# ---- the engine dies -------------------------------------------------------------------------------------------------


def test_engine_killed_under_load(model_dir: Path):
    with running("--model", str(model_dir), "--max-num-seqs", "4") as server, ThreadPoolExecutor(3) as pool:
        streams = [Stream(server, ENDLESS).begun() for _ in range(3)]
        # One of them gets the last seat, the others wait.
        answers = [pool.submit(whole, server, ENDLESS) for _ in range(3)]
        until(lambda: metric(server, "vllm:num_requests_waiting") == 2, 20)
        os.kill(server.engine_pid, signal.SIGKILL)
        killed = time.monotonic()
        until(lambda: health(server) == 503, 1)
        for stream in streams:
            events, ended = stream.end()
            assert (json.loads(events[-2])["error"]["code"], events[-1]) == ("engine_dead", "[DONE]")
            assert ended - killed < 2
        for answer, ended in (future.result(60) for future in answers):
            assert refusal(answer) == (503, "engine_dead")
            assert ended - killed < 2
        assert refusal(whole(server, SHORT)[0]) == (503, "engine_dead")
        assert server.http.get("/ready").status_code == 503
        assert "SIGKILL" in server.http.get("/health").json()["error"]["message"]
        assert server.process.wait(timeout=10) == 1
        assert unexpected(server.stderr.all()) == ["ERROR:    the engine process has died (SIGKILL)"]


def test_server_killed_ends_the_engine(model_dir: Path):
    with running("--model", str(model_dir)) as server:
        engine = server.engine_pid
        maps = [Path(f"/proc/{pid}/maps").read_text() for pid in (server.process.pid, engine)]
        assert ["libtorch" in text for text in maps] == [False, True]
        stream = Stream(server, ENDLESS).begun()
        server.process.kill()
        until(lambda: not exists(engine), 2)
        with pytest.raises(httpx.RemoteProtocolError):
            stream.end()


# ---- a small server: two seats, one place in the queue, an impatient watchdog ----------------------------------------


@pytest.fixture(scope="module")
def small(model_dir: Path) -> Iterator[ServerProcess]:
    flags = "--max-num-seqs 2 --max-num-queued-reqs 1 --watchdog-timeout 2"
    with running("--model", str(model_dir), *flags.split()) as server:
        yield server


@contextmanager
def under_way(server: ServerProcess, body: dict[str, Any]) -> Iterator[Iterator[str]]:
    """A stream that has begun; its client goes away at the end."""
    with httpx.stream("POST", server.url + ROUTE, json={**body, "stream": True}, timeout=60) as answer:
        lines = answer.iter_lines()
        next(lines)
        yield lines


def test_disconnect_returns_the_pages(small: ServerProcess):
    until(lambda: metric(small, "lopa:pages_in_use") == 0, 10)
    with under_way(small, ENDLESS) as first:
        alone = until(lambda: metric(small, "lopa:pages_in_use"), 5)
        with under_way(small, ENDLESS):
            both = until(lambda: (used := metric(small, "lopa:pages_in_use")) >= 2 * alone and used, 5)
        # Four branches have a page each at least; the first request may have grown by one meanwhile.
        until(lambda: metric(small, "lopa:pages_in_use") <= both - 3, 2)
        assert metric(small, "vllm:num_requests_running") == 1
        assert next(line for line in first if line).startswith("data: {")
    until(lambda: metric(small, "lopa:pages_in_use") == 0, 2)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(small.url + ROUTE, json=ENDLESS, timeout=httpx.Timeout(60, read=0.5))
    until(lambda: metric(small, "lopa:pages_in_use") == 0, 2)
    assert metric(small, "vllm:num_requests_running") == 0


def test_full_queue(small: ServerProcess):
    with under_way(small, ENDLESS), under_way(small, ENDLESS):
        waiting = Stream(small, SHORT)
        until(lambda: metric(small, "vllm:num_requests_waiting") == 1, 5)
        for answer in (whole(small, SHORT)[0], small.http.get("/ready")):
            assert refusal(answer) == (503, "queue_full")
            assert int(answer.headers["Retry-After"]) >= 1
        assert health(small) == 200
        assert small.http.get("/health_generate").status_code == 200  # the steps of the others are proof enough
    assert waiting.end()[0][-1] == "[DONE]"
    assert small.http.get("/ready").status_code == 200
    assert whole(small, SHORT)[0].status_code == 200
    assert whole(small, {**SHORT, "n": 3})[0].status_code == 200
    answer = whole(small, {**SHORT, "n": 4})[0]
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "n")
    answer = whole(small, {**SHORT, "prompt": ["x"] * 4})[0]
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")


def test_watchdog_sees_an_engine_that_hangs(small: ServerProcess):
    with under_way(small, ENDLESS) as stream:
        os.kill(small.engine_pid, signal.SIGSTOP)
        try:
            until(lambda: health(small) == 503, 5)
            assert "watchdog" in small.http.get("/health").json()["error"]["message"]
            for answer in (whole(small, SHORT)[0], small.http.get("/ready")):
                assert refusal(answer) == (503, "service_unavailable")
        finally:
            os.kill(small.engine_pid, signal.SIGCONT)
        until(lambda: health(small) == 200, 5)
        assert "error" not in next(line for line in stream if line)
    until(lambda: metric(small, "vllm:num_requests_running") == 0, 5)
    os.kill(small.engine_pid, signal.SIGSTOP)
    try:
        until(lambda: health(small) == 503, 5)
    finally:
        os.kill(small.engine_pid, signal.SIGCONT)
    until(lambda: health(small) == 200, 5)
    assert whole(small, SHORT)[0].status_code == 200


def test_engine_killed_while_idle(small: ServerProcess):
    """The last test of this server."""
    os.kill(small.engine_pid, signal.SIGKILL)
    until(lambda: health(small) == 503, 1)
    assert small.process.wait(timeout=10) == 1


# ---- time limits and the end -----------------------------------------------------------------------------------------


@pytest.mark.slow  # test_serve_openai_responses.py has one of another route
def test_request_timeout(model_dir: Path):
    with running("--model", str(model_dir), "--request-timeout", "2.5") as server:
        stream = Stream(server, ENDLESS).begun()
        answer = whole(server, ENDLESS)[0]
        assert refusal(answer) == (504, "timeout")
        events = stream.end()[0]
        assert len(events) > 3
        assert (json.loads(events[-2])["error"]["code"], events[-1]) == ("timeout", "[DONE]")
        until(lambda: metric(server, "lopa:pages_in_use") == 0, 2)
        assert whole(server, {**SHORT, "max_tokens": 1})[0].status_code == 200


def test_no_new_requests_while_running_ones_end(model_dir: Path):
    """They end with all their text, also an answer whose client takes it slowly."""
    # Few forward passes, and more than the buffers of a connection hold.
    size = 500
    body = {**SHORT, "max_tokens": size, "block_size": size, "n": 24, "tau_conf": 0, "ignore_eos": True, "logprobs": 20}
    content = json.dumps(body).encode()
    head = (
        f"POST {ROUTE} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    )
    with running("--model", str(model_dir), "--shutdown-timeout", "60") as server, socket.socket() as client:
        engine = server.engine_pid
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # so that the server cannot be rid of the answer
        client.settimeout(60)
        client.connect(("127.0.0.1", server.http.base_url.port))
        client.sendall(f"{head}\r\n\r\n".encode() + content)
        answer = client.recv(1024)
        with under_way(server, {**ENDLESS, "max_tokens": 200}) as lines:
            server.process.send_signal(signal.SIGTERM)
            until(lambda: health(server) == 503, 2)
            for refused in (whole(server, SHORT)[0], server.http.get("/ready")):
                assert refusal(refused) == (503, "service_unavailable")
                assert "shutting down" in refused.json()["error"]["message"]
            events = [json.loads(line.removeprefix("data: ")) for line in lines if line and not line.endswith("[DONE]")]
        assert events[-1]["choices"][0]["finish_reason"] == "length"
        time.sleep(1)
        while piece := client.recv(2**16):
            answer += piece
        assert server.process.wait(timeout=10) == 0
        assert not exists(engine)
    fields, _, text = answer.partition(b"\r\n\r\n")
    assert len(text) > 3 * 2**20
    assert f"content-length: {len(text)}".encode() in fields.lower()
    assert len(json.loads(text)["choices"]) == 24


def test_second_interrupt_leaves_at_once(model_dir: Path):
    with running("--model", str(model_dir), "--shutdown-timeout", "60") as server:
        engine = server.engine_pid
        with under_way(server, ENDLESS):
            server.process.send_signal(signal.SIGINT)
            until(lambda: health(server) == 503, 2)
            status, stderr = server.stop(signal.SIGINT)
        assert (status, exists(engine)) == (0, False)
        assert unexpected(stderr) == []


def test_shutdown_of_an_engine_that_hangs(model_dir: Path):
    with running("--model", str(model_dir)) as server:
        engine = server.engine_pid
        os.kill(engine, signal.SIGSTOP)
        status, stderr = server.stop(signal.SIGTERM)
        assert (status, exists(engine), unexpected(stderr)) == (0, False, [])


# ---- the start -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "line"),
    slow_but(
        [
            ("--model {missing}", "{missing}"),
            ("--model {model} --chat-template {missing}", "{missing}"),
            ("--model {model} --ssl-certfile {missing} --ssl-keyfile {missing}", "{missing}"),
            (
                "--model {model} --eos-token-id 5000",
                "the default of eos_token_id: 5000 is not below the vocabulary size",
            ),
            ("--model {model} --kv-cache-memory 1024TiB", "kv_cache_memory: 1024.0 TiB"),
        ],
        [
            ("--model {model} --kv-cache-memory 1024TiB", "kv_cache_memory: 1024.0 TiB"),
        ],
    ),
)
def test_what_cannot_be_served_is_one_line(flags: str, line: str, tmp_path: Path, model_dir: Path):
    names = {"missing": tmp_path / "nothing", "model": model_dir}
    with running(*flags.format(**names).split(), wait=False) as server:
        assert server.process.wait(timeout=60) == 1
        stderr = server.stderr.all()
    assert stderr.startswith("error: ")
    assert stderr.count("\n") == 1
    assert line.format(**names) in stderr


def test_signal_while_it_loads_leaves_nothing_behind(model_dir: Path, tmp_path: Path):
    """Nor does SIGKILL: the next start removes the folder, and a stopped engine process ends with its server."""
    arguments: dict[str, Any] = {"wait": False, "env": {"TMPDIR": str(tmp_path)}}
    with running("--model", str(model_dir), **arguments) as server:
        (engine,) = until(lambda: any(tmp_path.glob("lopa-*/*")) and server.engines, 60)
        until(lambda: "torch" in Path(f"/proc/{engine}/maps").read_text(), 60)
        os.kill(engine, signal.SIGSTOP)
        server.process.kill()
        until(lambda: not exists(engine), 2)
        (left,) = tmp_path.iterdir()
    with running("--model", str(model_dir), **arguments) as server:
        (engine,) = until(lambda: any(tmp_path.glob("lopa-*/*")) and not left.exists() and server.engines, 60)
        left.mkdir()  # as an engine process leaves one, which is killed at every stop
        assert server.stop(signal.SIGTERM) == (0, "")
        until(lambda: not exists(engine), 2)
        assert list(tmp_path.iterdir()) == []


def test_signal_while_the_chat_template_takes_long(model_dir: Path, tmp_path: Path):
    template = tmp_path / "template.jinja"
    template.write_text("{{ 1.5 | round(10 ** 9, 'ceil') }}")
    with running("--model", str(model_dir), "--chat-template", str(template), wait=False) as server:
        children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children")
        until(lambda: children.read_text().split(), 60)
        began = time.monotonic()
        assert server.stop(signal.SIGTERM) == (0, "")
        assert time.monotonic() - began < 2


def test_an_engine_process_that_is_stopped_while_it_loads_is_given_up(model_dir: Path):
    with running("--model", str(model_dir), "--distributed-timeout-seconds", "2", wait=False) as server:
        (engine,) = until(lambda: server.engines, 60)
        os.kill(engine, signal.SIGSTOP)
        assert server.process.wait(timeout=60) == 1
        assert server.stderr.all() == "error: rank 0 was stopped, by SIGSTOP or a debugger, for 2 s while it started\n"


def test_a_server_whose_output_cannot_be_written_goes_on(model_dir: Path):
    port = free_ports(1)
    without_output = ("sh", "-c", 'exec "$@" <&- >/dev/full 2>&-', "sh")
    with running("--model", str(model_dir), "--port", str(port), wait=False, prefix=without_output) as server:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
            until(lambda: listens(port) or server.process.poll() is not None, 60)
            assert http.post(ROUTE, json=SHORT).status_code == 200
            assert http.get("/nothing").status_code == 404
        null = Path(os.devnull)
        assert [Path(f"/proc/{server.process.pid}/fd/{number}").readlink() for number in (0, 2)] == [null, null]
        assert server.stop(signal.SIGTERM)[0] == 0


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_a_unix_socket_is_the_servers_alone_and_goes_with_it(model_dir: Path, tmp_path: Path):
    path = tmp_path / "lopa.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    flags = ("--model", str(model_dir), "--uds", str(path))
    with running(*flags, "--api-key", "secret", prefix=("sh", "-c", 'umask 077 && exec "$@"', "sh")) as server:
        assert (server.url, path.stat().st_mode & 0o777) == (str(path), 0o700)
        assert server.http.get("/v1/models").status_code == 401
        command = shlex.split(server.greeting.splitlines()[-1].replace("$LOPA_API_KEY", "secret"))
        answer = subprocess.run([*command, "--silent"], capture_output=True, check=True, text=True).stdout
        assert "choices" in json.loads(answer)
        with running(*flags, wait=False) as other:
            assert other.process.wait(timeout=60) == 1
            assert other.stderr.all() == f"error: --uds {path}: Address already in use\n"
        assert server.stop(signal.SIGTERM)[0] == 0
    assert not path.exists()
    path.write_text("kept")
    with running(*flags, wait=False) as server:
        assert server.process.wait(timeout=60) == 1
    assert path.read_text() == "kept"
    path.unlink()
    with running(*flags, wait=False) as server:
        until(path.exists, 60)
        assert server.stop(signal.SIGTERM)[0] == 0
    assert not path.exists()


def test_tls_and_a_chat_template_of_ones_own(model_dir: Path, tmp_path: Path):
    template, key, certificate = (tmp_path / name for name in ("template.jinja", "key.pem", "certificate.pem"))
    template.write_text("{% for message in messages %}<{{ message.content }}>{% endfor %}")
    command = (
        "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
    )
    subprocess.run([*command.split(), "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True)
    flags = ["--ssl-certfile", str(certificate), "--ssl-keyfile", str(key), "--chat-template", str(template)]
    with running("--model", str(model_dir), *flags) as server:
        assert server.url.startswith("https://")
        trusting = ssl.create_default_context(cafile=str(certificate))
        body = {"messages": [{"role": "user", "content": "hi"}]}
        with httpx.Client(base_url=server.url, verify=trusting, timeout=60) as http:
            chat = http.post("/tokenize", json=body).json()["tokens"]
            assert chat == http.post("/tokenize", json={"prompt": "<hi>"}).json()["tokens"]
        plain = socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=10)
        with plain:
            plain.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert not plain.recv(100).startswith(b"HTTP/1.1 200")
