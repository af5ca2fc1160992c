"""Reads the body of a request into a validated model. Every mistake in a body becomes an ``ApiError``."""

from __future__ import annotations

import difflib
import json
import math
from http import HTTPStatus
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from lopa_ascend.config.files import shown
from lopa_ascend.config.removed import instead_of
from lopa_ascend.serve.api.errors import ApiError
from lopa_ascend.serve.api.openai_responses_body import UNSUPPORTED_RESPONSE, ResponseRequest
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

MAX_DEPTH = 16
"""Most levels of nested objects and lists; requests need five."""
MAX_SHOWN = 100
"""Most characters of a field's name that is compared with the known ones."""

T = TypeVar("T", bound=BaseModel)


# ---- one function for each kind of body ------------------------------------------------------------------------------


def parse_completion(raw: bytes) -> CompletionRequest:
    return _completion(CompletionRequest, raw, UNSUPPORTED_COMPLETION)


def parse_chat(raw: bytes) -> ChatRequest:
    return _chat(ChatRequest, raw, UNSUPPORTED_CHAT)


def parse_response(raw: bytes) -> ResponseRequest:
    values = _load(raw)
    _drop_tools_without_choice(values)
    _drop_unsupported(values, UNSUPPORTED_RESPONSE)
    return _validate(ResponseRequest, values)


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
    _drop_best_of_all(values)
    _drop_unsupported(values, unsupported)
    if values.get("logprobs") is False:
        del values["logprobs"]  # clients of the chat API switch them off like this
    return _validate(model, values)


def _chat(model: type[T], raw: bytes, unsupported: NeutralValues) -> T:
    values = _load(raw)
    _drop_tools_without_choice(values)
    _drop_unsupported(values, unsupported)
    _drop_from_messages(values)
    return _validate(model, values)


# ---- JSON ------------------------------------------------------------------------------------------------------------


def _bad(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    return ApiError(HTTPStatus.BAD_REQUEST, message, param=param, code=code)


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def _finite_number(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError("a number is too large")
    # JSON does not distinguish 5.0 from 5. No field takes larger integers, whose hundreds of digits take long to write.
    return int(value) if value.is_integer() and abs(value) < 2**63 else value


def _object_of_unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("an object names a field twice")
    return values


def _load(raw: bytes) -> dict[str, Any]:
    try:
        text = raw.decode("utf-8")
        values = json.loads(
            text, parse_constant=_refuse_constant, parse_float=_finite_number, object_pairs_hook=_object_of_unique_names
        )
    except RecursionError:
        raise _bad("the body is nested too deeply", code="invalid_json") from None
    except ValueError as error:  # malformed UTF-8 or JSON, or a number with more digits than Python reads
        raise _bad(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(values, dict):
        raise _bad(f"the body must be a JSON object, not a {type(values).__name__}", code="invalid_json")
    for name, value in values.items():
        _check_strings({name: value}, name if _is_text(name) else None)
    return {name: value for name, value in values.items() if value is not None}


def _check_strings(value: object, param: str | None, depth: int = 0) -> None:
    """Refuses strings that are not text, and deep nesting. ``param`` is the field of the body that holds the value."""
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
    """Whether a string can be written as UTF-8 and has no NUL character."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return "\0" not in value


# ---- fields ----------------------------------------------------------------------------------------------------------


def _drop_tools_without_choice(values: dict[str, Any]) -> None:
    """Removes the list of tools if no tool may be called: then the list changes nothing."""
    if values.get("tool_choice") == "none" and isinstance(values.get("tools"), list):
        del values["tools"]


def _drop_best_of_all(values: dict[str, Any]) -> None:
    """Removes ``best_of`` if it is ``n``: the best n of n answers are all of them. LangChain sends it like this."""
    best_of = values.get("best_of")
    if type(best_of) is int and best_of == values.get("n"):
        del values["best_of"]


def _drop_from_messages(values: dict[str, Any]) -> None:
    """Removes the unsupported fields of messages, which must be null or empty."""
    messages = values.get("messages")
    for index, message in enumerate(messages if isinstance(messages, list) else []):
        if isinstance(message, dict):
            _drop_unsupported(message, UNSUPPORTED_MESSAGE, f"messages[{index}].")


def _drop_unsupported(values: dict[str, Any], neutral: NeutralValues, prefix: str = "") -> None:
    """Removes unsupported fields, whose values must be such that they change nothing.

    Args:
        values: an object of the body.
        neutral: the unsupported fields, each with the values besides null that change nothing.
        prefix: what stands before the field's name in errors.

    Raises:
        ApiError: an unsupported field has another value.
    """
    for name in neutral.keys() & values.keys():
        value = values.pop(name)
        if value is None or any(_are_equal_in_json(value, item) for item in neutral[name]):
            continue
        allowed = " or ".join(json.dumps(item) for item in neutral[name] or (None,))
        message = f"{prefix}{name} is not supported here; leave it out or send {allowed}"
        raise _bad(message, prefix + name, code="unsupported_parameter")


def _are_equal_in_json(a: object, b: object) -> bool:
    """Whether two values are equal, where false is not 0 as it is in Python."""
    return a == b and isinstance(a, bool) == isinstance(b, bool)


def _validate(model: type[T], values: dict[str, Any]) -> T:
    try:
        return model.model_validate(values)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False)
        # An unknown field comes first: a misspelt name explains why another field is missing.
        unknown = [e for e in errors if e["type"] == "extra_forbidden"]
        # A field that may have several types has an error for each; the longest location is the closest match.
        of_first_field = [e for e in errors if e["loc"][0] == errors[0]["loc"][0]]
        closest = max(of_first_field, key=lambda e: len(e["loc"]))
        raise _explain(unknown[0] if unknown else closest, model) from None


def _explain(error: ErrorDetails, model: type[BaseModel]) -> ApiError:
    """pydantic's error in our words, with the name of the field as clients know it."""
    # In a field of several types the location also names the type, e.g. ("content", "str"); but it begins with a field,
    # and ends with an unknown one.
    location = error["loc"]
    fields = {0, len(location) - 1} if error["type"] == "extra_forbidden" else {0}
    path = [part for place, part in enumerate(location) if place in fields or not _is_type_name(part)]
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")
    if error["type"] == "extra_forbidden":
        name = str(path[-1])
        if len(path) == 1 and (removed := instead_of(name)):
            return _bad(f"unknown field {param!r}{removed}", param, code="unknown_parameter")
        is_likely = len(path) == 1 and len(name) <= MAX_SHOWN  # a comparison with megabytes takes seconds
        close = difflib.get_close_matches(name, model.model_fields, n=1) if is_likely else []
        hint = f"; did you mean {close[0]!r}?" if close else ""
        return _bad(f"unknown field {param!r}{hint}", param, code="unknown_parameter")
    if error["type"] == "missing":
        return _bad(f"{param} is missing", param, code="missing_parameter")
    message = error["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    got = "" if ", got " in message else f", got {shown(error['input'])}"  # our own kinds say it themselves
    return _bad(f"{param}: {message}{got}", param)


def _is_type_name(part: int | str) -> bool:
    """Whether a part of pydantic's location looks like the name of a type."""
    return isinstance(part, str) and (part in ("str", "int") or "[" in part)
