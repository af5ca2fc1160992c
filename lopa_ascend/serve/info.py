"""Routes about the server: health, the served model, configuration and metrics."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.metadata
import platform
import uuid
from collections.abc import Sequence
from datetime import datetime, timezone
from http import HTTPStatus
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
from lopa_ascend.serve.dies import Dies
from lopa_ascend.serve.endpoint import Endpoint
from lopa_ascend.serve.http.api_error import ApiError, unavailable
from lopa_ascend.serve.http.body import Body, Intake, read_body
from lopa_ascend.serve.http.openapi import READING, body_of, errors
from lopa_ascend.serve.link.client import EngineClient
from lopa_ascend.serve.link.generation import Generation
from lopa_ascend.serve.link.messages import Ready, Stepped
from lopa_ascend.serve.metrics import metrics_text

KV_UPDATE = {"block_causal": "single-phase", "full": "two-phase"}
"""How committed keys and values get into all slots, by window attention. Single-phase: every slot gets them in the step
itself. Two-phase: the winner's are copied to the other slots after the step."""
PACKAGES = ("torch", "torch_npu", "transformers", "tokenizers", "fastapi", "uvicorn", "pyzmq")
"""Packages whose versions are shown."""

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


class ModelCard(BaseModel):
    """A model, for clients of OpenAI's API and of Anthropic's."""

    id: str
    object: Literal["model"] = "model"
    type: Literal["model"] = "model"
    created: int
    created_at: datetime
    display_name: str
    owned_by: str = "lopa-ascend"
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]
    has_more: Literal[False] = False
    first_id: str
    last_id: str


class ModelInfo(BaseModel):
    model_path: str = Field(description="Name of the served model; directories of the server are not shown.")
    tokenizer_path: str
    is_generation: Literal[True] = True


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


def add_state(app: FastAPI, endpoint: Endpoint) -> None:
    """Routes that tell how the server is."""
    clients = [model.client for model in endpoint.models.values()]
    default, config = endpoint.default, endpoint.default.client.config

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
        return effective_config(config, default.client.ready, default.name)

    dies = [Dies(find_device(config.engine.device).read_health)] if config.replicas is None else []
    plain_text = {"text/plain": {"schema": {"type": "string"}}}

    @app.get("/metrics", response_class=PlainTextResponse, responses={200: {"content": plain_text}})
    async def read_metrics() -> Response:
        """Prometheus metrics."""
        for each in dies:
            each.refresh()
        text = metrics_text([model.metrics for model in endpoint.models.values()], *dies)
        return Response(text, media_type=CONTENT_TYPE_LATEST)


def _check_health(clients: Sequence[EngineClient]) -> None:
    for client in clients:
        if (found := client.health()) is not None:
            raise unavailable(found)


def add_models(app: FastAPI, endpoint: Endpoint) -> None:
    """Routes about the served models."""
    now, name = datetime.now(timezone.utc).replace(microsecond=0), endpoint.default.name
    cards = {
        name: ModelCard(
            id=name,
            display_name=name,
            created=int(now.timestamp()),
            created_at=now,
            max_model_len=model.limits.max_model_len,
        )
        for name, model in endpoint.models.items()
    }

    @app.get("/v1/models")
    async def list_models() -> ModelList:
        """The served models."""
        return ModelList(data=[*cards.values()], first_id=name, last_id=[*cards][-1])

    @app.get("/get_model_info")
    async def model_info() -> ModelInfo:
        """The served model, as SGLang's clients ask for it."""
        return ModelInfo(model_path=name, tokenizer_path=name)

    @app.get("/v1/models/{model:path}", responses=errors(404))
    async def retrieve_model(model: str) -> ModelCard:
        """A served model."""
        return cards[endpoint.find(model).name]


def add_abort(app: FastAPI, clients: Sequence[EngineClient], intake: Intake) -> None:
    """The route that ends a request."""

    @app.post("/abort_request", responses=errors(*READING, 404), openapi_extra=body_of(AbortRequest))
    async def abort_request(request: Request) -> Aborted:
        """Ends a running request, which is named by the id of its response.

        Its unfinished choices get the finish reason "abort".
        """
        asked = await intake.take(request, lambda raw: read_body(AbortRequest, raw))
        if not any(client.abort(asked.request_id) for client in clients):
            message = f"no request with a response {asked.request_id!r} is running"
            raise ApiError(HTTPStatus.NOT_FOUND, message, param="request_id", code="request_not_found")
        return Aborted(request_id=asked.request_id)


# ---- health ----------------------------------------------------------------------------------------------------------


async def see_a_step(client: EngineClient, timeout: float) -> None:
    """Waits until the engine makes a step, as proof that it works: for other requests, or for a token that it is given
    to generate.

    Raises:
        ApiError: 500, the token failed in the engine; 503, there was no step in ``timeout`` seconds, or none can come.
    """
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
    """One token for the engine to generate; None if others fill the queue, whose steps are proof enough.

    Raises:
        ApiError: 503, nothing can be generated.
    """
    prompt = (int(client.ready.limits.mask_token_id == 0),)  # any token but the mask
    params = DecodingParams(max_new_tokens=1, decoding="d2f", ignore_eos=True)
    try:
        return client.submit(f"health-{uuid.uuid4().hex}", [core.Request("", prompt, params)])
    except ApiError as error:
        if error.code != "queue_full":
            raise
        return None


async def _finish(generation: Generation) -> None:
    """Reads a generation to its end."""
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
            "device": ready.device,
            "dtype": ready.dtype,
            "kv_cache_memory": ready.kv_cache_memory,
            "seed": ready.seed,
            "tensor_parallel_size": config.engine.tensor_parallel_size,
            "branch_parallel_size": config.engine.branch_parallel_size,
            "kv_update": KV_UPDATE,
            "ranks": [dataclasses.asdict(rank) for rank in ready.ranks],
        },
        limits=dataclasses.asdict(ready.limits),
        engine=dataclasses.asdict(engine),
        decoding={name: getattr(params, name) for name in DecodingParams.names()},
        server=settings,
        versions={"lopa_ascend": lopa_ascend.__version__, "python": platform.python_version(), **_versions()},
    )


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = dict.fromkeys(PACKAGES)
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
