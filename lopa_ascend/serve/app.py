"""The application: every route of the HTTP API."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from http import HTTPStatus
from ipaddress import IPv6Address, ip_address
from typing import Any
from urllib.parse import urlsplit

from fastapi import FastAPI, Request
from fastapi_offline import FastAPIOffline
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse

import lopa_ascend
from lopa_ascend.serve.api import answers, body, info, protocol
from lopa_ascend.serve.api.access import Access, set_up_request_log
from lopa_ascend.serve.api.endpoint import CHAT, COMPLETIONS, DIFFUSION_CHAT, DIFFUSION_COMPLETIONS, RESPONSES, Endpoint
from lopa_ascend.serve.api.errors import ApiError, install_handlers, unavailable
from lopa_ascend.serve.api.home import home_page
from lopa_ascend.serve.api.intake import Intake
from lopa_ascend.serve.api.openai_responses import ResponseObject
from lopa_ascend.serve.api.openai_responses_body import ResponseRequest
from lopa_ascend.serve.api.openapi import (
    DIFFUSION_EVENTS,
    EVENTS,
    GENERATING,
    PLAIN_TEXT,
    READING,
    RESPONSE_EVENTS,
    body_of,
    document,
    errors,
)
from lopa_ascend.serve.api.plan import Planner
from lopa_ascend.serve.config import ServeConfig
from lopa_ascend.serve.engine.client import EngineClient
from lopa_ascend.serve.observe.metrics import Metrics

Handler = Callable[[Request], Awaitable[Response]]
Decorator = Callable[[Handler], Handler]

LOCAL_HOSTS = ("localhost", "127.0.0.1", "[::1]")
"""Names of this machine that a request for it may have in its header Host."""
LOCAL_ORIGIN = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"
"""Origins of web pages that come from this machine."""


def create_app(client: EngineClient, config: ServeConfig, address: str | None = None) -> FastAPI:
    """The HTTP API of a running engine.

    Args:
        client: the engine.
        config: how the server was started.
        address: the numeric IP address at which the server listens; None: ``config.host`` is one.
    """
    # /docs and /redoc load their scripts from this server: there may be no internet.
    app = FastAPIOffline(title="LoPA-Dist-Ascend", version=lopa_ascend.__version__, redirect_slashes=False)
    install_handlers(app)
    app.add_middleware(Access, api_key=config.api_key, hosts=hosts_of(config, address or config.host))
    _allow_origins(app, config.allowed_origins)
    set_up_request_log()
    model = config.served_model_name or client.ready.model_name
    app.state.intake = intake = Intake(config.max_body_size)
    metrics = Metrics(client, model)
    client.observers.append(metrics.observe_step)
    planner = Planner(client.prompts, client.ready.limits, config.decoding)
    endpoint = Endpoint(client, planner, intake, metrics, model, config)
    _add_state(app, endpoint, client, config, metrics)
    _add_models(app, endpoint, client.ready.limits.max_model_len, model)
    _add_tokenizer(app, endpoint, client, intake)
    _add_generation(app, endpoint)
    _add_abort(app, client, intake)
    document(app, client.ready.limits, config)
    return app


def hosts_of(config: ServeConfig, address: str) -> frozenset[str] | None:
    """The names that the header Host of a request may have, in lower case; None for any.

    They are checked only where nothing else keeps strangers out: on a server that listens on this machine alone and has
    no key.

    Args:
        config: how the server was started.
        address: the numeric IP address at which the server listens. ``config.host`` may be a name, or a short form such
            as 127.1.
    """
    if config.api_key is not None or not _is_loopback(address) or "*" in config.allowed_origins:
        return None
    of_origins = {host for origin in config.allowed_origins if (host := urlsplit(origin).hostname)}
    named = {address, config.host.lower(), *of_origins}
    in_urls = {f"[{name}]" for name in named if ":" in name}
    return frozenset({*LOCAL_HOSTS, *named, *in_urls})


def _is_loopback(address: str) -> bool:
    """Whether only this machine can reach a numeric IP address."""
    parsed = ip_address(address)
    mapped = parsed.ipv4_mapped if isinstance(parsed, IPv6Address) else None
    return (mapped or parsed).is_loopback


def _allow_origins(app: FastAPI, origins: Sequence[str]) -> None:
    """Lets browsers give answers to web pages from these origins; without any, to pages from this machine.

    Added last, so it is the outermost middleware: a browser's preflight request carries no API key.
    """
    app.add_middleware(
        CORSMiddleware,
        allow_origins=origins,
        allow_origin_regex=None if origins else LOCAL_ORIGIN,
        allow_methods=["*"],
        allow_headers=["*"],
        expose_headers=["X-Request-Id"],
    )


def _add_state(app: FastAPI, endpoint: Endpoint, client: EngineClient, config: ServeConfig, metrics: Metrics) -> None:
    model = endpoint.model

    @app.get("/health", responses=errors(503))
    async def health() -> answers.Status:
        """200 while the engine makes progress."""
        if (found := client.health()) is not None:
            raise unavailable(found)
        return answers.Status()

    @app.get("/health_generate", responses=errors(500, 503))
    async def health_generate() -> answers.Status:
        """200 once the engine has made a step: for other requests, or to generate a token."""
        await endpoint.see_a_step(config.watchdog_timeout)
        return answers.Status()

    @app.get("/ready", responses=errors(503))
    async def ready() -> answers.Status:
        """200 while a new request would be accepted."""
        if (found := client.health()) is not None:
            raise unavailable(found)
        if client.num_running + client.num_waiting >= client.capacity:
            raise unavailable("the queue is full", code="queue_full")
        return answers.Status()

    @app.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def home(request: Request) -> str:
        """A page for people: which model is served, in which state, and where to go on."""
        return home_page(model, client.health(), request.scope.get("root_path", ""))

    @app.get("/version")
    async def version() -> answers.Version:
        """Version of the server."""
        return answers.Version(version=lopa_ascend.__version__)

    @app.get("/server_info")
    async def server_info() -> answers.ServerInfo:
        """The effective configuration, without secrets."""
        return info.server_info(config, client.ready, model)

    @app.get("/metrics", response_class=PlainTextResponse, responses={200: {"content": PLAIN_TEXT}})
    async def read_metrics() -> Response:
        """Prometheus metrics."""
        return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST)


def _add_models(app: FastAPI, endpoint: Endpoint, max_model_len: int, model: str) -> None:
    card = answers.ModelCard(id=model, created=int(time.time()), max_model_len=max_model_len)

    @app.get("/v1/models")
    async def list_models() -> answers.ModelList:
        """The served model, as a list of one."""
        return answers.ModelList(data=[card])

    @app.get("/get_model_info")
    async def model_info() -> answers.ModelInfo:
        """The served model, as SGLang's clients ask for it."""
        return answers.ModelInfo(model_path=model, tokenizer_path=model)

    @app.get("/v1/models/{model:path}", responses=errors(404))
    async def retrieve_model(model: str) -> answers.ModelCard:
        """The served model."""
        endpoint.check_model(model)
        return card


def _add_tokenizer(app: FastAPI, endpoint: Endpoint, client: EngineClient, intake: Intake) -> None:
    prompts, limits = client.prompts, client.ready.limits
    statuses = (*READING, 404)

    def tokens(raw: bytes) -> Response:
        asked = body.parse_tokenize(raw)
        endpoint.check_model(asked.model)
        return _json(info.tokenize(prompts, asked, limits.max_model_len))

    def text(raw: bytes) -> Response:
        asked = body.parse_detokenize(raw)
        endpoint.check_model(asked.model)
        return _json(info.detokenize(prompts, asked, limits))

    @app.post(
        "/tokenize",
        response_model=answers.Tokens,
        responses=errors(*statuses),
        openapi_extra=body_of(protocol.TokenizeRequest),
    )
    async def tokenize(request: Request) -> Response:
        """Token ids of a prompt or of a conversation."""
        return await intake.take(request, tokens)

    @app.post(
        "/detokenize",
        response_model=answers.Text,
        responses=errors(*statuses),
        openapi_extra=body_of(protocol.DetokenizeRequest),
    )
    async def detokenize(request: Request) -> Response:
        """Text of token ids."""
        return await intake.take(request, text)

    @app.get("/tokenizer_info", responses=errors(404))
    async def tokenizer_info() -> answers.TokenizerInfo:
        """The tokenizer, its special tokens and its chat template."""
        if prompts.tokenizer is None:
            raise ApiError(HTTPStatus.NOT_FOUND, "the model has no tokenizer files", code="no_tokenizer")
        return info.tokenizer_info(prompts.tokenizer, limits.max_model_len)


def _add_generation(app: FastAPI, endpoint: Endpoint) -> None:
    def text_route(
        path: str, body_model: type[BaseModel], answer: type[BaseModel], events: dict[str, Any] = EVENTS
    ) -> Decorator:
        documented = {**errors(*GENERATING), 200: {"content": events}}
        return app.post(path, response_model=answer, responses=documented, openapi_extra=body_of(body_model))

    def diffusion_route(path: str, body_model: type[BaseModel]) -> Decorator:
        documented = {**errors(*GENERATING), 200: {"content": DIFFUSION_EVENTS}}
        extra = body_of(body_model)
        return app.post(path, response_class=StreamingResponse, responses=documented, openapi_extra=extra)

    @text_route("/v1/completions", protocol.CompletionRequest, answers.Completion)
    async def completions(request: Request) -> Response:
        """Text that continues prompts."""
        return await endpoint.answer(request, COMPLETIONS)

    @text_route("/v1/chat/completions", protocol.ChatRequest, answers.ChatCompletion)
    async def chat_completions(request: Request) -> Response:
        """The next message of a conversation."""
        return await endpoint.answer(request, CHAT)

    @text_route("/v1/responses", ResponseRequest, ResponseObject, RESPONSE_EVENTS)
    async def create_response(request: Request) -> Response:
        """The next message of a conversation, in OpenAI's Responses API. Nothing is kept."""
        return await endpoint.answer(request, RESPONSES)

    @diffusion_route("/v1/diffusion/completions", protocol.DiffusionCompletionRequest)
    async def diffusion_completions(request: Request) -> Response:
        """As /v1/completions, with an event for every forward pass. The answer is always streamed."""
        return await endpoint.answer(request, DIFFUSION_COMPLETIONS)

    @diffusion_route("/v1/diffusion/chat/completions", protocol.DiffusionChatRequest)
    async def diffusion_chat_completions(request: Request) -> Response:
        """As /v1/chat/completions, with an event for every forward pass. The answer is always streamed."""
        return await endpoint.answer(request, DIFFUSION_CHAT)


def _add_abort(app: FastAPI, client: EngineClient, intake: Intake) -> None:
    @app.post("/abort_request", responses=errors(*READING, 404), openapi_extra=body_of(protocol.AbortRequest))
    async def abort_request(request: Request) -> answers.Aborted:
        """Ends a running request, which is named by the id of its response.

        Its unfinished choices get the finish reason "abort".
        """
        asked = await intake.take(request, body.parse_abort)
        if not client.abort(asked.request_id):
            message = f"no request with a response {asked.request_id!r} is running"
            raise ApiError(HTTPStatus.NOT_FOUND, message, param="request_id", code="request_not_found")
        return answers.Aborted(request_id=asked.request_id)


def _json(answer: BaseModel) -> Response:
    """An answer as a JSON response. Worker threads call this, because a long answer takes long to encode."""
    return Response(answer.model_dump_json(), media_type="application/json")
