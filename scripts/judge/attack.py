"""Hostile requests as bytes on a socket: what one is, how it is sent, and what comes back."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from scripts.judge.client import COMPLETIONS

ANSWER_WITHIN = 120.0
"""Seconds in which every request must be answered or cut off."""
LEFT, CLOSED = "we left", "closed"


@dataclass(frozen=True)
class Attack:
    """What goes over one connection: ``chunks`` with ``pause`` seconds between them. Then we wait for the answer, or,
    where ``linger`` is given, hang up after so many seconds. ``http``: it is proper HTTP, so the API answers it."""

    chunks: Iterable[bytes]
    pause: float = 0.0
    linger: float | None = None
    http: bool = False


Make = Callable[[random.Random], Attack]
KINDS: dict[str, tuple[Make, int]] = {}
"""By name: how to make one, and its weight among all."""


def kind(weight: int = 10) -> Callable[[Make], Make]:
    def register(make: Make) -> Make:
        KINDS[make.__name__] = make, weight
        return make

    return register


async def play(host: str, port: int, attack: Attack) -> int | str:
    """The status of the answer, or LEFT or CLOSED.

    Raises:
        TimeoutError: neither an answer nor an end came in ``ANSWER_WITHIN`` seconds.
        ValueError: what came is no answer of this API.
    """
    reader, writer = await asyncio.open_connection(host, port)
    sending = asyncio.create_task(_send(writer, attack))
    try:
        if attack.linger is not None:
            await asyncio.wait_for(sending, ANSWER_WITHIN)
            await asyncio.sleep(attack.linger)
            return LEFT
        # Read while sending: a server may answer a large body before its end, and nobody else would take the answer.
        return await asyncio.wait_for(_status(reader, attack.http), ANSWER_WITHIN)
    except (ConnectionError, asyncio.IncompleteReadError):
        return CLOSED
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
        pass  # the server hung up; what it said before is read elsewhere


async def _status(reader: asyncio.StreamReader, http: bool) -> int | str:
    first = await reader.readline()
    if not first:
        return CLOSED
    status = int(first.split()[1])
    if http:
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = int(head.partition(b"content-length:")[2].split(b"\r\n")[0])
        message = json.loads(await reader.readexactly(length))["error"]["message"]
        if not message:
            raise ValueError(f"status {status} without a message")
    return status


# ---- how requests are spelt ------------------------------------------------------------------------------------------


def head(route: str, length: int | str, method: str = "POST", kind: str = "application/json", more: str = "") -> bytes:
    lines = (
        f"{method} {route} HTTP/1.1\r\nHost: judge\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\n{more}\r\n"
    )
    return lines.encode("latin-1")


def raw(body: bytes, route: str = COMPLETIONS, **more: str) -> Attack:
    """``more`` is what ``head`` takes."""
    return Attack([head(route, len(body), **more) + body], http=True)


def post(route: str, **body: Any) -> Attack:
    return raw(json.dumps(body).encode(), route)


def completion(**body: Any) -> Attack:
    return post(COMPLETIONS, **{"prompt": "hi", "max_tokens": 4, **body})


def good(**more: Any) -> bytes:
    body = json.dumps({"prompt": "Tom has 12 apples.", "max_tokens": 48, "ignore_eos": True, **more}).encode()
    return head(COMPLETIONS, len(body)) + body
