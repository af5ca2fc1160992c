"""/openapi.json.

Bodies are read and checked by our own code (FastAPI would answer 422), so their schemas are added here, with the served
model's limits filled in.
"""

from __future__ import annotations

import copy
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from lopa_ascend.config import Limits
from lopa_ascend.serve.api.access import OPEN_ROUTES
from lopa_ascend.serve.api.errors import ErrorBody
from lopa_ascend.serve.api.protocol import (
    AbortRequest,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    DiffusionChatRequest,
    DiffusionCompletionRequest,
    TokenizeRequest,
)

NO_NUL = r"^[^\u0000]*$"
SCHEMAS = "#/components/schemas/{model}"
BODIES: tuple[type[BaseModel], ...] = (
    CompletionRequest,
    ChatRequest,
    DiffusionCompletionRequest,
    DiffusionChatRequest,
    TokenizeRequest,
    DetokenizeRequest,
    AbortRequest,
)
READING = (400, 408, 413)
"""What can be wrong with any body."""
GENERATING = (*READING, 404, 500, 503, 504)


def _events(description: str) -> dict[str, Any]:
    data = {"type": "string", "description": description}
    event = {"type": "object", "properties": {"data": data}, "required": ["data"]}
    return {"text/event-stream": {"schema": event}}


EVENTS = _events("With stream: one chunk of JSON an event, then [DONE].")
DIFFUSION_EVENTS = _events(
    "JSON: one diffusion.step for each forward pass, then diffusion.done; then [DONE]. Positions count from the start "
    "of the prompt. Branch 0 is the anchor, r the lookahead branch of rank r; fills are those after the pass, without "
    "the winning branch's own lookahead."
)
PLAIN_TEXT = {"text/plain": {"schema": {"type": "string"}}}


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """For a route's ``responses``."""
    return {status: {"model": ErrorBody} for status in statuses}


def body_of(model: type[BaseModel]) -> dict[str, Any]:
    """For a route's ``openapi_extra``."""
    schema = {"$ref": SCHEMAS.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def document(app: FastAPI, limits: Limits, *, with_key: bool) -> None:
    """Makes ``app.openapi`` complete."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
            _add_bodies(app.openapi_schema, limits)
            _finish_operations(app.openapi_schema, with_key)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _add_bodies(schema: dict[str, Any], limits: Limits) -> None:
    _, bodies = models_json_schema([(model, "validation") for model in BODIES], ref_template=SCHEMAS)
    # A copy, for pydantic hands out parts of the models' own definitions.
    schema["components"]["schemas"].update(copy.deepcopy(bodies["$defs"]))
    for model in BODIES:
        body = schema["components"]["schemas"][model.__name__]
        _fill_in(body["properties"], limits)
    for name in bodies["$defs"]:
        _refuse_nul(schema["components"]["schemas"][name])


def _fill_in(properties: dict[str, Any], limits: Limits) -> None:
    """The served model's limits as maxima."""
    longest = {"maximum": limits.max_model_len - 1}
    maxima = {
        **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_new_tokens"), longest),
        **dict.fromkeys(("min_tokens", "min_new_tokens"), longest),
        "num_branches": {"maximum": limits.max_num_branches},
    }
    for name in maxima.keys() & properties.keys():
        properties[name] |= maxima[name]
    for name in ("prompt", "tokens", "eos_token_id"):
        if name in properties:
            _limit_ids(properties[name], limits.vocab_size - 1)


def _refuse_nul(schema: Any) -> None:
    """In every string, as ``body`` does."""
    if isinstance(schema, dict):
        if schema.get("type") == "string" and not schema.keys() & {"enum", "const"}:
            schema["pattern"] = NO_NUL
        for part in schema.values():
            _refuse_nul(part)
    if isinstance(schema, list):
        for part in schema:
            _refuse_nul(part)


def _limit_ids(schema: Any, last: int) -> None:
    if isinstance(schema, dict):
        if schema.get("type") == "integer":
            schema["maximum"] = last
        for part in schema.values():
            _limit_ids(part, last)
    if isinstance(schema, list):
        for part in schema:
            _limit_ids(part, last)


def _finish_operations(schema: dict[str, Any], with_key: bool) -> None:
    if with_key:
        schema["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    error = {"application/json": {"schema": {"$ref": SCHEMAS.format(model=ErrorBody.__name__)}}}
    for path, operations in schema["paths"].items():
        for operation in operations.values():
            operation["responses"].pop("422", None)
            if with_key and path not in OPEN_ROUTES:
                operation["security"] = [{"key": []}]
                operation["responses"]["401"] = {"description": "Unauthorized", "content": error}
