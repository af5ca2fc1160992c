"""The HTTP process: it starts the engine process, serves, and ends both."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import socket
import ssl
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path

import uvicorn

from lopa_ascend.config import DecodingParams, EngineConfig, ParameterError
from lopa_ascend.config.sizes import format_size
from lopa_ascend.demo import HELD_OUT
from lopa_ascend.kv.pages import slots_for
from lopa_ascend.serve.app import create_app
from lopa_ascend.serve.config import ServeConfig
from lopa_ascend.serve.engine.client import ClientSettings, EngineClient, EngineFailed
from lopa_ascend.types import RankReport

FLUSH = 1.0
"""Seconds that clients have to read their last event once their requests were ended."""
GIVE_UP = 3.0
"""Seconds after which the process leaves whatever still runs, e.g. the tokenizer in a very long prompt."""
MOURNING = 3.0
"""Seconds in which a server whose engine has died still says so, for load balancers that ask /health."""


class Interrupts:
    """SIGINT and SIGTERM as events of the running loop. ``again``: a second SIGINT, from someone in a hurry."""

    def __init__(self) -> None:
        self.first, self.again = asyncio.Event(), asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: signal.Signals) -> None:
        if self.first.is_set() and number == signal.SIGINT:
            self.again.set()
        self.first.set()


class Server(uvicorn.Server):
    """Serves until a signal or the engine's death, then lets requests end as they are allowed to."""

    def __init__(
        self, settings: uvicorn.Config, client: EngineClient, interrupts: Interrupts, grace: float, greeting: str
    ):
        super().__init__(settings)
        self._client, self._interrupts, self._grace, self._greeting = client, interrupts, grace, greeting
        self._minders: list[asyncio.Task[None]] = []

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are those of ``Interrupts``; uvicorn would raise them again after the stop."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        sys.stdout.write(self._greeting)
        sys.stdout.flush()
        self._minders = [asyncio.create_task(self._mind_signals()), asyncio.create_task(self._mind_engine())]

    async def _mind_signals(self) -> None:
        await self._interrupts.first.wait()
        drained = asyncio.create_task(self._client.drain(self._grace))
        hurry = asyncio.create_task(self._interrupts.again.wait())
        await asyncio.wait({drained, hurry}, return_when=asyncio.FIRST_COMPLETED)
        self.should_exit = True
        await hurry
        self.force_exit = True

    async def _mind_engine(self) -> None:
        await self._client.died.wait()
        await asyncio.sleep(MOURNING)
        self.should_exit = True

    @property
    def status(self) -> int:
        """The exit status."""
        return 1 if self._client.died.is_set() else 0

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        loop = asyncio.get_running_loop()
        self._client.stop()
        loop.call_later(FLUSH, self._drop_connections)
        loop.call_later(GIVE_UP, self._give_up)
        await super().shutdown(sockets)

    def _drop_connections(self) -> None:
        # Clients that do not read: uvicorn would cancel their tasks and log a traceback for each.
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    def _give_up(self) -> None:
        self._client.kill()
        os._exit(self.status)


def serve(config: ServeConfig) -> int:
    """Serves until SIGINT or SIGTERM; returns the exit status: 1 if it cannot start, or its engine died."""
    try:
        listener = _bind(config.host, config.port)  # before the model loads: a port in use shows at once
        _check_tls(config)
        settings = _client_settings(config)
    except (ValueError, OSError) as error:
        return _refused(error)
    return asyncio.run(_serve(config, settings, listener))


async def _serve(config: ServeConfig, settings: ClientSettings, listener: socket.socket) -> int:
    interrupts = Interrupts()
    starting = asyncio.create_task(_start(config, settings, listener))
    interrupted = asyncio.create_task(interrupts.first.wait())
    await asyncio.wait({starting, interrupted}, return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
        await asyncio.wait({starting})
        os._exit(0)  # a thread may be in an import, and the loop would wait for it
    interrupted.cancel()
    try:
        client, greeting = starting.result()
    except (EngineFailed, ValueError, OSError) as error:
        return _refused(error)
    try:
        server = Server(_uvicorn(config, client), client, interrupts, config.shutdown_timeout, greeting)
        await server.serve(sockets=[listener])
        return server.status
    finally:
        await client.close()


async def _start(config: ServeConfig, settings: ClientSettings, listener: socket.socket) -> tuple[EngineClient, str]:
    """Returns the client and the greeting; raises as ``EngineClient.start`` does."""
    client = await EngineClient.start(config.engine, settings)
    try:
        return client, await asyncio.to_thread(_greeting, client, config, listener)
    except BaseException:
        await client.close()
        raise


def _refused(error: Exception) -> int:
    sys.stderr.write(f"error: {error}\n")
    return 1


def _bind(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    return listener


def _check_tls(config: ServeConfig) -> None:
    """Raises OSError or ValueError: the files of the TLS flags cannot be used."""
    if config.ssl_certfile is None:
        return
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


def _client_settings(config: ServeConfig) -> ClientSettings:
    template = None
    if config.chat_template is not None:
        try:
            template = Path(config.chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--chat-template {config.chat_template}: cannot be read: {error}") from error
    return ClientSettings(
        max_num_queued_reqs=config.max_num_queued_reqs,
        request_timeout=config.request_timeout,
        watchdog_timeout=config.watchdog_timeout,
        chat_template=template,
    )


def _uvicorn(config: ServeConfig, client: EngineClient) -> uvicorn.Config:
    return uvicorn.Config(
        create_app(client, config),
        lifespan="off",
        ws="none",
        # Not what happens to be installed: others treat malformed requests in other ways.
        http="h11",
        loop="asyncio",
        root_path=config.root_path,
        log_level=config.uvicorn_log_level,
        ssl_certfile=config.ssl_certfile,
        ssl_keyfile=config.ssl_keyfile,
        ssl_keyfile_password=config.ssl_keyfile_password,
        ssl_ca_certs=config.ssl_ca_certs,
        ssl_cert_reqs=ssl.CERT_NONE if config.ssl_ca_certs is None else ssl.CERT_REQUIRED,
    )


def _greeting(client: EngineClient, config: ServeConfig, listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    scheme = "http" if config.ssl_certfile is None else "https"
    url = f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
    ready, params = client.ready, DecodingParams(**config.decoding)
    values = {name: getattr(params, name) for name in DecodingParams.names()}
    shown = " ".join(f"{name}={value}" for name, value in values.items() if value not in (None, ()))
    route, body = _example(client, config)
    key = "" if config.api_key is None else ' -H "Authorization: Bearer $LOPA_API_KEY"'
    return (
        f"\nmodel     {config.served_model_name or ready.model_name}, max_model_len {ready.limits.max_model_len}, "
        f"{ready.dtype} on {ready.device}\n"
        f"{_ranks(config.engine, params)}"
        f"{_memory(config.engine, ready.ranks)}"
        f"decoding  {shown}\n"
        f"serving   {url}  (API documentation: {url}/docs)\n\n"
        f"curl {url}{route}{key} -H 'Content-Type: application/json' -d {shlex.quote(json.dumps(body))}\n\n"
    )


def _ranks(engine: EngineConfig, params: DecodingParams) -> str:
    """A line on how the branches divide between the ranks; nothing for one rank."""
    if engine.world_size == 1:
        return ""
    tp, bp = engine.tensor_parallel_size, engine.branch_parallel_size
    branches = 1 + params.lookaheads
    places = slots_for(branches, bp) * bp
    waste = "" if places == branches else f": {places - branches} of {places} places idle; more branches would be free"
    return f"ranks     tensor parallel {tp} x branch parallel {bp}, {branches} branches{waste}\n"


def _memory(engine: EngineConfig, ranks: Sequence[RankReport]) -> str:
    """A line for each rank, with its place if there are several."""
    lines = []
    for number, rank in enumerate(ranks):
        bp, tp = divmod(number, engine.tensor_parallel_size)
        place = "" if len(ranks) == 1 else f"rank {number} (bp {bp}, tp {tp}) on {rank.host} {rank.device}: "
        pages = f"{rank.num_pages} x {format_size(rank.page_bytes)} = {format_size(rank.num_pages * rank.page_bytes)}"
        graphs = f", {rank.num_graphs} graphs {format_size(rank.graphs)}" if rank.num_graphs else ""
        lines.append(
            f"{place}weights {format_size(rank.weights)}, KV pages {pages}{graphs}, free {format_size(rank.free)}"
        )
    return "".join(f"{title:<10}{line}\n" for title, line in zip_longest(["memory"], lines, fillvalue=""))


def _example(client: EngineClient, config: ServeConfig) -> tuple[str, dict[str, object]]:
    """A request that works. Also the first use of the chat template, which takes seconds for its imports."""
    if client.prompts.tokenizer is None:
        return "/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 32}
    question = "What is 12 + 30?"
    if config.engine.model is None:
        with HELD_OUT.open(encoding="utf-8") as lines:
            question = json.loads(lines.readline())["question"]
    messages = [{"role": "user", "content": question}]
    try:
        client.prompts.encode_chat(messages)
    except ParameterError:
        return "/v1/completions", {"prompt": question, "max_tokens": 64}
    return "/v1/chat/completions", {"messages": messages}
