"""Answers requests for text: from the body of an HTTP request to the last byte of its answer."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from functools import partial
from http import HTTPStatus

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from lopa_ascend import core
from lopa_ascend.config.files import shown
from lopa_ascend.serve.api.request import AnsweredRequest, Planner
from lopa_ascend.serve.config import ServeConfig
from lopa_ascend.serve.http.access import log_line, request_id
from lopa_ascend.serve.http.api_error import ApiError
from lopa_ascend.serve.http.body import Intake, read_body
from lopa_ascend.serve.http.encoding import STREAM_HEADERS, Writer, pieces
from lopa_ascend.serve.link.client import EngineClient
from lopa_ascend.serve.link.generation import Generation
from lopa_ascend.serve.observe.metrics import Metrics, Timeline, summary
from lopa_ascend.types import GenerationOutput, Progress, Update

PIECE = 64 * 2**10
"""Bytes of a whole answer that are sent at once."""
LARGE_UPDATE = 64
"""From so many new tokens on, events are made in a thread: with log probabilities they are megabytes."""


class ServedModel:
    """A model that requests can name."""

    def __init__(self, client: EngineClient):
        self.client, self.name = client, client.config.served_model_name or client.ready.model_name
        self.limits = client.ready.limits
        self.planner = Planner(client.prompts, self.limits, client.config.decoding)
        self.metrics = Metrics(client, self.name)
        """Counts every request that reached the engine, at its end."""
        client.observers.append(self.metrics.observe_step)


class Endpoint:
    """Answers requests for text on all routes. The first model is the default; ``intake`` has threads plan requests."""

    def __init__(self, models: Sequence[ServedModel], intake: Intake, config: ServeConfig):
        self.models = {model.name: model for model in models}
        self.default = models[0]
        self._intake, self._log_texts = intake, config.enable_log_requests

    def find(self, model: str | None) -> ServedModel:
        """The model of this name; the default for "default" and None. Raises ApiError, 404, if there is none."""
        found = self.default if model in (None, "default") else self.models.get(str(model))
        if found is None:
            names = ", ".join(map(repr, self.models))
            message = f"the model {shown(model)} does not exist; this server has {names}"
            raise ApiError(HTTPStatus.NOT_FOUND, message, param="model", code="model_not_found")
        return found

    async def answer(self, request: Request, route: type[AnsweredRequest]) -> Response:
        """The answer to a request, which generates when it is sent.

        Raises:
            ApiError, ParameterError: the request cannot be answered.
            ClientDisconnect: the client closed the connection.
        """
        arrived = time.monotonic()
        asked, served, choices, writer = await self._intake.take(request, partial(self._plan, route))
        if self._log_texts:
            log_line(event="received", id=writer.id, body=asked.model_dump(exclude_none=True))
        streams = asked.streams
        generation = served.client.submit(writer.id, choices, trace=route.always_streams, streams=streams)
        # The answer does not keep ``asked``: ignored fields can be megabytes.
        kind = StreamedAnswer if streams else WholeAnswer
        return kind(served, generation, writer, arrived)

    def _plan(
        self, route: type[AnsweredRequest], raw: bytes
    ) -> tuple[AnsweredRequest, ServedModel, list[core.Request], Writer]:
        """The request, its model, its choices, and what writes its answer. Raises as ``answer`` does."""
        asked = read_body(route, raw)
        served = self.find(asked.model)
        choices = asked.plan(served.planner)
        return asked, served, choices, asked.writer(served.planner, served.name, choices)


class GeneratedAnswer(Response, ABC):
    """The answer to a request; ``arrived`` is in seconds of ``time.monotonic``. However it ends, its generation ends
    too."""

    def __init__(self, served: ServedModel, generation: Generation, writer: Writer, arrived: float):
        super().__init__()
        del self.headers["content-length"]
        self._served, self._generation, self._writer = served, generation, writer
        self._times = [Timeline(choice.prompt_tokens, arrived) for choice in generation.choices]
        self._reason_if_unfinished = "abort"
        """Of choices that never finish."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watcher = asyncio.create_task(self._fail_at_disconnect(receive))
        try:
            await self._send(send)
        finally:
            watcher.cancel()
            self._served.client.release(self._generation)
            self._served.metrics.observe_end(self._times, self._reason_if_unfinished, self._generation.engines)
            numbers = summary(self._times, time.monotonic(), self._reason_if_unfinished)
            log_line(event="finished", id=self._generation.request_id, request_id=request_id(scope), **numbers)

    async def _fail_at_disconnect(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._generation.fail(ClientDisconnect())

    @abstractmethod
    async def _send(self, send: Send) -> None:
        """Sends the answer, head and body."""

    async def _begin(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})

    async def _updates(self) -> AsyncIterator[tuple[int, Update, Progress]]:
        """As ``Generation.updates``; also notes the times."""
        try:
            async for index, update, progress in self._generation.updates():
                now, seconds = time.monotonic(), self._served.client.stats.step_seconds
                self._times[index].advance(now, seconds, update, progress)
                yield index, update, progress
        except ApiError as error:
            if error.code in ("engine_error", "engine_dead"):
                self._reason_if_unfinished = "error"
            raise


class WholeAnswer(GeneratedAnswer):
    """The answer to a request that does not stream, sent in pieces.

    A piece waits while the client leaves earlier ones unread, and the generation is released when the last piece is on
    its way. So a server that shuts down waits for clients that read slowly.
    """

    media_type = "application/json"

    async def _send(self, send: Send) -> None:
        outputs: dict[int, GenerationOutput] = {}
        async for index, _, progress in self._updates():
            if progress.output is not None:
                outputs[index] = progress.output
        # In a thread: answers of many choices, with log probabilities, are megabytes.
        parts = await asyncio.to_thread(encoded, self._writer, [outputs[index] for index in range(len(outputs))])
        self.headers["Content-Length"] = str(sum(map(len, parts)))
        await self._begin(send)
        for number, part in enumerate(parts, 1):
            await send({"type": "http.response.body", "body": part, "more_body": number < len(parts)})


def encoded(writer: Writer, outputs: Sequence[GenerationOutput]) -> list[bytes]:
    whole = b"".join(pieces(writer.whole(outputs)))
    return [whole[start : start + PIECE] for start in range(0, len(whole), PIECE)]


class StreamedAnswer(GeneratedAnswer):
    """Events, of which one can be an error. Proxies end streams in which nothing comes for long, so a comment comes
    after ``keep_alive_interval`` seconds without a frame."""

    async def _send(self, send: Send) -> None:
        self.headers.update({**STREAM_HEADERS, "Content-Type": self._writer.media_type})
        await self._begin(send)
        frames = Frames(send, self._writer.comment)
        interval = self._served.client.config.keep_alive_interval
        comments = asyncio.create_task(frames.keep_alive(interval))
        try:
            async for frame in self._frames():
                await frames.send(frame)
        except ClientDisconnect:
            return
        finally:
            comments.cancel()
        await frames.send(b"", is_last=True)

    async def _frames(self) -> AsyncIterator[bytes]:
        writer = self._writer
        for event in writer.opening():
            yield writer.frame(event)
        try:
            async for index, update, progress in self._updates():
                make = partial(_frames_of, writer, index, update, progress)
                is_large = len(update.tokens) >= LARGE_UPDATE
                for frame in await asyncio.to_thread(make) if is_large else make():
                    yield frame
            for event in writer.closing():
                yield writer.frame(event)
        except ApiError as error:
            for event in writer.failure(error):
                yield writer.frame(event)
        if writer.end:
            yield writer.end


class Frames:
    """What is sent of a stream, one frame after the other. Sending waits while the client leaves much unread."""

    def __init__(self, send: Send, comment: bytes):
        self._send, self._comment = send, comment
        self._sending = asyncio.Lock()
        self._last_sent = time.monotonic()

    async def send(self, frame: bytes, is_last: bool = False) -> None:
        async with self._sending:
            await self._send({"type": "http.response.body", "body": frame, "more_body": not is_last})
        self._last_sent = time.monotonic()

    async def keep_alive(self, interval: float) -> None:
        """Sends a comment whenever nothing was sent for ``interval`` seconds, until it is cancelled; 0: never."""
        while interval:
            if (remaining := self._last_sent + interval - time.monotonic()) > 0:
                await asyncio.sleep(remaining)
            else:
                await self.send(self._comment)


def _frames_of(writer: Writer, index: int, update: Update, progress: Progress) -> list[bytes]:
    return [writer.frame(event) for event in writer.events(index, update, progress)]
