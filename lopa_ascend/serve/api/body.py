"""Bytes of a request -> a validated model. Whatever is wrong with a body is an ``ApiError`` 400 (413 if too large)."""

from __future__ import annotations

import asyncio
import difflib
import json
import math
from http import HTTPStatus
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import Request

from lopa_ascend.serve.api.errors import ApiError
from lopa_ascend.serve.api.protocol import (
    UNSUPPORTED_CHAT,
    UNSUPPORTED_COMPLETION,
    UNSUPPORTED_DIFFUSION,
    UNSUPPORTED_MESSAGE,
    UNSUPPORTED_TEMPLATE,
    AbortRequest,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    DiffusionChatRequest,
    DiffusionCompletionRequest,
    TokenizeRequest,
)
from lopa_ascend.serve.api.schema import NeutralValues

PATIENCE = 30.0
"""Seconds between two pieces of a body."""
DEADLINE = 300.0
"""Seconds for a whole body."""
DRAIN = 8
"""How many times the size limit is read and thrown away: clients look for the answer only after they have sent it."""
MAX_DEPTH = 16
"""Of nested objects and lists; no request needs more than five."""
HANG_UP = {"Connection": "close"}

T = TypeVar("T", bound=BaseModel)


async def read_body(request: Request, limit: int) -> bytes:
    """Raises:
    ApiError: 400, not JSON by its content type; 408, the client is too slow; 413, more than ``limit`` bytes.
    ClientDisconnect: the client went away.
    """
    content_type = request.headers.get("content-type", "")
    announced = request.headers.get("content-length", "0")
    size = int(announced) if announced.isdecimal() else 0
    if size > DRAIN * limit:
        raise _too_large(size, limit)
    body = await _read(request, limit)
    if content_type.partition(";")[0].strip().lower() != "application/json":
        message = f"the content type is {content_type!r}; send Content-Type: application/json"
        raise ApiError(HTTPStatus.BAD_REQUEST, message, code="invalid_content_type")
    return body


async def _read(request: Request, limit: int) -> bytes:
    body, size = bytearray(), 0
    pieces = aiter(request.stream())
    deadline = asyncio.get_running_loop().time() + DEADLINE
    while True:
        patience = min(PATIENCE, deadline - asyncio.get_running_loop().time())
        try:
            piece = await asyncio.wait_for(anext(pieces), patience)
        except StopAsyncIteration:
            break
        except asyncio.TimeoutError:
            message = f"the body did not arrive; {size} bytes of it did"
            raise ApiError(HTTPStatus.REQUEST_TIMEOUT, message, code="body_timeout", headers=HANG_UP) from None
        size += len(piece)
        if size > DRAIN * limit:
            break
        if size <= limit:
            body += piece
    if size > limit:
        raise _too_large(size, limit)
    return bytes(body)


def _too_large(size: int, limit: int) -> ApiError:
    message = f"the body has {size} bytes or more, the limit is {limit}"
    headers = HANG_UP if size > DRAIN * limit else None
    return ApiError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message, code="request_too_large", headers=headers)


def parse_completion(raw: bytes) -> CompletionRequest:
    return _completion(CompletionRequest, raw, UNSUPPORTED_COMPLETION)


def parse_chat(raw: bytes) -> ChatRequest:
    return _chat(ChatRequest, raw, UNSUPPORTED_CHAT)


def parse_diffusion_completion(raw: bytes) -> CompletionRequest:
    return _completion(DiffusionCompletionRequest, raw, {**UNSUPPORTED_COMPLETION, **UNSUPPORTED_DIFFUSION})


def parse_diffusion_chat(raw: bytes) -> ChatRequest:
    return _chat(DiffusionChatRequest, raw, {**UNSUPPORTED_CHAT, **UNSUPPORTED_DIFFUSION})


def parse_tokenize(raw: bytes) -> TokenizeRequest:
    values = _load(raw)
    _drop_unsupported(values, UNSUPPORTED_TEMPLATE)
    _drop_from_messages(values)
    return _validate(TokenizeRequest, values)


def parse_detokenize(raw: bytes) -> DetokenizeRequest:
    return _validate(DetokenizeRequest, _load(raw))


def parse_abort(raw: bytes) -> AbortRequest:
    return _validate(AbortRequest, _load(raw))


def _completion(model: type[T], raw: bytes, unsupported: NeutralValues) -> T:
    values = _load(raw)
    _drop_unsupported(values, unsupported)
    if values.get("logprobs") is False:
        del values["logprobs"]  # as chat clients switch them off
    return _validate(model, values)


def _chat(model: type[T], raw: bytes, unsupported: NeutralValues) -> T:
    values = _load(raw)
    _drop_unsupported(values, unsupported)
    _drop_from_messages(values)
    return _validate(model, values)


def _bad(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    return ApiError(HTTPStatus.BAD_REQUEST, message, param=param, code=code)


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError("a number is too large")
    return int(value) if value.is_integer() else value  # JSON has no other way to tell integers


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


def _drop_from_messages(values: dict[str, Any]) -> None:
    messages = values.get("messages")
    for index, message in enumerate(messages if isinstance(messages, list) else []):
        if isinstance(message, dict):
            _drop_unsupported(message, dict.fromkeys(UNSUPPORTED_MESSAGE, ()), f"messages[{index}].")


def _drop_unsupported(values: dict[str, Any], neutral: NeutralValues, prefix: str = "") -> None:
    for name in neutral.keys() & values.keys():
        value = values.pop(name)
        # JSON's false is not its 0, Python's is.
        if value is None or any(value == v and isinstance(value, bool) == isinstance(v, bool) for v in neutral[name]):
            continue
        allowed = " or ".join(json.dumps(item) for item in neutral[name] or (None,))
        message = f"{prefix}{name} is not supported here; leave it out or send {allowed}"
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


def _explain(error: ErrorDetails, model: type[BaseModel]) -> ApiError:
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
