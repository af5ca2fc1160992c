"""Routes about the server: health, configuration, metrics; and the one that ends a request."""

from __future__ import annotations

import asyncio
import dataclasses
import platform
import uuid
from collections.abc import Sequence
from http import HTTPStatus
from importlib.metadata import distributions
from typing import Any, Literal

from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, Field
from starlette.responses import PlainTextResponse, Response

import lopa_ascend
from lopa_ascend import core
from lopa_ascend.backend import find_device
from lopa_ascend.config import DecodingParams
from lopa_ascend.serve.config import SECRETS, ServeConfig
from lopa_ascend.serve.http.api_error import ApiError, unavailable
from lopa_ascend.serve.http.body import Body, Intake, read_body
from lopa_ascend.serve.http.openapi import READING, body_of, errors
from lopa_ascend.serve.link.client import EngineClient
from lopa_ascend.serve.link.generation import Generation
from lopa_ascend.serve.link.messages import Ready, Stepped
from lopa_ascend.serve.observe.dies import Dies
from lopa_ascend.serve.observe.metrics import Metrics, metrics_text

KV_UPDATE = {"block_causal": "single-phase", "full": "two-phase"}
"""How committed keys and values get into all slots, by window attention: in the step itself (single-phase), or copied
from the winner's slot after it (two-phase)."""
OF_ENGINE = ("device", "dtype", "kv_cache_memory", "seed", "ranks")
"""What is shown as the engine reported it in ``Ready``."""
OF_MESH = ("tensor_parallel_size", "branch_parallel_size")
PACKAGES = ("torch", "torch_npu", "transformers", "tokenizers", "fastapi", "uvicorn", "pyzmq")

# ---- bodies and answers ----------------------------------------------------------------------------------------------


class AbortRequest(Body):
    request_id: str = Field(description="The id of a response, as every event of a stream has it.")


class Aborted(BaseModel):
    request_id: str
    aborted: Literal[True] = True


class Status(BaseModel):
    status: Literal["ok"] = "ok"


class Version(BaseModel):
    version: str


class ServerInfo(BaseModel):
    """The effective configuration, without secrets."""

    model: str
    backend: dict[str, Any] = Field(description="Device, number format, memory, seed and ranks in effect.")
    limits: dict[str, Any] = Field(description="What a request may ask for.")
    engine: dict[str, Any] = Field(description="Settings of the engine; null: the engine's own choice.")
    decoding: dict[str, Any] = Field(description="Decoding parameters of a request that sets none.")
    server: dict[str, Any] = Field(description="Settings of the HTTP server. Of secrets: whether they are set.")
    versions: dict[str, str | None] = Field(description="Versions of packages; null: not installed.")


# ---- routes ----------------------------------------------------------------------------------------------------------


def add_state(app: FastAPI, models: Sequence[Metrics]) -> None:
    """The configuration is the first model's."""
    clients, config = [model.client for model in models], models[0].client.config

    @app.get("/health", responses=errors(503))
    async def health() -> Status:
        """200 while the engine makes progress."""
        _check_health(clients)
        return Status()

    @app.get("/health_generate", responses=errors(500, 503))
    async def health_generate() -> Status:
        """200 once the engine has made a step: for other requests, or to generate a token."""
        for client in clients:
            await see_a_step(client, config.watchdog_timeout)
        return Status()

    @app.get("/ready", responses=errors(503))
    async def ready() -> Status:
        """200 while a new request would be accepted."""
        _check_health(clients)
        if any(client.num_running + client.num_waiting >= client.capacity for client in clients):
            raise unavailable("the queue is full", code="queue_full")
        return Status()

    @app.get("/version")
    async def version() -> Version:
        """Version of the server."""
        return Version(version=lopa_ascend.__version__)

    @app.get("/server_info")
    async def server_info() -> ServerInfo:
        """The effective configuration, without secrets."""
        return effective_config(config, clients[0].ready, models[0].model_name)

    dies = [Dies(find_device(config.engine.device).read_health)] if config.replicas is None else []
    plain_text = {"text/plain": {"schema": {"type": "string"}}}

    @app.get("/metrics", response_class=PlainTextResponse, responses={200: {"content": plain_text}})
    async def read_metrics() -> Response:
        """Prometheus metrics."""
        for each in dies:
            each.refresh()
        text = metrics_text(models, *dies)
        return Response(text, media_type=CONTENT_TYPE_LATEST)


def _check_health(clients: Sequence[EngineClient]) -> None:
    for client in clients:
        if (found := client.health()) is not None:
            raise unavailable(found)


def add_abort(app: FastAPI, clients: Sequence[EngineClient], intake: Intake) -> None:
    @app.post("/abort_request", responses=errors(*READING, 404), openapi_extra=body_of(AbortRequest))
    async def abort_request(request: Request) -> Aborted:
        """Ends a running request by the id of its response. Its unfinished choices get the finish reason "abort"."""
        asked = await intake.take(request, lambda raw: read_body(AbortRequest, raw))
        if not any(client.abort(asked.request_id) for client in clients):
            message = f"no request with a response {asked.request_id!r} is running"
            raise ApiError(HTTPStatus.NOT_FOUND, message, param="request_id", code="request_not_found")
        return Aborted(request_id=asked.request_id)


# ---- health ----------------------------------------------------------------------------------------------------------


async def see_a_step(client: EngineClient, timeout: float) -> None:
    """Waits until the engine makes a step: for other requests, or for a token that it is given to generate. Raises
    ApiError: 500, the token failed; 503, no step came in ``timeout`` seconds, or none can come."""
    stepped = asyncio.Event()
    num_steps_before = {"": client.stats.num_steps}
    num_steps_before |= {engine: stats.num_steps for engine, stats in client.engines.items()}

    def observe(message: Stepped) -> None:
        has_failed = any(update.finish_reason == "error" for update in message.updates)
        num_steps = message.stats.num_steps
        if num_steps > num_steps_before.setdefault(message.engine, num_steps) and not has_failed:
            stepped.set()

    generation = _one_token(client)
    waiting: set[asyncio.Task[Any]] = {asyncio.create_task(stepped.wait())}
    if generation is not None:
        waiting.add(asyncio.create_task(_finish(generation)))
    client.observers.append(observe)
    try:
        done, _ = await asyncio.wait(waiting, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            raise unavailable(f"the engine made no step within {timeout:g} s")
        for task in done:
            task.result()
    finally:
        client.observers.remove(observe)
        for task in waiting:
            task.cancel()
        if generation is not None:
            client.release(generation)


def _one_token(client: EngineClient) -> Generation | None:
    """One token to generate; None if others fill the queue, whose steps are proof enough. Raises ApiError, 503, if
    nothing can be generated."""
    prompt = (int(client.ready.limits.mask_token_id == 0),)  # any token but the mask
    params = DecodingParams(max_new_tokens=1, decoding="d2f", ignore_eos=True)
    try:
        return client.submit(f"health-{uuid.uuid4().hex}", [core.Request("", prompt, params)])
    except ApiError as error:
        if error.code != "queue_full":
            raise
        return None


async def _finish(generation: Generation) -> None:
    async for _ in generation.updates():
        pass


# ---- configuration ---------------------------------------------------------------------------------------------------


def effective_config(config: ServeConfig, ready: Ready, model: str) -> ServerInfo:
    settings = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    engine, decoding = settings.pop("engine"), settings.pop("decoding")
    params = DecodingParams(**decoding)
    settings |= {name: settings[name] is not None for name in SECRETS}
    return ServerInfo(
        model=model,
        backend={
            **{name: getattr(ready, name) for name in OF_ENGINE},
            **{name: getattr(config.engine, name) for name in OF_MESH},
            "kv_update": KV_UPDATE,
        },
        limits=dataclasses.asdict(ready.limits),
        engine=dataclasses.asdict(engine),
        decoding={name: getattr(params, name) for name in DecodingParams.names()},
        server=settings,
        versions={
            **{"lopa_ascend": lopa_ascend.__version__, "python": platform.python_version()},
            **{name: next((d.version for d in distributions(name=name)), None) for name in PACKAGES},
        },
    )
