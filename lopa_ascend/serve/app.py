"""The application: every route of the HTTP API."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from fastapi import FastAPI, Request
from fastapi_offline import FastAPIOffline
from pydantic import BaseModel
from starlette.responses import Response, StreamingResponse

import lopa_ascend
from lopa_ascend.demo import EXAMPLES
from lopa_ascend.serve import diffusion
from lopa_ascend.serve.api import answer, messages, responses
from lopa_ascend.serve.api.chat import ChatCompletion, ChatRequest
from lopa_ascend.serve.api.completions import Completion, CompletionRequest
from lopa_ascend.serve.api.decisions import DecisionRequest, Decisions
from lopa_ascend.serve.api.infill import Infill, InfillRequest
from lopa_ascend.serve.api.messages import MessageObject, MessagesRequest
from lopa_ascend.serve.api.request import AnsweredRequest, GenerationRequest
from lopa_ascend.serve.api.responses import ResponseObject, ResponseRequest
from lopa_ascend.serve.api.score import ScoreRequest, Scores
from lopa_ascend.serve.diffusion import DiffusionChatRequest, DiffusionCompletionRequest
from lopa_ascend.serve.endpoint import Endpoint, ServedModel
from lopa_ascend.serve.http.access import Access, allow_origins, hosts_of, set_up_request_log
from lopa_ascend.serve.http.api_error import MESSAGES, install_handlers
from lopa_ascend.serve.http.body import Intake
from lopa_ascend.serve.http.openapi import READING, body_of, document, errors, events
from lopa_ascend.serve.info import AbortRequest, add_abort, add_models, add_state
from lopa_ascend.serve.link.client import EngineClient
from lopa_ascend.serve.profiling import StartProfileRequest, StopProfileRequest, add_profiling
from lopa_ascend.serve.tokens import DetokenizeRequest, TokenizeRequest, add_tokenizer
from lopa_ascend.serve.view import add_view

Decorator = Callable[[Callable[[Request], Awaitable[Response]]], Callable[[Request], Awaitable[Response]]]

BODIES = (
    CompletionRequest,
    ChatRequest,
    ResponseRequest,
    MessagesRequest,
    InfillRequest,
    ScoreRequest,
    DecisionRequest,
    DiffusionCompletionRequest,
    DiffusionChatRequest,
    TokenizeRequest,
    DetokenizeRequest,
    AbortRequest,
    StartProfileRequest,
    StopProfileRequest,
)
EVENTS = (diffusion.DiffusionStart, diffusion.DiffusionStep, diffusion.DiffusionDone)
"""No operation names these as its body or its answer."""


def create_app(clients: Sequence[EngineClient], address: str | None = None) -> FastAPI:
    """The HTTP API of running engines.

    Args:
        clients: the engine of each model. How the first was started holds for HTTP too.
        address: the numeric IP address at which the server listens, or the path of its Unix socket; None:
            ``config.host`` is such an address.
    """
    # /docs and /redoc load their scripts from this server: there may be no internet.
    config = clients[0].config
    app = FastAPIOffline(title="LoPA-Dist-Ascend", version=lopa_ascend.__version__, redirect_slashes=False)
    install_handlers(app)
    app.add_middleware(Access, api_key=config.api_key, hosts=hosts_of(config, address or config.host))
    allow_origins(app, config.allowed_origins)
    set_up_request_log()
    app.state.intake = intake = Intake(config.max_body_size)
    endpoint = Endpoint([ServedModel(client) for client in clients], intake, config)
    add_view(app, is_shown=config.ui, examples=EXAMPLES if config.engine.model is None else ())
    add_state(app, endpoint)
    add_models(app, endpoint)
    add_tokenizer(app, endpoint, intake)
    _add_generation(app, endpoint)
    add_abort(app, clients, intake)
    add_profiling(app, endpoint, intake)
    document(app, BODIES, EVENTS, endpoint.default.limits, with_key=config.api_key is not None)
    return app


def _add_generation(app: FastAPI, endpoint: Endpoint) -> None:
    statuses = (*READING, 404, 500, 504)

    def text_route(
        path: str, body: type[GenerationRequest], whole: type[BaseModel], stream: str = answer.EVENTS
    ) -> Decorator:
        documented = {**errors(*statuses, route=path), 200: {"content": events(stream)}}
        return app.post(path, response_model=whole, responses=documented, openapi_extra=body_of(body))

    def whole_route(path: str, body: type[AnsweredRequest], whole: type[BaseModel]) -> Decorator:
        return app.post(path, response_model=whole, responses=errors(*statuses), openapi_extra=body_of(body))

    def diffusion_route(path: str, body: type[GenerationRequest]) -> Decorator:
        documented = {**errors(*statuses), 200: {"content": events(diffusion.EVENTS)}}
        return app.post(path, response_class=StreamingResponse, responses=documented, openapi_extra=body_of(body))

    @text_route("/v1/completions", CompletionRequest, Completion)
    async def completions(request: Request) -> Response:
        """Text that continues prompts."""
        return await endpoint.answer(request, CompletionRequest)

    @text_route("/v1/chat/completions", ChatRequest, ChatCompletion)
    async def chat_completions(request: Request) -> Response:
        """The next message of a conversation."""
        return await endpoint.answer(request, ChatRequest)

    @text_route("/v1/responses", ResponseRequest, ResponseObject, responses.EVENTS)
    async def create_response(request: Request) -> Response:
        """The next message of a conversation, in OpenAI's Responses API. Nothing is kept."""
        return await endpoint.answer(request, ResponseRequest)

    @text_route(MESSAGES, MessagesRequest, MessageObject, messages.EVENTS)
    async def create_message(request: Request) -> Response:
        """The next message of a conversation, in Anthropic's Messages API. Nothing is kept."""
        return await endpoint.answer(request, MessagesRequest)

    @text_route("/v1/infill", InfillRequest, Infill)
    async def infill(request: Request) -> Response:
        """A text with gaps, which are filled."""
        return await endpoint.answer(request, InfillRequest)

    @whole_route("/score", ScoreRequest, Scores)
    async def score(request: Request) -> Response:
        """How probable given texts are after a prompt, in one forward pass."""
        return await endpoint.answer(request, ScoreRequest)

    @whole_route("/v1/systemone", DecisionRequest, Decisions)
    @whole_route("/v1/decisions", DecisionRequest, Decisions)
    async def decisions(request: Request) -> Response:
        """How probable the answers to questions about a state are, in one forward pass for each question."""
        return await endpoint.answer(request, DecisionRequest)

    @diffusion_route("/v1/diffusion/completions", DiffusionCompletionRequest)
    async def diffusion_completions(request: Request) -> Response:
        """As /v1/completions, with an event for every forward pass. The answer is always streamed."""
        return await endpoint.answer(request, DiffusionCompletionRequest)

    @diffusion_route("/v1/diffusion/chat/completions", DiffusionChatRequest)
    async def diffusion_chat_completions(request: Request) -> Response:
        """As /v1/chat/completions, with an event for every forward pass. The answer is always streamed."""
        return await endpoint.answer(request, DiffusionChatRequest)
