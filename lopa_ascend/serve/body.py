"""Bytes of a request -> a validated model. Whatever is wrong with a body is an ``ApiError`` 400 (413 if too large)."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import Request

from lopa_ascend.serve.errors import ApiError
from lopa_ascend.serve.protocol import (
    UNSUPPORTED_CHAT,
    UNSUPPORTED_COMPLETION,
    UNSUPPORTED_MESSAGE,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
)

MAX_BODY = 8 * 2**20
"""Bytes."""
MAX_DEPTH = 16
"""Of nested objects and lists; no request needs more than five."""

T = TypeVar("T", bound=GenerationRequest)


async def read_body(request: Request) -> bytes:
    """Raises:
    ApiError: not JSON by its content type, or larger than ``MAX_BODY``.
    ClientDisconnect: the client went away.
    """
    content_type = request.headers.get("content-type", "")
    body, size = bytearray(), 0
    async for chunk in request.stream():
        # The rest of a large body is read all the same: clients look for the answer only after they have sent it.
        size += len(chunk)
        if size <= MAX_BODY:
            body += chunk
    if size > MAX_BODY:
        message = f"the body has {size} bytes, the limit is {MAX_BODY}"
        raise ApiError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message, code="request_too_large")
    if content_type.partition(";")[0].strip().lower() != "application/json":
        message = f"the content type is {content_type!r}; send Content-Type: application/json"
        raise ApiError(HTTPStatus.BAD_REQUEST, message, code="invalid_content_type")
    return bytes(body)


def parse_completion(raw: bytes) -> CompletionRequest:
    values = _load(raw)
    _drop_unsupported(values, UNSUPPORTED_COMPLETION)
    return _validate(CompletionRequest, values)


def parse_chat(raw: bytes) -> ChatRequest:
    values = _load(raw)
    _drop_unsupported(values, UNSUPPORTED_CHAT)
    messages = values.get("messages")
    for index, message in enumerate(messages if isinstance(messages, list) else []):
        if isinstance(message, dict):
            _drop_unsupported(message, dict.fromkeys(UNSUPPORTED_MESSAGE, (None,)), f"messages[{index}].")
    return _validate(ChatRequest, values)


def _bad(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    return ApiError(HTTPStatus.BAD_REQUEST, message, param=param, code=code)


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError("a number is too large")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("an object names a field twice")
    return values


def _load(raw: bytes) -> dict[str, Any]:
    try:
        text = raw.decode("utf-8")
        values = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite, object_pairs_hook=_unique)
    except RecursionError:
        raise _bad("the body is nested too deeply", code="invalid_json") from None
    except ValueError as error:  # malformed UTF-8 or JSON, or a number of more digits than Python reads
        raise _bad(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(values, dict):
        raise _bad(f"the body must be a JSON object, got a {type(values).__name__}", code="invalid_json")
    for name, value in values.items():
        _check_text({name: value}, name if _is_text(name) else None)
    return values


def _check_text(value: object, param: str | None, depth: int = 0) -> None:
    if depth > MAX_DEPTH:
        raise _bad(f"nested more than {MAX_DEPTH} deep", param, code="invalid_json")
    if isinstance(value, str) and not _is_text(value):
        name = param or "a field's name"
        raise _bad(f"{name} holds a lone surrogate or a NUL character, which are no text", param)
    if isinstance(value, dict):
        for name, item in value.items():
            _check_text(name, param, depth + 1)
            _check_text(item, param, depth + 1)
    if isinstance(value, list):
        for item in value:
            if not isinstance(item, int):
                _check_text(item, param, depth + 1)


def _is_text(value: str) -> bool:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return "\0" not in value


def _drop_unsupported(values: dict[str, Any], neutral: Mapping[str, tuple[Any, ...]], prefix: str = "") -> None:
    for name in neutral.keys() & values.keys():
        value = values.pop(name)
        # JSON's false is not its 0, Python's is.
        if value is None or any(value == v and isinstance(value, bool) == isinstance(v, bool) for v in neutral[name]):
            continue
        allowed = " or ".join(json.dumps(item) for item in neutral[name])
        message = f"{prefix}{name} is not supported; leave it out or send {allowed}"
        raise _bad(message, prefix + name, code="unsupported_parameter")


def _validate(model: type[T], values: dict[str, Any]) -> T:
    try:
        return model.model_validate(values)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False)
        # A misspelt field explains a missing one; of a union's members the one counts that got furthest, into the list.
        unknown = [e for e in errors if e["type"] == "extra_forbidden"]
        same = [e for e in errors if e["loc"][0] == errors[0]["loc"][0]]
        raise _explain(unknown[0] if unknown else max(same, key=lambda e: len(e["loc"])), model) from None


def _explain(error: ErrorDetails, model: type[GenerationRequest]) -> ApiError:
    # A union's errors name its members, e.g. ("content", "str"), of which no client knows.
    place = [part for part in error["loc"] if isinstance(part, int) or part not in ("str", "int") and "[" not in part]
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).removeprefix(".")
    if error["type"] == "extra_forbidden":
        close = difflib.get_close_matches(str(place[-1]), model.model_fields, n=1) if len(place) == 1 else []
        hint = f"; did you mean {close[0]!r}?" if close else ""
        return _bad(f"unknown field {param!r}{hint}", param, code="unknown_parameter")
    if error["type"] == "missing":
        return _bad(f"{param} is missing", param, code="missing_parameter")
    message = error["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    return _bad(f"{param}: {message}, got {error['input']!r:.100}", param)
