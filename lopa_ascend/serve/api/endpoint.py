"""One HTTP request for text, from its body to its last byte."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Generic, Protocol, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from lopa_ascend.serve.api import body, responses
from lopa_ascend.serve.api.access import log_line, request_id
from lopa_ascend.serve.api.diffusion import StepEncoder
from lopa_ascend.serve.api.errors import ApiError
from lopa_ascend.serve.api.plan import Planner
from lopa_ascend.serve.api.protocol import ChatRequest, CompletionRequest, GenerationRequest
from lopa_ascend.serve.config import ServeConfig
from lopa_ascend.serve.engine.client import Choice, EngineClient, Generation
from lopa_ascend.serve.observe.metrics import Metrics
from lopa_ascend.serve.observe.timeline import Timeline
from lopa_ascend.types import GenerationOutput, Progress, Update

T = TypeVar("T", bound=GenerationRequest)


class Encoder(Protocol):
    """What makes the events of a stream."""

    def opening(self) -> list[responses.Json]: ...

    def progress(self, index: int, update: Update, progress: Progress) -> list[responses.Json]: ...

    def closing(self) -> list[responses.Json]: ...


@dataclass(frozen=True)
class Route(Generic[T]):
    """How a kind of request is read, planned and answered."""

    parse: Callable[[bytes], T]
    plan: Callable[[Planner, T], list[Choice]]
    form: responses.Format
    details: Callable[[Planner, T], responses.Details]
    diffusion: bool = False


def _completion_details(planner: Planner, request: CompletionRequest) -> responses.Details:
    return responses.Details(
        n=request.n or 1,
        with_ids=bool(request.return_token_ids) or planner.prompts.tokenizer is None,
        logprobs=request.logprobs,
        echoed=planner.echoed(request),
    )


def _chat_details(planner: Planner, request: ChatRequest) -> responses.Details:
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    return responses.Details(n=request.n or 1, with_ids=bool(request.return_token_ids), logprobs=logprobs)


COMPLETIONS = Route(body.parse_completion, Planner.completion, responses.COMPLETION, _completion_details)
CHAT = Route(body.parse_chat, Planner.chat, responses.CHAT, _chat_details)
DIFFUSION_COMPLETIONS = Route(
    body.parse_diffusion_completion, Planner.completion, responses.COMPLETION, _completion_details, diffusion=True
)
DIFFUSION_CHAT = Route(body.parse_diffusion_chat, Planner.chat, responses.CHAT, _chat_details, diffusion=True)


class Endpoint:
    """What all routes that generate have in common."""

    def __init__(self, client: EngineClient, planner: Planner, metrics: Metrics, model: str, config: ServeConfig):
        self._client, self._planner, self._metrics, self._model = client, planner, metrics, model
        self._max_body_size, self._log_texts = config.max_body_size, config.enable_log_requests
        self._sent_as: dict[str, set[str]] = {}
        """Response ids under way by the X-Request-Id of their requests."""

    def check_model(self, model: str | None) -> None:
        """Raises:
        ApiError: 404, it is not the one that is served; None is.
        """
        if model not in (None, self._model):
            message = f"the model {model!r} does not exist; this server has {self._model!r}"
            raise ApiError(HTTPStatus.NOT_FOUND, message, param="model", code="model_not_found")

    def abort(self, identity: str) -> bool:
        """Ends the requests with this response id or X-Request-Id; False if none runs."""
        ended = [self._client.abort(name) for name in (identity, *self._sent_as.get(identity, ()))]
        return any(ended)

    async def answer(self, request: Request, route: Route[T]) -> Response:
        """Raises ApiError, ParameterError or ClientDisconnect; a stream that has begun reports errors inside."""
        arrived = time.monotonic()
        raw = await body.read_body(request, self._max_body_size)
        # In threads, for a large body takes seconds to parse and tokenize, and /health must not wait for it.
        asked = await asyncio.to_thread(route.parse, raw)
        self.check_model(asked.model)
        choices = await asyncio.to_thread(route.plan, self._planner, asked)
        details, tokenizer = route.details(self._planner, asked), self._planner.prompts.tokenizer
        response = responses.Response(route.form, self._model, choices, details, tokenizer)
        if self._log_texts:
            log_line(event="received", id=response.id, body=asked.model_dump(exclude_none=True))
        generation = self._client.submit(response.id, choices, trace=route.diffusion)
        run = self._begin(generation, request_id(request.scope), arrived)
        if route.diffusion:
            return EventStream(run, StepEncoder(response, tokenizer))
        if asked.stream:
            return EventStream(run, responses.ChunkEncoder(response, len(choices), asked.stream_options))
        async with run.until_disconnect(request.receive):
            outputs = await run.outputs()
        return JSONResponse(response.whole(outputs))

    def _begin(self, generation: Generation, sent_as: str, arrived: float) -> Run:
        self._sent_as.setdefault(sent_as, set()).add(generation.request_id)
        return Run(self._client, generation, arrived, lambda run: self._end(run, sent_as))

    def _end(self, run: Run, sent_as: str) -> None:
        names = self._sent_as[sent_as]
        names.discard(run.generation.request_id)
        if not names:
            del self._sent_as[sent_as]
        self._metrics.observe_end(run.timeline, run.trouble)
        numbers = run.timeline.summary(time.monotonic(), run.trouble)
        log_line(event="finished", id=run.generation.request_id, request_id=sent_as, **numbers)


class Run:
    """A generation under way with its times, from its submission to its release. ``ended`` is called after that."""

    def __init__(self, client: EngineClient, generation: Generation, arrived: float, ended: Callable[[Run], None]):
        self.generation = generation
        self.timeline = Timeline([len(choice.prompt_token_ids) for choice in generation.choices], arrived)
        self.trouble: str | None = None
        """The finish reason of choices that got no output."""
        self._client, self._ended = client, ended

    @asynccontextmanager
    async def until_disconnect(self, receive: Receive) -> AsyncIterator[None]:
        """Aborts the generation when the client goes away, and releases it at the end, whichever way that comes."""

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            self.generation.abort(ClientDisconnect())

        watcher = asyncio.create_task(watch())
        try:
            yield
        finally:
            watcher.cancel()
            self._client.release(self.generation)
            self._ended(self)

    async def progress(self) -> AsyncIterator[tuple[int, Update, Progress]]:
        """As ``Generation.progress``."""
        try:
            async for index, update, progress in self.generation.progress():
                now, seconds = time.monotonic(), self._client.stats.forward_seconds
                self.timeline.choices[index].advance(now, seconds, update, progress)
                yield index, update, progress
        except ApiError as error:
            self.trouble = "error" if error.code in ("engine_error", "engine_dead") else "abort"
            raise

    async def outputs(self) -> list[GenerationOutput]:
        """One of each choice. Raises: see ``Generation.progress``."""
        outputs: dict[int, GenerationOutput] = {}
        async for index, _, progress in self.progress():
            if progress.output is not None:
                outputs[index] = progress.output
        return [outputs[index] for index in range(len(outputs))]


class EventStream(StreamingResponse):
    """Server-sent events of one run; the run ends with the response, whichever way that ends."""

    media_type = "text/event-stream"

    def __init__(self, run: Run, encoder: Encoder):
        super().__init__(self._events(run, encoder), headers={"Cache-Control": "no-cache"})
        self._run = run

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._run.until_disconnect(receive):
            await super().__call__(scope, receive, send)

    @staticmethod
    async def _events(run: Run, encoder: Encoder) -> AsyncIterator[str]:
        for chunk in encoder.opening():
            yield _event(chunk)
        try:
            async for index, update, progress in run.progress():
                for chunk in encoder.progress(index, update, progress):
                    yield _event(chunk)
            for chunk in encoder.closing():
                yield _event(chunk)
        except ClientDisconnect:
            return
        except ApiError as error:
            yield _event(error.body())
        yield "data: [DONE]\n\n"


def _event(value: responses.Json) -> str:
    # ASCII: many clients take U+2028 and U+0085 for line ends.
    return f"data: {json.dumps(value)}\n\n"
