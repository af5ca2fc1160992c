"""A uvicorn server around one engine: start, greeting, and a stop that keeps nobody waiting."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import socket
import sys
from pathlib import Path
from types import FrameType

import torch
import uvicorn

import lopa_ascend
from lopa_ascend.config import DecodingParams, ParameterError
from lopa_ascend.engine import LLM
from lopa_ascend.serve.app import create_app
from lopa_ascend.serve.cli import ServeConfig
from lopa_ascend.serve.worker import Worker

FLUSH = 1.0
"""Seconds that clients have to read their last event once their requests were ended."""


GIVE_UP = 3.0
"""Seconds after which the process leaves whatever still runs, e.g. the tokenizer in a very long prompt."""


class Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, worker: Worker, grace: float, greeting: str):
        super().__init__(config)
        self._worker, self._grace, self._greeting = worker, grace, greeting

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        sys.stdout.write(self._greeting)
        sys.stdout.flush()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Unlike uvicorn's, does not raise the signal again after the stop: the exit status is 0."""
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(self._grace, self._worker.stop)
        loop.call_later(self._grace + FLUSH, self._drop_connections)
        loop.call_later(self._grace + GIVE_UP, os._exit, 0)
        await super().shutdown(sockets)
        self._worker.stop()

    def _drop_connections(self) -> None:
        # Clients that do not read: uvicorn would cancel their tasks and log a traceback for each.
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def serve(config: ServeConfig) -> int:
    """Serves until SIGINT or SIGTERM; returns the exit status."""
    try:
        listener = _bind(config.host, config.port)  # before the model loads: a port in use shows at once
        llm = _load(config)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    worker = Worker(llm)
    settings = uvicorn.Config(create_app(llm, worker, config), lifespan="off", ws="none")
    server = Server(settings, worker, config.shutdown_timeout, _greeting(llm, config, listener))
    server.run(sockets=[listener])
    return 0


def _bind(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    return listener


def _load(config: ServeConfig) -> LLM:
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    return LLM(
        config.model,
        lora=config.lora_path,
        device=config.device,
        dtype=config.dtype,
        max_model_len=config.max_model_len,
        seed=config.seed,
    )


def _greeting(llm: LLM, config: ServeConfig, listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    params = DecodingParams(**config.decoding)
    values = {name: getattr(params, name) for name in DecodingParams.names()}
    shown = " ".join(f"{name}={value}" for name, value in values.items() if value not in (None, ()))
    route, body = _example(llm, config)
    return (
        f"\nmodel     {config.served_model_name or llm.model_name}, max_model_len {llm.max_model_len}\n"
        f"decoding  {shown}\n"
        f"serving   {url}  (API documentation: {url}/docs)\n\n"
        f"curl {url}{route} -H 'Content-Type: application/json' -d {shlex.quote(json.dumps(body))}\n\n"
    )


def _example(llm: LLM, config: ServeConfig) -> tuple[str, dict[str, object]]:
    """A request that works. Also the first use of the chat template, which takes seconds for its imports."""
    if llm.tokenizer is None:
        return "/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 32}
    question = "What is 12 + 30?"
    if config.model is None:
        held_out = Path(lopa_ascend.__file__).parent / "demo" / "heldout.jsonl"
        with held_out.open(encoding="utf-8") as lines:
            question = json.loads(lines.readline())["question"]
    messages = [{"role": "user", "content": question}]
    try:
        llm.tokenize_chat(messages)
    except ParameterError:
        return "/v1/completions", {"prompt": question, "max_tokens": 64}
    return "/v1/chat/completions", {"messages": messages}
