"""Answers requests for text: from the body of an HTTP request to the last byte of its answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from http import HTTPStatus

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from lopa_ascend.config.files import shown
from lopa_ascend.serve.config import ServeConfig
from lopa_ascend.serve.http.access import log_line, request_id
from lopa_ascend.serve.http.api_error import ApiError
from lopa_ascend.serve.http.body import Intake, read_body
from lopa_ascend.serve.http.encoding import Encoder, Writer, pieces
from lopa_ascend.serve.link.client import EngineClient
from lopa_ascend.serve.link.generation import AskedChoice, Generation
from lopa_ascend.serve.metrics import Metrics, Timeline
from lopa_ascend.serve.openai.request import GenerationRequest, Planner
from lopa_ascend.types import GenerationOutput, Progress, Update


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

    async def answer(self, request: Request, route: type[GenerationRequest]) -> Response:
        """The answer to a request, which generates when it is sent. Once a stream has begun, errors are events of the
        stream.

        Raises:
            ApiError, ParameterError: the request cannot be answered.
            ClientDisconnect: the client closed the connection.
        """
        arrived = time.monotonic()
        asked, choices, writer = await self._intake.take(request, partial(self._plan, route))
        if self._log_texts:
            log_line(event="received", id=writer.id, body=asked.model_dump(exclude_none=True))
        generation = self._client.submit(writer.id, choices, trace=route.always_streams)
        http_request_id = request_id(request.scope)
        run = Run(self._client, generation, arrived, lambda run: self._end(run, http_request_id))
        # Neither keeps ``asked``: ignored fields can be megabytes.
        streams = route.always_streams or asked.stream
        return EventStream(run, writer.encoder()) if streams else WholeAnswer(run, writer)

    def _plan(self, route: type[GenerationRequest], raw: bytes) -> tuple[GenerationRequest, list[AskedChoice], Writer]:
        """The request in a body, its choices, and what writes its answer. Raises as ``answer`` does."""
        asked = read_body(route, raw)
        self.check_model(asked.model)
        choices = asked.plan(self._planner)
        return asked, choices, asked.writer(self._planner, self.model, choices)

    def _end(self, run: Run, http_request_id: str) -> None:
        self._metrics.observe_end(run.timeline, run.reason_if_unfinished)
        numbers = run.timeline.summary(time.monotonic(), run.reason_if_unfinished)
        log_line(event="finished", id=run.generation.request_id, request_id=http_request_id, **numbers)


def encoded(writer: Writer, outputs: Sequence[GenerationOutput]) -> list[bytes]:
    """A whole answer as JSON, in parts of ``PIECE`` bytes."""
    whole = b"".join(pieces(writer.whole(outputs)))
    return [whole[start : start + PIECE] for start in range(0, len(whole), PIECE)]


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
