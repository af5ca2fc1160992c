"""Reads the bodies of answers strictly, so that an error or a stream that was cut off does not pass for an answer."""

from __future__ import annotations

import json
from typing import Any

DATA, DONE = "data: ", "[DONE]"
LAST_EVENTS = ("response.completed", "response.incomplete")
"""Types of the event that ends a stream of ``/v1/responses``, which has no [DONE]."""


def parse(body: bytes | str) -> dict[str, Any]:
    """The JSON object that a body holds.

    Raises:
        ValueError: the body is something else.
    """
    try:
        found = json.loads(body)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"not a JSON object: {body[:300]!r}")
    return found


def refusal(body: bytes) -> dict[str, Any]:
    """The error in the body of a refusal.

    Raises:
        ValueError: the body is not JSON, or has no error with a message.
    """
    error = parse(body).get("error")
    if not isinstance(error, dict) or not error.get("message"):
        raise ValueError(f"no error message: {body[:300]!r}")
    return error


def check_whole(body: bytes) -> None:
    """Checks the body of an answer with status 200 that was not streamed.

    Raises:
        ValueError: the body is not JSON, or is an error.
    """
    if error := parse(body).get("error"):
        raise ValueError(f"an error: {error}")


def check_stream(body: str) -> None:
    """Checks the events of a stream that has ended.

    Raises:
        ValueError: an event is not JSON or is an error, or the last event is missing.
    """
    # Not splitlines(): text may contain what it takes for line ends.
    events = [line.removeprefix(DATA).rstrip("\r") for line in body.split("\n") if line.startswith(DATA)]
    last = ""
    for event in events:
        fields = {"type": DONE} if event == DONE else parse(event)
        last = fields.get("type", "")
        if fields.get("error") or last in ("error", "response.failed"):
            raise ValueError(f"an error event: {event[:300]}")
    if last not in (DONE, *LAST_EVENTS):
        raise ValueError(f"the stream breaks off after {len(events)} events")
