"""A client of the completion routes, which records the text and the error of each answer."""

from __future__ import annotations

import functools
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from lopa_ascend.demo import HELD_OUT
from tests.judges.answers import parse

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"


@dataclass(frozen=True)
class Ask:
    """One request."""

    route: str
    body: Mapping[str, Any]
    """Fields of the JSON body."""

    @property
    def stream(self) -> bool:
        """Whether a stream of events is asked for."""
        return bool(self.body.get("stream"))


@dataclass
class Answer:
    """What came back for one request."""

    status: int = 0
    """Status code of the response."""
    texts: dict[int, str] = field(default_factory=dict)
    """By index of the choice."""
    finish_reasons: dict[int, str] = field(default_factory=dict)
    """By index of the choice."""
    error: dict[str, Any] | None = None
    """The error in the body, or in an event of the stream."""
    done: bool = False
    """Whether the whole answer was received; for a stream, whether its [DONE] was."""

    @property
    def ok(self) -> bool:
        """Whether the answer is complete and without an error."""
        return self.status == 200 and self.done and self.error is None

    def __str__(self) -> str:
        return f"status {self.status}, {'done' if self.done else 'cut off'}, {self.error or self.texts}"[:300]


@functools.cache
def questions() -> list[str]:
    """The questions of the held-out problems."""
    return [json.loads(line)["question"] for line in HELD_OUT.read_text(encoding="utf-8").splitlines()]


def chat(question: str, **fields: Any) -> Ask:
    """A chat request of one message, with further fields of the body."""
    return Ask(CHAT, {"messages": [{"role": "user", "content": question}], **fields})


def connect(url: str, timeout: float = 600.0) -> httpx.AsyncClient:
    """An HTTP client with any number of connections; ``timeout`` is in seconds."""
    return httpx.AsyncClient(base_url=url, timeout=timeout, limits=httpx.Limits(max_keepalive_connections=64))


async def ask(client: httpx.AsyncClient, request: Ask, leave_after: int | None = None) -> Answer:
    """Sends a request and reads the answer.

    Args:
        client: an HTTP client of the server.
        request: what to send.
        leave_after: of a stream, the number of events, at least 1, after which we hang up; None to read to the end.

    Raises:
        httpx.TransportError: the connection broke.
    """
    answer = Answer()
    async with client.stream("POST", request.route, json=request.body) as response:
        answer.status = response.status_code
        if request.stream and response.status_code == 200:
            num_events = 0
            async for event in _events(response, answer):
                _take(answer, event)
                num_events += 1
                if num_events == leave_after:
                    break
        else:
            _take(answer, _object(await response.aread()))
            answer.done = True
    return answer


async def _events(response: httpx.Response, answer: Answer) -> AsyncIterator[dict[str, Any]]:
    """The events of a stream; sets ``answer.done`` at its end."""
    async for line in _lines(response):
        if line == b"data: [DONE]":
            answer.done = True
        elif line and not line.startswith(b":"):  # a comment
            yield _object(line.removeprefix(b"data: "))


async def _lines(response: httpx.Response) -> AsyncIterator[bytes]:
    """The lines of a body. ``aiter_lines`` would also end a line at U+2028, which JSON may hold."""
    unread = b""
    async for piece in response.aiter_bytes():
        *lines, unread = (unread + piece).split(b"\n")
        for line in lines:
            yield line.removesuffix(b"\r")
    if unread:
        yield unread


def _object(body: bytes | str) -> dict[str, Any]:
    """The JSON object of a body or an event; an error in its place if it is something else."""
    try:
        return parse(body)
    except ValueError as error:
        return {"error": {"message": str(error)}}


def _take(answer: Answer, body: dict[str, Any]) -> None:
    """Adds to the answer what a whole body or one event says."""
    answer.error = body.get("error", answer.error)
    for choice in body.get("choices", ()):
        message = choice.get("message") or choice.get("delta") or choice
        text, index = message.get("content", message.get("text")) or "", choice["index"]
        answer.texts[index] = answer.texts.get(index, "") + text
        if choice["finish_reason"] is not None:
            answer.finish_reasons[index] = choice["finish_reason"]
