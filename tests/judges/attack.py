"""Hostile requests: what one is, how it is sent as bytes over a socket, and what comes back."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from tests.judges.answers import refusal
from tests.judges.client import COMPLETIONS

ANSWER_TIMEOUT = 120.0
"""Seconds in which every request must be answered or cut off."""
LEFT, CLOSED, FULL = "we left", "closed", "queue full"
"""Outcomes other than a status code: we hung up, the server closed the connection, or it had no room for the request
and said when to come again."""
CUT_OFF = "closed without a whole answer"
"""The outcome in place of CLOSED where the API itself must answer."""


@dataclass(frozen=True)
class Attack:
    """What is sent over one connection."""

    chunks: Iterable[bytes]
    pause: float = 0.0
    """Seconds after each chunk."""
    linger: float | None = None
    """Seconds after the last chunk until we hang up; None: we wait for the answer."""
    http: bool = False
    """Whether the request is correct HTTP, so that the API itself must answer."""


Make = Callable[[random.Random], Attack]
"""Makes an attack of some kind, with random details."""
KINDS: dict[str, tuple[Make, int]] = {}
"""By name of a kind: what makes an attack, and the weight of the kind among all."""


def kind(weight: int = 10) -> Callable[[Make], Make]:
    """Registers a function that makes attacks as a kind of its name."""

    def register(make: Make) -> Make:
        KINDS[make.__name__] = make, weight
        return make

    return register


def is_refused(outcome: int | str) -> bool:
    """Whether an attack came to nothing: the server refused the request, or the connection ended without an answer."""
    if isinstance(outcome, int):
        return 400 <= outcome < 500
    return outcome in (LEFT, CLOSED, FULL)


async def outcome_of(url: str, attack: Attack) -> int | str:
    """Makes an attack on a server; returns what ``play`` does, or what was wrong, in words.

    Args:
        url: of the server, with a port.
        attack: what is sent.
    """
    host, port = urlsplit(url).hostname, urlsplit(url).port
    assert host is not None
    assert port is not None
    try:
        return await play(host, port, attack)
    # Before Python 3.11 asyncio's TimeoutError is another class.
    except (TimeoutError, asyncio.TimeoutError, ValueError, LookupError, OSError, asyncio.LimitOverrunError) as error:
        return f"{type(error).__name__}: {error}"


async def play(host: str, port: int, attack: Attack) -> int | str:
    """Makes an attack on a server; returns the status code of the answer, or LEFT, CLOSED, CUT_OFF or FULL.

    Raises:
        TimeoutError: there was neither an answer nor an end within ``ANSWER_TIMEOUT`` seconds.
        ValueError, LookupError, asyncio.LimitOverrunError: the answer is not in the form of this API.
        OSError: there is no connection.
    """
    reader, writer = await asyncio.open_connection(host, port)
    sending = asyncio.create_task(_send(writer, attack))
    try:
        if attack.linger is not None:
            await asyncio.wait_for(sending, ANSWER_TIMEOUT)
            await asyncio.sleep(attack.linger)
            return LEFT
        # Read while sending: a server may answer a large body before its end, and then close the connection.
        return await asyncio.wait_for(_status(reader, attack.http), ANSWER_TIMEOUT)
    except (ConnectionError, asyncio.IncompleteReadError):
        return CUT_OFF if attack.http else CLOSED
    finally:
        sending.cancel()
        writer.transport.abort()


async def _send(writer: asyncio.StreamWriter, attack: Attack) -> None:
    try:
        for chunk in attack.chunks:
            writer.write(chunk)
            await writer.drain()
            await asyncio.sleep(attack.pause)
    except ConnectionError:
        pass  # the server hung up; ``_status`` reads what it said before


async def _status(reader: asyncio.StreamReader, http: bool) -> int | str:
    """The status code of the answer, or CLOSED or FULL. With ``http``, there must be one: JSON with an error message.

    Raises:
        asyncio.IncompleteReadError: with ``http``, the connection ends before the answer does.
        ValueError: the answer is not in the form of this API.
    """
    first = await reader.readline()
    if not first and http:
        raise asyncio.IncompleteReadError(first, None)
    if not first:
        return CLOSED
    status = int(first.split()[1])
    if http:
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = int(head.partition(b"content-length:")[2].split(b"\r\n")[0])
        error = refusal(await reader.readexactly(length))
        if (status, error.get("code")) == (503, "queue_full") and b"retry-after:" in head:
            return FULL
    return status


# ---- requests as bytes -----------------------------------------------------------------------------------------------


def head(
    route: str, length: int | str, method: str = "POST", content_type: str = "application/json", more: str = ""
) -> bytes:
    """The head of an HTTP request.

    Args:
        route: path that is requested.
        length: value of Content-Length.
        method: HTTP method.
        content_type: value of Content-Type.
        more: further header lines, each with its line end.
    """
    lines = (
        f"{method} {route} HTTP/1.1\r\nHost: localhost\r\n"
        f"Content-Type: {content_type}\r\nContent-Length: {length}\r\n{more}\r\n"
    )
    return lines.encode("latin-1")


def raw(body: bytes, route: str = COMPLETIONS, **more: str) -> Attack:
    """A request with any body; ``more`` are arguments of ``head``."""
    return Attack([head(route, len(body), **more) + body], http=True)


def post(route: str, **body: Any) -> Attack:
    """A request with a JSON body."""
    return raw(json.dumps(body).encode(), route)


def completion(**body: Any) -> Attack:
    """A completion request that would be valid without ``body``."""
    return post(COMPLETIONS, **{"prompt": "hi", "max_tokens": 4, **body})


def good(**more: Any) -> bytes:
    """A valid completion request with the fields ``more``."""
    body = json.dumps({"prompt": "Tom has 12 apples.", "max_tokens": 48, "ignore_eos": True, **more}).encode()
    return head(COMPLETIONS, len(body)) + body
