"""The routes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import TypeVar

from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import PlainTextResponse, Response, StreamingResponse

import lopa_ascend
from lopa_ascend.serve.api import answers, body, info, protocol
from lopa_ascend.serve.api.access import Access, open_request_log
from lopa_ascend.serve.api.endpoint import CHAT, COMPLETIONS, DIFFUSION_CHAT, DIFFUSION_COMPLETIONS, Endpoint
from lopa_ascend.serve.api.errors import ApiError, install_handlers, unavailable
from lopa_ascend.serve.api.openapi import (
    DIFFUSION_EVENTS,
    EVENTS,
    GENERATING,
    PLAIN_TEXT,
    READING,
    body_of,
    document,
    errors,
)
from lopa_ascend.serve.api.plan import Planner
from lopa_ascend.serve.config import ServeConfig
from lopa_ascend.serve.engine.client import EngineClient
from lopa_ascend.serve.observe.metrics import Metrics

T = TypeVar("T")


def create_app(client: EngineClient, config: ServeConfig) -> FastAPI:
    """The HTTP API of a running engine."""
    app = FastAPI(title="LoPA-Dist-Ascend", version=lopa_ascend.__version__, redirect_slashes=False)
    install_handlers(app)
    app.add_middleware(Access, api_key=config.api_key)
    open_request_log()
    model = config.served_model_name or client.ready.model_name
    metrics = Metrics(client, model)
    client.observers.append(metrics.observe_step)
    planner = Planner(client.prompts, client.ready.limits, config.decoding, config.engine.seed)
    endpoint = Endpoint(client, planner, metrics, model, config)
    _add_state(app, client, config, metrics, model)
    _add_models(app, endpoint, client.ready.limits.max_model_len, model)
    _add_tokenizer(app, endpoint, client, config.max_body_size)
    _add_generation(app, endpoint, config.max_body_size)
    document(app, client.ready.limits, with_key=config.api_key is not None)
    return app


def _add_state(app: FastAPI, client: EngineClient, config: ServeConfig, metrics: Metrics, model: str) -> None:
    @app.get("/health", responses=errors(503))
    async def health() -> answers.Status:
        """200 while the engine makes progress."""
        if (trouble := client.health()) is not None:
            raise unavailable(trouble)
        return answers.Status()

    @app.get("/ready", responses=errors(503))
    async def ready() -> answers.Status:
        """200 while a new request would be taken."""
        if (trouble := client.health()) is not None:
            raise unavailable(trouble)
        if client.num_running + client.num_waiting >= client.max_choices:
            raise unavailable("the queue is full", code="queue_full")
        return answers.Status()

    @app.get("/version")
    async def version() -> answers.Version:
        return answers.Version(version=lopa_ascend.__version__)

    @app.get("/server_info")
    async def server_info() -> answers.ServerInfo:
        return info.server_info(config, client.ready, model)

    @app.get("/metrics", response_class=PlainTextResponse, responses={200: {"content": PLAIN_TEXT}})
    async def read_metrics() -> Response:
        """Prometheus metrics."""
        return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST)


def _add_models(app: FastAPI, endpoint: Endpoint, max_model_len: int, model: str) -> None:
    card = answers.ModelCard(id=model, created=int(time.time()), max_model_len=max_model_len)

    @app.get("/v1/models")
    async def list_models() -> answers.ModelList:
        return answers.ModelList(data=[card])

    @app.get("/v1/models/{model:path}", responses=errors(404))
    async def retrieve_model(model: str) -> answers.ModelCard:
        endpoint.check_model(model)
        return card


def _add_tokenizer(app: FastAPI, endpoint: Endpoint, client: EngineClient, max_body_size: int) -> None:
    prompts, limits = client.prompts, client.ready.limits
    statuses = (*READING, 404)

    @app.post("/tokenize", responses=errors(*statuses), openapi_extra=body_of(protocol.TokenizeRequest))
    async def tokenize(request: Request) -> answers.Tokens:
        asked = await _read(request, body.parse_tokenize, max_body_size)
        endpoint.check_model(asked.model)
        return await asyncio.to_thread(info.tokenize, prompts, asked, limits.max_model_len)

    @app.post("/detokenize", responses=errors(*statuses), openapi_extra=body_of(protocol.DetokenizeRequest))
    async def detokenize(request: Request) -> answers.Text:
        asked = await _read(request, body.parse_detokenize, max_body_size)
        endpoint.check_model(asked.model)
        return await asyncio.to_thread(info.detokenize, prompts, asked, limits.vocab_size)

    @app.get("/tokenizer_info", responses=errors(404))
    async def tokenizer_info() -> answers.TokenizerInfo:
        if prompts.tokenizer is None:
            raise ApiError(HTTPStatus.NOT_FOUND, "the model has no tokenizer files", code="no_tokenizer")
        return info.tokenizer_info(prompts.tokenizer, limits.max_model_len)


def _add_generation(app: FastAPI, endpoint: Endpoint, max_body_size: int) -> None:
    completion, chat = body_of(protocol.CompletionRequest), body_of(protocol.ChatRequest)
    responses = {**errors(*GENERATING), 200: {"content": EVENTS}}
    events = {**errors(*GENERATING), 200: {"content": DIFFUSION_EVENTS}}

    @app.post("/v1/completions", response_model=answers.Completion, responses=responses, openapi_extra=completion)
    async def completions(request: Request) -> Response:
        return await endpoint.answer(request, COMPLETIONS)

    @app.post("/v1/chat/completions", response_model=answers.ChatCompletion, responses=responses, openapi_extra=chat)
    async def chat_completions(request: Request) -> Response:
        return await endpoint.answer(request, CHAT)

    stream, completion = StreamingResponse, body_of(protocol.DiffusionCompletionRequest)

    @app.post("/v1/diffusion/completions", response_class=stream, responses=events, openapi_extra=completion)
    async def diffusion_completions(request: Request) -> Response:
        """Every forward pass as an event. The stream is implied."""
        return await endpoint.answer(request, DIFFUSION_COMPLETIONS)

    chat = body_of(protocol.DiffusionChatRequest)

    @app.post("/v1/diffusion/chat/completions", response_class=stream, responses=events, openapi_extra=chat)
    async def diffusion_chat_completions(request: Request) -> Response:
        """Every forward pass as an event. The stream is implied."""
        return await endpoint.answer(request, DIFFUSION_CHAT)

    @app.post("/abort_request", responses=errors(*READING, 404), openapi_extra=body_of(protocol.AbortRequest))
    async def abort_request(request: Request) -> answers.Aborted:
        """Ends a request: its choices get the finish reason "abort"."""
        asked = await _read(request, body.parse_abort, max_body_size)
        if not endpoint.abort(asked.request_id):
            message = f"no request {asked.request_id!r} is under way"
            raise ApiError(HTTPStatus.NOT_FOUND, message, param="request_id", code="request_not_found")
        return answers.Aborted(request_id=asked.request_id)


async def _read(request: Request, parse: Callable[[bytes], T], max_body_size: int) -> T:
    return await asyncio.to_thread(parse, await body.read_body(request, max_body_size))
