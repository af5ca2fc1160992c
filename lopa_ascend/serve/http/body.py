"""Bodies of requests: read within limits of size and time, decoded, and checked against the declared fields."""

from __future__ import annotations

import asyncio
import difflib
import json
import logging
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from http import HTTPStatus
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError
from starlette.datastructures import Headers
from starlette.requests import Request

from lopa_ascend.config.errors import ParameterError, printed
from lopa_ascend.config.files import shown, strict_json
from lopa_ascend.process.thread_turns import turn
from lopa_ascend.serve.http.api_error import CLOSE, ApiError
from lopa_ascend.serve.http.encoding import Json

BODY_TIMEOUT = 60.0
"""Most seconds in which a body must arrive."""
MAX_READ_FACTOR = 8
"""A body that is too large is read and thrown away up to so many times the limit: clients look for the answer only
after they have sent everything. Beyond that the connection is closed."""
THREADS = 4
"""Bodies that are parsed and tokenized at the same time."""
MAX_WAITING = 64
"""Bodies whose grammars wait at the same time to be compiled."""
MAX_DEPTH = 40
"""Most levels of nested objects and lists. Schemas of nested objects have two for each of these, and three in front."""
MAX_SHOWN = 100
"""A longer name of a field is not compared with the known ones."""
WITHOUT_EFFECT = "Taken, and without effect."
NOT_SUPPORTED = "Not supported: taken only with a value that changes nothing."
EMPTY: tuple[Any, ...] = ("", [], {})
"""A field that this server does not act on asks for nothing with these values, and with null."""

HarmlessValues = Mapping[str, tuple[Any, ...]]
"""Fields that this server does not act on, with the values that change nothing, besides null and ``EMPTY``."""

logger = logging.getLogger(__name__)
R = TypeVar("R")
B = TypeVar("B", bound="Body")


class Body(BaseModel):
    """The body of a request, or an object inside it. A field that is null counts as absent, and so does one that is
    empty if this server does not act on it. Other unknown fields are refused."""

    # Values are not converted: "5" is not a number.
    model_config = ConfigDict(
        extra="forbid", strict=True, json_schema_extra=lambda schema, model: model.complete_schema(schema)
    )
    ignored: ClassVar[Mapping[str, str]] = {}
    """By name of a field that is dropped, whatever it holds: why it changes nothing."""
    harmless: ClassVar[HarmlessValues] = {}
    """These fields are dropped if they change nothing, and refused otherwise."""
    named_by_client: ClassVar[frozenset[str]] = frozenset()
    """Fields that are objects whose names the client chooses."""
    instead: ClassVar[Mapping[str, str]] = {}
    """By name of a field that is refused: what to do instead."""

    @model_validator(mode="before")
    @classmethod
    def _drop_harmless(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        values = {name: value for name, value in _set_fields(values) if name in cls.model_fields or value not in EMPTY}
        for name in cls.ignored.keys() & values.keys() - cls.model_fields.keys():
            del values[name]
            _note_ignored(name, cls.ignored[name])
        cls.tidy(values)
        for name, allowed in cls.harmless.items():
            value = values.pop(name, None)
            asked = dict(_set_fields(value)) if isinstance(value, dict) else value
            if value is not None and not any(_are_equal_in_json(asked, item) for item in allowed):
                choices = " or ".join(json.dumps(item) for item in allowed or (None,))
                raise unsupported(name, f"is not supported here; leave it out or send {choices}", cls.instead.get(name))
        return values

    @classmethod
    def tidy(cls, values: dict[str, Any]) -> None:
        """Rewrites fields that change nothing in combination with others."""

    @classmethod
    def complete_schema(cls, schema: Json) -> None:
        """Adds what pydantic does not know to the JSON Schema."""
        schema["additionalProperties"] = {"enum": [None, *EMPTY]}
        texts = {name: f"{WITHOUT_EFFECT} {why}" for name, why in cls.ignored.items()}
        schema["properties"] = {name: {"description": text} for name, text in texts.items()} | schema["properties"]
        for name, values in cls.harmless.items():
            schema["properties"][name] = {"enum": [None, *EMPTY, *values], "description": NOT_SUPPORTED}


@cache
def _note_ignored(name: str, why: str) -> None:
    """Logs once that clients send a field that changes nothing."""
    logger.info("requests have the field %r, which changes nothing here: %s", name, why)


def unsupported(name: str, message: str, instead: str | None = None) -> PydanticCustomError:
    """For validators: the refusal of a field, and what to do instead."""
    hint = f". Instead, {instead}" if instead else ""
    return PydanticCustomError("unsupported", "{name} {message}", {"name": name, "message": message + hint})


def _set_fields(values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    return ((name, value) for name, value in values.items() if value is not None)


def _are_equal_in_json(a: object, b: object) -> bool:
    """false is not 0, as it is in Python."""
    return a == b and isinstance(a, bool) == isinstance(b, bool)


# ---- from the connection ---------------------------------------------------------------------------------------------


class Intake:
    """Takes in bodies, which hold at most ``max_body_size`` bytes for each connection."""

    def __init__(self, max_body_size: int):
        self._max_body_size = max_body_size
        self._threads = ThreadPoolExecutor(THREADS + MAX_WAITING, "bodies")
        self._turns = threading.Semaphore(THREADS)

    async def take(self, request: Request, work: Callable[[bytes], R]) -> R:
        """What ``work`` makes of a body, in a thread.

        Raises:
            ApiError: 400, the content type is not JSON; 408, the client is too slow; 413, the body is too large.
            ClientDisconnect: the client closed the connection.
        """
        content_length = request.headers.get("content-length", "0")
        size = int(content_length) if content_length.isdecimal() else 0
        if size > MAX_READ_FACTOR * self._max_body_size:
            raise self._too_large(size)
        body = bytearray()
        try:
            size = await asyncio.wait_for(self._read(request, body), BODY_TIMEOUT)
        except asyncio.TimeoutError:
            message = f"the body did not arrive within {BODY_TIMEOUT:g} s"
            raise ApiError(HTTPStatus.REQUEST_TIMEOUT, message, code="body_timeout", headers=CLOSE) from None
        if size > self._max_body_size:
            raise self._too_large(size)
        check_json(request.headers)
        content = bytes(body)
        body.clear()
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._work, work, content)

    def _work(self, work: Callable[[bytes], R], content: bytes) -> R:
        with turn(self._turns):
            return work(content)

    async def _read(self, request: Request, body: bytearray) -> int:
        """Appends what arrives to ``body``, or empties that if it is too large. Returns the bytes that have arrived, at
        the end or when they are far too many."""
        size = 0
        async for piece in request.stream():
            size += len(piece)
            if size <= self._max_body_size:
                body += piece
            else:
                body.clear()
            if size > MAX_READ_FACTOR * self._max_body_size:
                break
        return size

    def _too_large(self, size: int) -> ApiError:
        message = f"the body has {size} bytes or more; this server takes at most {self._max_body_size}"
        headers = CLOSE if size > MAX_READ_FACTOR * self._max_body_size else None
        return ApiError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message, code="request_too_large", headers=headers)

    async def close(self) -> None:
        """Drops bodies that wait, and returns when none is worked on any more."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self._threads.shutdown)


def check_json(headers: Headers) -> None:
    """Raises ApiError, 400, unless the body is said to be JSON."""
    content_type = headers.get("content-type", "")
    if content_type.partition(";")[0].strip().lower() != "application/json":
        message = f"the content type is {content_type[:100]!r}; send Content-Type: application/json"
        raise _bad(message, code="invalid_content_type")


# ---- from bytes to fields --------------------------------------------------------------------------------------------


def read_body(model: type[B], raw: bytes) -> B:
    """The fields of a body, at every depth by the rules of the models. Raises ApiError, 400, which names the field."""
    try:
        return model.model_validate(_decoded(raw))
    except ValidationError as error:
        raise _explain(_closest(error.errors(include_url=False)), model) from None


def _bad(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    return ApiError(HTTPStatus.BAD_REQUEST, message, param=param, code=code)


def _decoded(raw: bytes) -> dict[str, Any]:
    try:
        values = strict_json(raw, parse_constant=_refuse_constant, parse_float=_finite_number)
    except RecursionError:
        raise _bad("the body is nested too deeply", code="invalid_json") from None
    except ValueError as error:  # malformed UTF-8 or JSON, or a number with more digits than Python reads
        raise _bad(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(values, dict):
        raise _bad(f"the body must be a JSON object, not a {type(values).__name__}", code="invalid_json")
    for name, value in values.items():
        _check_strings({name: value}, name if _is_text(name) else None)
    return values


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def _finite_number(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError("a number is too large")
    # JSON does not distinguish 5.0 from 5. No field takes larger integers, whose hundreds of digits take long to write.
    return int(value) if value.is_integer() and abs(value) < 2**63 else value


def _check_strings(value: object, param: str | None, depth: int = 0) -> None:
    """Refuses strings that are not text, and deep nesting. The value stands in the field ``param``."""
    if depth > MAX_DEPTH:
        raise _bad(f"nested more than {MAX_DEPTH} levels deep", param, code="invalid_json")
    if isinstance(value, str) and not _is_text(value):
        name = param or "the name of a field"
        raise _bad(f"{name} is not text: it holds a lone surrogate or a NUL character", param)
    if isinstance(value, dict):
        for name, item in value.items():
            _check_strings(name, param, depth + 1)
            _check_strings(item, param, depth + 1)
    if isinstance(value, list):
        for item in value:
            if not isinstance(item, int):  # token ids, of which there can be many
                _check_strings(item, param, depth + 1)


def _is_text(value: str) -> bool:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return "\0" not in value


def _closest(errors: list[ErrorDetails]) -> ErrorDetails:
    for kind in ("unsupported", "extra_forbidden"):  # a misspelt name explains why another field is missing
        for error in errors:
            if error["type"] == kind:
                return error
    # A field that may have several types has an error for each; the longest location is the closest match, and among
    # these a value of the right type.
    of_first_field = [error for error in errors if error["loc"][0] == errors[0]["loc"][0]]
    return max(of_first_field, key=lambda error: (len(error["loc"]), not error["type"].endswith("_type")))


def _explain(error: ErrorDetails, model: type[Body]) -> ApiError:
    """pydantic's error in our words, with the field's name as clients know it."""
    # In a field of several types the location also names the type, e.g. ("content", "str"); but it begins with a field,
    # and ends with an unknown one.
    location = error["loc"]
    fields = {0, len(location) - 1} if error["type"] == "extra_forbidden" else {0}
    fields |= {1} if model.named_by_client.intersection(location[:1]) else set()
    path = [part for place, part in enumerate(location) if place in fields or not _is_type_name(part)]
    if error["type"] == "unsupported":
        path.append(error["ctx"]["name"])
    ours = error.get("ctx", {}).get("error")  # what a validator of ours has raised
    if isinstance(ours, ParameterError):
        path += ours.path
    param = printed(tuple(path))
    if error["type"] == "unsupported":
        return _bad(f"{param} {error['ctx']['message']}", param, code="unsupported_parameter")
    if error["type"] == "extra_forbidden":
        hint = _hint(str(path[-1]), model) if len(path) == 1 else ""
        return _bad(f"unknown field {param!r}{hint}", param, code="unknown_parameter")
    if error["type"] == "missing":
        return _bad(f"{param} is missing", param, code="missing_parameter")
    if error["type"] == "model_type":
        return _bad(f"{param} must be an object, got {shown(error['input'])}", param)
    if ours is not None:
        return _bad(f"{param}: {ours.message if isinstance(ours, ParameterError) else ours}", param)
    message = error["msg"].replace("Input should be", "must be")  # pydantic's own text
    return _bad(f"{param}: {message}, got {shown(error['input'])}", param)


def _hint(name: str, model: type[Body]) -> str:
    if name in model.instead:
        return f". Instead, {model.instead[name]}"
    # A comparison with megabytes takes seconds.
    close = difflib.get_close_matches(name, model.model_fields, n=1) if len(name) <= MAX_SHOWN else []
    return f"; did you mean {close[0]!r}?" if close else ""


def _is_type_name(part: int | str) -> bool:
    """Whether a part of pydantic's location looks like the name of a type."""
    return isinstance(part, str) and (part in ("str", "int") or "[" in part or part[:1].isupper())
