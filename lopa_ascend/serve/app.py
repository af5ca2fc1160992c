"""The routes."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from http import HTTPStatus
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

import lopa_ascend
from lopa_ascend.engine import LLM
from lopa_ascend.serve import responses
from lopa_ascend.serve.body import parse_chat, parse_completion, read_body
from lopa_ascend.serve.cli import ServeConfig
from lopa_ascend.serve.errors import ApiError, ErrorBody, install_handlers, unavailable
from lopa_ascend.serve.options import chat_choices, completion_choices
from lopa_ascend.serve.protocol import (
    ChatCompletion,
    ChatRequest,
    Completion,
    CompletionRequest,
    GenerationRequest,
    Health,
    ModelCard,
    ModelList,
)
from lopa_ascend.serve.worker import Choice, Generation, Worker
from lopa_ascend.types import GenerationOutput

T = TypeVar("T", bound=GenerationRequest)

SCHEMAS = "#/components/schemas/{model}"
ERRORS: dict[int | str, dict[str, Any]] = {status: {"model": ErrorBody} for status in (400, 404, 413, 500, 503)}
EVENTS = {"text/event-stream": {"schema": {"type": "string", "description": "With stream: one chunk an event."}}}


def create_app(llm: LLM, worker: Worker, config: ServeConfig) -> FastAPI:
    app = FastAPI(title="LoPA-Dist-Ascend", version=lopa_ascend.__version__, redirect_slashes=False)
    install_handlers(app)
    name = config.served_model_name or llm.model_name
    card = ModelCard(id=name, created=int(time.time()), max_model_len=llm.max_model_len)
    engine = _Endpoint(llm, worker, config, name)

    @app.get("/health", responses={503: {"model": ErrorBody}})
    async def health() -> Health:
        if not worker.alive:
            raise unavailable("the engine thread is dead")
        return Health()

    @app.get("/v1/models")
    async def list_models() -> ModelList:
        return ModelList(data=[card])

    @app.get("/v1/models/{model:path}", responses={404: {"model": ErrorBody}})
    async def retrieve_model(model: str) -> ModelCard:
        engine.check_model(model)
        return card

    @app.post("/v1/completions", response_model=Completion, **_documented(CompletionRequest))
    async def completions(request: Request) -> Response:
        return await engine.answer(request, parse_completion, completion_choices, responses.COMPLETION)

    @app.post("/v1/chat/completions", response_model=ChatCompletion, **_documented(ChatRequest))
    async def chat_completions(request: Request) -> Response:
        return await engine.answer(request, parse_chat, chat_choices, responses.CHAT)

    _document_bodies(app)
    return app


def _documented(body: type[GenerationRequest]) -> dict[str, Any]:
    schema = {"$ref": SCHEMAS.format(model=body.__name__)}
    request = {"required": True, "content": {"application/json": {"schema": schema}}}
    return {"responses": {200: {"content": EVENTS}, **ERRORS}, "openapi_extra": {"requestBody": request}}


def _document_bodies(app: FastAPI) -> None:
    # Bodies are read and checked by our own code (FastAPI would answer 422), so their schemas are added by hand.
    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
            _, bodies = models_json_schema(
                [(CompletionRequest, "validation"), (ChatRequest, "validation")], ref_template=SCHEMAS
            )
            app.openapi_schema["components"]["schemas"].update(bodies["$defs"])
            for operations in app.openapi_schema["paths"].values():
                for operation in operations.values():
                    operation["responses"].pop("422", None)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


class _Endpoint:
    """What both endpoints do, given how a body is parsed and an answer is spelt."""

    def __init__(self, llm: LLM, worker: Worker, config: ServeConfig, name: str):
        self._llm, self._worker, self._config, self._name = llm, worker, config, name

    def check_model(self, model: str) -> None:
        if model != self._name:
            message = f"the model {model!r} does not exist; this server has {self._name!r}"
            raise ApiError(HTTPStatus.NOT_FOUND, message, param="model", code="model_not_found")

    async def answer(
        self,
        request: Request,
        parse: Callable[[bytes], T],
        plan: Callable[[LLM, ServeConfig, T], list[Choice]],
        form: responses.Format,
    ) -> Response:
        """Raises ApiError, ParameterError or ClientDisconnect; a stream that has begun reports errors inside."""
        raw = await read_body(request)
        # In threads, for a large body takes seconds to parse and tokenize, and /health must not wait for it.
        body = await asyncio.to_thread(parse, raw)
        if body.model is not None:
            self.check_model(body.model)
        choices = await asyncio.to_thread(plan, self._llm, self._config, body)
        with_ids = bool(body.return_token_ids) or self._llm.tokenizer is None
        response = responses.Response(form, self._name, choices, body.n or 1, with_ids)
        generation = self._worker.submit(choices)
        if body.stream:
            encoder = responses.ChunkEncoder(response, len(choices), body)
            return _EventStream(self._worker, generation, encoder)
        with _released(self._worker, generation):
            async with _aborted_on_disconnect(request.receive, generation):
                outputs = await _collect(generation)
        return JSONResponse(response.whole(outputs))


async def _collect(generation: Generation) -> list[GenerationOutput]:
    outputs: dict[int, GenerationOutput] = {}
    async for index, progress in generation.progress():
        if progress.output is not None:
            outputs[index] = progress.output
    return [outputs[index] for index in range(len(outputs))]


@contextmanager
def _released(worker: Worker, generation: Generation) -> Iterator[None]:
    try:
        yield
    finally:
        worker.release(generation)


@asynccontextmanager
async def _aborted_on_disconnect(receive: Receive, generation: Generation) -> AsyncIterator[None]:
    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        generation.abort(ClientDisconnect())

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()


class _EventStream(StreamingResponse):
    """Server-sent events of one generation; it ends with the response, whichever way that ends."""

    media_type = "text/event-stream"

    def __init__(self, worker: Worker, generation: Generation, encoder: responses.ChunkEncoder):
        super().__init__(self._events(generation, encoder), headers={"Cache-Control": "no-cache"})
        self._worker, self._generation = worker, generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with _released(self._worker, self._generation):
            async with _aborted_on_disconnect(receive, self._generation):
                await super().__call__(scope, receive, send)

    @staticmethod
    async def _events(generation: Generation, encoder: responses.ChunkEncoder) -> AsyncIterator[str]:
        for chunk in encoder.opening():
            yield _event(chunk)
        try:
            async for index, progress in generation.progress():
                for chunk in encoder.progress(index, progress):
                    yield _event(chunk)
            for chunk in encoder.closing():
                yield _event(chunk)
        except ClientDisconnect:
            return
        except ApiError as error:
            yield _event(error.body())
        yield "data: [DONE]\n\n"


def _event(value: dict[str, Any]) -> str:
    # ASCII: many clients take U+2028 and U+0085 for line ends.
    return f"data: {json.dumps(value)}\n\n"
