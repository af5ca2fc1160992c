"""The application: every route of the HTTP API."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from fastapi import FastAPI, Request
from fastapi_offline import FastAPIOffline
from pydantic import BaseModel
from starlette.responses import JSONResponse, Response, StreamingResponse

import lopa_ascend
from lopa_ascend.demo import EXAMPLES
from lopa_ascend.serve import diffusion
from lopa_ascend.serve.api import answer, messages, responses
from lopa_ascend.serve.api.chat import ChatCompletion, ChatRequest
from lopa_ascend.serve.api.completions import Completion, CompletionRequest
from lopa_ascend.serve.api.decisions import DecisionRequest, Decisions
from lopa_ascend.serve.api.infill import Infill, InfillRequest
from lopa_ascend.serve.api.messages import MessageObject, MessagesRequest
from lopa_ascend.serve.api.request import AnsweredRequest
from lopa_ascend.serve.api.responses import ResponseObject, ResponseRequest
from lopa_ascend.serve.api.score import ScoreRequest, Scores
from lopa_ascend.serve.diffusion import DiffusionChatRequest, DiffusionCompletionRequest
from lopa_ascend.serve.endpoint import Endpoint, ServedModel
from lopa_ascend.serve.http.access import Access, allow_origins, hosts_of, set_up_request_log
from lopa_ascend.serve.http.api_error import MESSAGES, install_handlers
from lopa_ascend.serve.http.body import Intake
from lopa_ascend.serve.http.openapi import READING, body_of, document, errors, events
from lopa_ascend.serve.link.client import EngineClient
from lopa_ascend.serve.models import add_models
from lopa_ascend.serve.observe.info import AbortRequest, add_abort, add_state
from lopa_ascend.serve.observe.profiling import StartProfileRequest, StopProfileRequest, add_profiling
from lopa_ascend.serve.tokens import DetokenizeRequest, TokenizeRequest, add_tokenizer
from lopa_ascend.serve.view import add_view

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
    """The HTTP API of running engines, one for each model. The first one's configuration holds for HTTP. The server
    listens at ``address``, a numeric IP address or the path of a Unix socket; None: ``config.host`` is numeric."""
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
    add_state(app, [model.metrics for model in endpoint.models.values()])
    add_models(app, endpoint)
    add_tokenizer(app, endpoint, intake)
    _add_generation(app, endpoint)
    add_abort(app, clients, intake)
    add_profiling(app, clients[0], intake)
    document(app, BODIES, EVENTS, endpoint.default.limits, with_key=config.api_key is not None)
    return app


class TextRoute(NamedTuple):
    """A route whose answers the endpoint generates."""

    path: str
    name: str
    body: type[AnsweredRequest]
    whole: type[BaseModel] | None
    """An answer that is not streamed; None: all are."""
    events: str | None
    """What the events of a stream are; None: no answer is streamed."""
    description: str


TEXT_ROUTES = (
    TextRoute(
        *("/v1/completions", "completions", CompletionRequest, Completion, answer.EVENTS),
        "Text that continues prompts.",
    ),
    TextRoute(
        *("/v1/chat/completions", "chat_completions", ChatRequest, ChatCompletion, answer.EVENTS),
        "The next message of a conversation.",
    ),
    TextRoute(
        *("/v1/responses", "create_response", ResponseRequest, ResponseObject, responses.EVENTS),
        "The next message of a conversation, in OpenAI's Responses API. Nothing is kept.",
    ),
    TextRoute(
        *(MESSAGES, "create_message", MessagesRequest, MessageObject, messages.EVENTS),
        "The next message of a conversation, in Anthropic's Messages API. Nothing is kept.",
    ),
    TextRoute(*("/v1/infill", "infill", InfillRequest, Infill, answer.EVENTS), "A text with gaps, which are filled."),
    TextRoute(
        *("/score", "score", ScoreRequest, Scores, None),
        "How probable given texts are after a prompt, in one forward pass.",
    ),
    *(
        TextRoute(
            *(path, "decisions", DecisionRequest, Decisions, None),
            "How probable the answers to questions about a state are, in one forward pass for each question.",
        )
        for path in ("/v1/decisions", "/v1/systemone")
    ),
    TextRoute(
        *("/v1/diffusion/completions", "diffusion_completions", DiffusionCompletionRequest, None, diffusion.EVENTS),
        "As /v1/completions, with an event for every forward pass. The answer is always streamed.",
    ),
    TextRoute(
        *("/v1/diffusion/chat/completions", "diffusion_chat_completions", DiffusionChatRequest),
        *(None, diffusion.EVENTS),
        "As /v1/chat/completions, with an event for every forward pass. The answer is always streamed.",
    ),
)


def _add_generation(app: FastAPI, endpoint: Endpoint) -> None:
    for route in TEXT_ROUTES:
        documented = errors(*READING, 404, 500, 504, route=route.path)
        if route.events is not None:
            documented[200] = {"content": events(route.events)}
        app.add_api_route(
            route.path,
            _answering(endpoint, route.body),
            methods=["POST"],
            name=route.name,
            description=route.description,
            response_model=route.whole,
            response_class=JSONResponse if route.whole else StreamingResponse,
            responses=documented,
            openapi_extra=body_of(route.body),
        )


def _answering(endpoint: Endpoint, body: type[AnsweredRequest]) -> Callable[[Request], Awaitable[Response]]:
    async def answered(request: Request) -> Response:
        return await endpoint.answer(request, body)

    return answered
