"""Answers requests for text: from the body of an HTTP request to the last byte of its answer."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any, Generic, Protocol, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from lopa_ascend.config import DecodingParams
from lopa_ascend.config.files import shown
from lopa_ascend.serve.api import body, completions
from lopa_ascend.serve.api.access import log_line, request_id
from lopa_ascend.serve.api.diffusion import StepWriter
from lopa_ascend.serve.api.encoding import Encoder, pieces
from lopa_ascend.serve.api.errors import ApiError, unavailable
from lopa_ascend.serve.api.intake import Intake
from lopa_ascend.serve.api.openai_responses import ResponseWriter
from lopa_ascend.serve.api.openai_responses_body import ResponseRequest
from lopa_ascend.serve.api.plan import Planner
from lopa_ascend.serve.api.protocol import ChatRequest, CompletionRequest, GenerationRequest
from lopa_ascend.serve.api.schema import Json
from lopa_ascend.serve.config import ServeConfig
from lopa_ascend.serve.engine.client import EngineClient
from lopa_ascend.serve.engine.generation import Choice, Generation
from lopa_ascend.serve.observe.metrics import Metrics
from lopa_ascend.serve.observe.timeline import Timeline
from lopa_ascend.types import EngineStats, GenerationOutput, Progress, Update

T = TypeVar("T", bound=GenerationRequest)


class Writer(Protocol):
    """Writes the answer to one request."""

    id: str
    """Id of the answer."""

    def whole(self, outputs: Sequence[GenerationOutput]) -> Json:
        """The answer, from the output of each choice, if it is not streamed. A value may be an iterator, which is
        sent as a list."""

    def encoder(self) -> Encoder:
        """Makes the events of the answer if it is streamed."""


@dataclass(frozen=True)
class Route(Generic[T]):
    """How one kind of request is read, planned and answered."""

    parse: Callable[[bytes], T]
    """The request from its body."""
    plan: Callable[[Planner, T], list[Choice]]
    """The choices that the request asks for."""
    writer: Callable[[Planner, str, T, list[Choice]], Writer]
    """Writes the answer, given the name of the served model, the request and its choices."""
    diffusion: bool = False
    """The answer is a stream of forward passes."""


def _completion(
    planner: Planner,
    model: str,
    request: CompletionRequest,
    choices: list[Choice],
    kind: type[completions.CompletionWriter] = completions.CompletionWriter,
) -> Writer:
    tokenizer = planner.prompts.tokenizer
    details = completions.Details(
        n=request.n or 1,
        with_ids=bool(request.return_token_ids) or tokenizer is None,
        logprobs=request.logprobs,
        echoed=planner.echoed(request),
        stream_options=request.stream_options,
    )
    return kind(completions.COMPLETION, model, choices, details, tokenizer)


def _chat(
    planner: Planner,
    model: str,
    request: ChatRequest,
    choices: list[Choice],
    kind: type[completions.CompletionWriter] = completions.CompletionWriter,
) -> Writer:
    details = completions.Details(
        n=request.n or 1,
        with_ids=bool(request.return_token_ids),
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        stream_options=request.stream_options,
    )
    return kind(completions.CHAT, model, choices, details, planner.prompts.tokenizer)


def _response(_: Planner, model: str, request: ResponseRequest, choices: list[Choice]) -> Writer:
    (choice,) = choices
    return ResponseWriter(model, request, choice)


COMPLETIONS = Route(body.parse_completion, Planner.completion, _completion)
CHAT = Route(body.parse_chat, Planner.chat, _chat)
RESPONSES = Route(body.parse_response, Planner.response, _response)
DIFFUSION_COMPLETIONS = Route(
    body.parse_diffusion_completion, Planner.completion, partial(_completion, kind=StepWriter), diffusion=True
)
DIFFUSION_CHAT = Route(body.parse_diffusion_chat, Planner.chat, partial(_chat, kind=StepWriter), diffusion=True)


class Endpoint:
    """Answers the requests of all routes that generate text.

    Args:
        client: the engine.
        planner: plans the choices of each request.
        intake: reads the bodies of requests, and has threads plan them.
        metrics: counts every request that reached the engine, at its end.
        model: name of the served model.
        config: how the server was started.
    """

    def __init__(
        self,
        client: EngineClient,
        planner: Planner,
        intake: Intake,
        metrics: Metrics,
        model: str,
        config: ServeConfig,
    ):
        self.model = model
        """Name of the served model."""
        self._client, self._planner, self._metrics = client, planner, metrics
        self._intake, self._log_texts = intake, config.enable_log_requests

    def check_model(self, model: str | None) -> None:
        """Accepts the name of the served model, "default" and None.

        Raises:
            ApiError: 404, there is no such model.
        """
        if model not in (None, "default", self.model):
            message = f"the model {shown(model)} does not exist; this server has {self.model!r}"
            raise ApiError(HTTPStatus.NOT_FOUND, message, param="model", code="model_not_found")

    async def see_a_step(self, timeout: float) -> None:
        """Waits until the engine makes a step, as proof that it works: for other requests, or for a token that it is
        given to generate.

        Args:
            timeout: most seconds.

        Raises:
            ApiError: 500, the token failed in the engine; 503, there was no step in time, or none can come.
        """
        client, stepped = self._client, asyncio.Event()
        num_steps_before = client.stats.num_steps

        def observe(updates: Sequence[Update], stats: EngineStats) -> None:
            has_failed = any(update.finish_reason == "error" for update in updates)
            if stats.num_steps > num_steps_before and not has_failed:
                stepped.set()

        generation = self._health_generation()
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

    def _health_generation(self) -> Generation | None:
        """One token for the engine to generate; None where others fill the queue, whose steps are proof enough.

        Raises:
            ApiError: 503, nothing can be generated.
        """
        prompt = [int(self._client.ready.limits.mask_token_id == 0)]  # any token but the mask
        params = DecodingParams(max_new_tokens=1, decoding="d2f", ignore_eos=True)
        try:
            return self._client.submit(f"health-{uuid.uuid4().hex}", [Choice(prompt, params)])
        except ApiError as error:
            if error.code != "queue_full":
                raise
            return None

    async def answer(self, request: Request, route: Route[T]) -> Response:
        """The answer to a request, which generates when it is sent. Once a stream has begun, errors are events of the
        stream.

        Raises:
            ApiError, ParameterError: the request cannot be answered.
            ClientDisconnect: the client closed the connection.
        """
        arrived = time.monotonic()
        asked, choices, writer = await self._intake.take(request, lambda raw: self._plan(raw, route))
        if self._log_texts:
            log_line(event="received", id=writer.id, body=asked.model_dump(exclude_none=True))
        generation = self._client.submit(writer.id, choices, trace=route.diffusion)
        http_request_id = request_id(request.scope)
        run = Run(self._client, generation, arrived, lambda run: self._end(run, http_request_id))
        # Neither keeps ``asked``, whose fields without effect may have megabytes, while the request waits and runs.
        return EventStream(run, writer.encoder()) if route.diffusion or asked.stream else WholeAnswer(run, writer)

    def _plan(self, raw: bytes, route: Route[T]) -> tuple[T, list[Choice], Writer]:
        """The request in a body, its choices, and what writes its answer. Raises as ``answer`` does."""
        asked = route.parse(raw)
        self.check_model(asked.model)
        choices = route.plan(self._planner, asked)
        return asked, choices, route.writer(self._planner, self.model, asked, choices)

    def _end(self, run: Run, http_request_id: str) -> None:
        self._metrics.observe_end(run.timeline, run.reason_if_unfinished)
        numbers = run.timeline.summary(time.monotonic(), run.reason_if_unfinished)
        log_line(event="finished", id=run.generation.request_id, request_id=http_request_id, **numbers)


def encoded(writer: Writer, outputs: Sequence[GenerationOutput]) -> list[bytes]:
    """A whole answer as JSON, in parts of ``PIECE`` bytes."""
    whole = b"".join(pieces(writer.whole(outputs)))
    return [whole[start : start + PIECE] for start in range(0, len(whole), PIECE)]


async def _finish(generation: Generation) -> None:
    """Reads a generation to its end."""
    async for _ in generation.updates():
        pass


class Run:
    """A running generation and its times, from its submission to its release.

    Args:
        client: the engine.
        generation: the choices of the request.
        arrived: when the request arrived, in seconds of ``time.monotonic``.
        on_end: called once, after the release.
    """

    def __init__(self, client: EngineClient, generation: Generation, arrived: float, on_end: Callable[[Run], None]):
        self.generation = generation
        self.timeline = Timeline([len(choice.prompt_token_ids) for choice in generation.choices], arrived)
        self.reason_if_unfinished = "abort"
        """Finish reason of choices that never finish."""
        self._client, self._on_end = client, on_end

    @asynccontextmanager
    async def until_disconnect(self, receive: Receive) -> AsyncIterator[None]:
        """A context that aborts the generation when the client closes the connection, and releases it at its end."""

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            self.generation.fail(ClientDisconnect())

        watcher = asyncio.create_task(watch())
        try:
            yield
        finally:
            watcher.cancel()
            self._client.release(self.generation)
            self._on_end(self)

    async def updates(self) -> AsyncIterator[tuple[int, Update, Progress]]:
        """As ``Generation.updates``; also notes the times."""
        try:
            async for index, update, progress in self.generation.updates():
                now, seconds = time.monotonic(), self._client.stats.step_seconds
                self.timeline.choices[index].advance(now, seconds, update, progress)
                yield index, update, progress
        except ApiError as error:
            if error.code in ("engine_error", "engine_dead"):
                self.reason_if_unfinished = "error"
            raise

    async def outputs(self) -> list[GenerationOutput]:
        """The output of each choice. Raises as ``Generation.updates`` does."""
        outputs: dict[int, GenerationOutput] = {}
        async for index, _, progress in self.updates():
            if progress.output is not None:
                outputs[index] = progress.output
        return [outputs[index] for index in range(len(outputs))]


PIECE = 64 * 2**10
"""Bytes of a whole answer that are sent at once."""
LARGE_UPDATE = 64
"""New tokens from which on the events of an update are made in a thread: with log probabilities they are megabytes."""


class WholeAnswer(Response):
    """The answer to a request that does not stream, sent in pieces.

    A piece waits while the client leaves earlier ones unread, and the run ends when the last piece is on its way. So a
    server that shuts down waits for clients that read slowly.

    Args:
        run: the running generation.
        writer: writes the answer.
    """

    media_type = "application/json"

    def __init__(self, run: Run, writer: Writer):
        super().__init__()
        self._run, self._writer = run, writer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._run.until_disconnect(receive):
            outputs = await self._run.outputs()
            # In a thread: answers of many choices, with log probabilities, are megabytes.
            parts = await asyncio.to_thread(encoded, self._writer, outputs)
            self.headers["Content-Length"] = str(sum(map(len, parts)))
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            for number, part in enumerate(parts, 1):
                await send({"type": "http.response.body", "body": part, "more_body": number < len(parts)})


def _frames(encoder: Encoder, index: int, update: Update, progress: Progress) -> list[bytes]:
    return [encoder.frame(event) for event in encoder.events(index, update, progress)]


HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""Headers of a stream: neither caches nor nginx, which keeps the beginning of an answer by default, may hold the stream
back."""


class EventStream(StreamingResponse):
    """The answer to a streaming request. However it ends, the run ends with it.

    Args:
        run: the running generation.
        encoder: makes the events.
    """

    media_type = "text/event-stream"

    def __init__(self, run: Run, encoder: Encoder):
        super().__init__(self._events(run, encoder), headers=HEADERS)
        self._run = run

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._run.until_disconnect(receive):
            await super().__call__(scope, receive, send)

    @staticmethod
    async def _events(run: Run, encoder: Encoder) -> AsyncIterator[bytes]:
        for event in encoder.opening():
            yield encoder.frame(event)
        try:
            async for index, update, progress in run.updates():
                make = partial(_frames, encoder, index, update, progress)
                is_large = len(update.token_ids) >= LARGE_UPDATE
                for frame in await asyncio.to_thread(make) if is_large else make():
                    yield frame
            for event in encoder.closing():
                yield encoder.frame(event)
        except ClientDisconnect:
            return
        except ApiError as error:
            for event in encoder.failure(error):
                yield encoder.frame(event)
        if encoder.end:
            yield encoder.end
