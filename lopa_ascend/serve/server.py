"""The HTTP process: starts the engine process, serves requests, and ends both processes."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import socket
import ssl
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from lopa_ascend.config.files import check_regular, read_text
from lopa_ascend.demo import DEMO_MODEL
from lopa_ascend.serve.api.request import check_defaults
from lopa_ascend.serve.app import create_app
from lopa_ascend.serve.config import ServeConfig
from lopa_ascend.serve.flags import option
from lopa_ascend.serve.http.connections import Connection, RareWarnings, connection_limit
from lopa_ascend.serve.link.client import EngineClient
from lopa_ascend.serve.link.spawn import EngineFailed, EngineProcess
from lopa_ascend.serve.observe.greeting import make_greeting
from lopa_ascend.text.template import check_template
from lopa_ascend.text.tokenizer_files import load_template

LAST_EVENTS_TIME = 1.0
"""Seconds that clients have to read their last events after their requests were ended."""
SWITCH_INTERVAL = 0.001
"""Seconds after which a thread that parses a large body lets the event loop run."""
HANDSHAKE_TIMEOUT = 10.0
"""Most seconds until a client has begun a connection with TLS."""
SHUTDOWN_TIME = 3.0
"""Seconds after which a shutdown stops waiting, e.g. for a thread that tokenizes a very long prompt."""
DEAD_ENGINE_TIME = 3.0
"""Seconds during which /health still answers 503 after the engine has died, for load balancers."""


class Interrupts:
    """SIGINT and SIGTERM as events of the running event loop."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        """A SIGINT has come after the first signal: the user does not want to wait."""
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: signal.Signals) -> None:
        if self.first.is_set() and number == signal.SIGINT:
            self.second.set()
        self.first.set()


class Server(uvicorn.Server):
    """Serves until a signal comes or the engine dies; then running requests have ``shutdown_timeout`` seconds to end.
    Prints ``greeting`` once requests are accepted."""

    def __init__(
        self,
        settings: uvicorn.Config,
        client: EngineClient,
        interrupts: Interrupts,
        shutdown_timeout: float,
        greeting: str,
    ):
        super().__init__(settings)
        self._client, self._interrupts = client, interrupts
        self._shutdown_timeout, self._greeting = shutdown_timeout, greeting
        self._watchers: list[asyncio.Task[None]] = []

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves the signals to ``Interrupts``; uvicorn's handlers would raise them again after the shutdown."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        if self.config.ssl is not None:
            loop = asyncio.get_running_loop()  # uvicorn passes no time limit on, and asyncio's own is a minute
            loop.create_server = partial(loop.create_server, ssl_handshake_timeout=HANDSHAKE_TIMEOUT)  # type: ignore[method-assign]
        await super().startup(sockets)
        sys.stdout.write(self._greeting)
        sys.stdout.flush()
        self._watchers = [asyncio.create_task(self._watch_signals()), asyncio.create_task(self._watch_engine())]

    async def _watch_signals(self) -> None:
        await self._interrupts.first.wait()
        drained = asyncio.create_task(self._client.drain(self._shutdown_timeout))
        second_signal = asyncio.create_task(self._interrupts.second.wait())
        await asyncio.wait({drained, second_signal}, return_when=asyncio.FIRST_COMPLETED)
        self.should_exit = True
        await second_signal
        self.force_exit = True

    async def _watch_engine(self) -> None:
        await self._client.engine_died.wait()
        await asyncio.sleep(DEAD_ENGINE_TIME)
        self.should_exit = True

    @property
    def status(self) -> int:
        """Of the process."""
        return 1 if self._client.engine_died.is_set() else 0

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        loop = asyncio.get_running_loop()
        self._client.stop()
        loop.call_later(LAST_EVENTS_TIME, self._drop_connections)
        loop.call_later(SHUTDOWN_TIME, self._exit_at_once)
        await super().shutdown(sockets)

    def _drop_connections(self) -> None:
        # For clients that do not read: uvicorn would cancel their tasks, and log a traceback for each.
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    def _exit_at_once(self) -> None:
        self._client.kill()
        os._exit(self.status)


def serve(config: ServeConfig) -> int:
    """Serves until SIGINT or SIGTERM, or until the engine dies. Returns 1 if it could not start or its engine died."""
    try:
        check_tls(config)
        template = chat_template(config)
    except (ValueError, OSError) as error:
        return _refused(error)
    return asyncio.run(_serve(config, template))


async def _serve(config: ServeConfig, template: str | None) -> int:
    sys.setswitchinterval(SWITCH_INTERVAL)
    interrupts = Interrupts()
    try:
        listener = bind(config)  # before the model is loaded, so that a port in use shows at once
    except OSError as error:
        return _refused(error)
    with listener:
        return await _serve_at(listener, config, template, interrupts)


async def _serve_at(listener: socket.socket, config: ServeConfig, template: str | None, interrupts: Interrupts) -> int:
    starting = asyncio.create_task(_start(config, template, listener))
    interrupted = asyncio.create_task(interrupts.first.wait())
    await asyncio.wait({starting, interrupted}, return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
        await asyncio.wait({starting})
        listener.close()
        os._exit(0)  # the event loop would wait for a thread that may be importing the tokenizer's libraries
    interrupted.cancel()
    try:
        client, greeting = starting.result()
    except (EngineFailed, ValueError, OSError) as error:
        return _refused(error)
    try:
        app = create_app([client], config.uds or listener.getsockname()[0])
        server = Server(_uvicorn(config, app), client, interrupts, config.shutdown_timeout, greeting)
        await server.serve(sockets=[listener])
        await app.state.intake.close()
        return server.status
    finally:
        await client.close()


async def _start(config: ServeConfig, template: str | None, listener: socket.socket) -> tuple[EngineClient, str]:
    """The client of a new engine, and the greeting. From then on the server listens."""
    engine, ready = await EngineProcess.start(config.engine)
    with _ended_by_signals():  # `tokenizers` holds the GIL for seconds while it reads a large file
        client = await EngineClient.connect(engine, ready, config, template)
    try:
        check_defaults(config.decoding, client.prompts, client.ready.limits)
        greeting = await asyncio.to_thread(make_greeting, client, config, listener)
        listen(listener, config)
        return client, greeting
    except BaseException:
        await client.close()
        raise


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGINT and SIGTERM end this process, and with it the engine, although no handler of Python's can run."""
    handlers = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
            signal.siginterrupt(number, False)


def _refused(error: Exception) -> int:
    sys.stderr.write(f"error: {error}\n")
    return 1


class UnixListener(socket.socket):
    """A Unix socket that makes and removes its file, and replaces the file of a server that has ended. Raises OSError
    if a server listens there, or the path cannot be used."""

    def __init__(self, path: str):
        super().__init__(socket.AF_UNIX)
        self._path, self._inode = Path(path), 0
        try:
            if self._path.is_socket() and not _is_listening(path):
                self._path.unlink()
            self.bind(path)
        except OSError:
            self.close()
            raise
        self._inode = self._path.stat().st_ino

    @property
    def has_file(self) -> bool:
        """The file is there, and no other server's."""
        return self._path.exists() and self._path.stat().st_ino == self._inode

    def listen(self, backlog: int = socket.SOMAXCONN, /) -> None:
        if not self.has_file:
            raise OSError(errno.EADDRINUSE, "another server has taken the path")
        super().listen(backlog)

    def close(self) -> None:
        if self.has_file:
            self._path.unlink()
            self._inode = 0  # which the file of the next server may get
        super().close()


def _is_listening(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as caller, suppress(BlockingIOError):  # so many wait already
        caller.setblocking(False)
        try:
            caller.connect(path)
        except ConnectionRefusedError:
            return False
    return True


def bind(config: ServeConfig) -> socket.socket:
    """A socket with the server's address, free for others until ``listen``. Raises OSError, which names the flags."""
    if config.uds is not None:
        try:
            return UnixListener(config.uds)
        except OSError as error:
            raise _address_error(config, error) from error
    # With the protocol named, asyncio sets TCP_NODELAY. Otherwise the first event of an answer waits until the client
    # has acknowledged the head: 40 ms.
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
    except OSError as error:
        listener.close()
        raise _address_error(config, error) from error
    return listener


def listen(listener: socket.socket, config: ServeConfig) -> None:
    """Lets clients connect. Called once the model is loaded: until then connections are refused. Raises OSError, which
    names the flags, if another server listens here by now."""
    try:
        listener.listen()
    except OSError as error:
        raise _address_error(config, error) from error


def _address_error(config: ServeConfig, error: OSError) -> OSError:
    address = f"--host {config.host} --port {config.port}" if config.uds is None else f"--uds {config.uds}"
    return OSError(f"{address}: {error.strerror or error}")


def check_tls(config: ServeConfig) -> None:
    """Raises OSError or ValueError if the files of the TLS flags cannot be used."""
    if config.ssl_certfile is None:
        return
    for name in ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs"):
        if (file := getattr(config, name)) is not None:
            try:
                check_regular(Path(file), ValueError)  # OpenSSL would wait for somebody to write to a pipe
            except (ValueError, OSError) as error:
                raise ValueError(f"{option(name)} {error}") from error
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, lambda: config.ssl_keyfile_password or "")
    except OSError as error:
        raise OSError(f"--ssl-certfile {config.ssl_certfile}, --ssl-keyfile {config.ssl_keyfile}: {error}") from error
    if config.ssl_ca_certs is not None:
        try:
            context.load_verify_locations(config.ssl_ca_certs)
        except OSError as error:
            raise OSError(f"--ssl-ca-certs {config.ssl_ca_certs}: {error}") from error


def chat_template(config: ServeConfig) -> str | None:
    """None: the model's own. A broken template is refused before the model is loaded."""
    if config.chat_template is None:
        load_template(config.engine.model or DEMO_MODEL)
        return None
    try:
        template = read_text(Path(config.chat_template), ValueError)
    except ValueError as error:
        raise ValueError(f"--chat-template {error}") from error
    check_template(template, f"--chat-template {config.chat_template}")
    return template


def _uvicorn(config: ServeConfig, app: FastAPI) -> uvicorn.Config:
    limit = connection_limit(config.max_num_queued_reqs)
    for name in ("uvicorn.error", "asyncio"):
        logging.getLogger(name).addFilter(RareWarnings())
    return uvicorn.Config(
        app,
        lifespan="off",
        ws="none",
        http=Connection,
        loop="asyncio",
        limit_concurrency=limit,
        backlog=limit,  # so many may be accepted before the first is counted
        root_path=config.root_path,
        ssl_certfile=config.ssl_certfile,
        ssl_keyfile=config.ssl_keyfile,
        ssl_keyfile_password=config.ssl_keyfile_password,
        ssl_ca_certs=config.ssl_ca_certs,
        ssl_cert_reqs=ssl.CERT_NONE if config.ssl_ca_certs is None else ssl.CERT_REQUIRED,
    )
