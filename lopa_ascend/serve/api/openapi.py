"""The OpenAPI document, /openapi.json.

The bodies of requests are read and checked by ``body`` rather than by FastAPI, which would answer mistakes with 422. So
FastAPI does not know their schemas; they are added here, together with the limits of the served model.
"""

from __future__ import annotations

import copy
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from lopa_ascend.config import DecodingParams, Limits
from lopa_ascend.serve.api.access import OPEN_ROUTES
from lopa_ascend.serve.api.diffusion import DiffusionDone, DiffusionStart, DiffusionStep
from lopa_ascend.serve.api.errors import ErrorBody
from lopa_ascend.serve.api.openai_responses_body import ResponseRequest
from lopa_ascend.serve.api.protocol import (
    AbortRequest,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    DiffusionChatRequest,
    DiffusionCompletionRequest,
    TokenizeRequest,
)
from lopa_ascend.serve.config import ServeConfig

TEXT_WITHOUT_NUL = r"^[^\u0000]*$"
SCHEMAS = "#/components/schemas/{model}"
DIFFUSION_SCHEMAS: tuple[type[BaseModel], ...] = (DiffusionStart, DiffusionStep, DiffusionDone)
"""Events, which no operation names as its body or its answer."""
BODIES: tuple[type[BaseModel], ...] = (
    CompletionRequest,
    ChatRequest,
    ResponseRequest,
    DiffusionCompletionRequest,
    DiffusionChatRequest,
    TokenizeRequest,
    DetokenizeRequest,
    AbortRequest,
)
READING = (400, 408, 413, 503)
"""Statuses of errors with the body of any request."""
GENERATING = (*READING, 404, 500, 504)
"""Statuses of errors of a request for text."""


def _events(description: str) -> dict[str, Any]:
    """The content of an answer that is a stream of events."""
    data = {"type": "string", "description": description}
    event = {"type": "object", "properties": {"data": data}, "required": ["data"]}
    return {"text/event-stream": {"schema": event}}


EVENTS = _events("With stream: true. Each event holds one chunk as JSON; the last event is [DONE].")
RESPONSE_EVENTS = _events(
    "With stream: true. Each event is named by its type and holds JSON with a sequence_number: response.created, "
    "response.in_progress, response.output_item.added, response.content_part.added, a response.output_text.delta for "
    "every piece of text, response.output_text.done, response.content_part.done, response.output_item.done, and last "
    "response.completed or response.incomplete with the whole response. If the request fails, an error event and "
    "response.failed come instead of what is left."
)
DIFFUSION_EVENTS = _events(
    "JSON: a diffusion.start (schema DiffusionStart), a diffusion.step for each forward pass (DiffusionStep), then "
    "diffusion.done (DiffusionDone); the last event is [DONE]. If the request fails, an event with an error comes "
    "instead of diffusion.done."
)
PLAIN_TEXT = {"text/plain": {"schema": {"type": "string"}}}


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The errors that a route may answer with, for its ``responses``."""
    return {status: {"model": ErrorBody} for status in statuses}


def body_of(model: type[BaseModel]) -> dict[str, Any]:
    """The body that a route takes, for its ``openapi_extra``."""
    schema = {"$ref": SCHEMAS.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def document(app: FastAPI, limits: Limits, config: ServeConfig) -> None:
    """Makes ``app.openapi`` return the complete document.

    Args:
        app: the application with all its routes.
        limits: what the served model can take.
        config: how the server was started.
    """

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
            _add_bodies(app.openapi_schema, limits)
            _finish_operations(app.openapi_schema, with_key=config.api_key is not None)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _add_bodies(schema: dict[str, Any], limits: Limits) -> None:
    _, bodies = models_json_schema([(model, "validation") for model in BODIES], ref_template=SCHEMAS)
    _, events = models_json_schema([(model, "serialization") for model in DIFFUSION_SCHEMAS], ref_template=SCHEMAS)
    # Copies: pydantic returns parts of the models' own definitions, which are changed below.
    schema["components"]["schemas"].update(copy.deepcopy({**events["$defs"], **bodies["$defs"]}))
    for model in BODIES:
        body = schema["components"]["schemas"][model.__name__]
        _limit_values(body["properties"], limits)
    for name in bodies["$defs"]:
        _refuse_nul(schema["components"]["schemas"][name])


def _limit_values(properties: dict[str, Any], limits: Limits) -> None:
    """Adds the largest values that the served model can take."""
    parameters = DecodingParams.parameters()
    for name, maximum in limits.maxima().items():
        for field in properties.keys() & {name, *parameters[name].aliases}:
            properties[field]["maximum"] = maximum
    for field in properties.keys() & {"prompt", "tokens", "eos_token_id", "bad_words"}:
        _limit_token_ids(properties[field], limits.vocab_size - 1)


def _limit_token_ids(schema: Any, maximum: int) -> None:
    """Limits every integer in the schema of a field with token ids."""
    if isinstance(schema, dict):
        if schema.get("type") == "integer":
            schema["maximum"] = maximum
        for part in schema.values():
            _limit_token_ids(part, maximum)
    if isinstance(schema, list):
        for part in schema:
            _limit_token_ids(part, maximum)


def _refuse_nul(schema: Any) -> None:
    """Makes every string of a schema refuse NUL characters, as ``body`` does."""
    if isinstance(schema, dict):
        if schema.get("type") == "string" and not schema.keys() & {"enum", "const"}:
            schema["pattern"] = TEXT_WITHOUT_NUL
        for part in schema.values():
            _refuse_nul(part)
    if isinstance(schema, list):
        for part in schema:
            _refuse_nul(part)


def _finish_operations(schema: dict[str, Any], with_key: bool) -> None:
    """Removes FastAPI's 422 from every route; adds the API key and its 401 where a key is needed."""
    if with_key:
        schema["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    error = {"application/json": {"schema": {"$ref": SCHEMAS.format(model=ErrorBody.__name__)}}}
    for path, operations in schema["paths"].items():
        for operation in operations.values():
            operation["responses"].pop("422", None)
            if with_key and path not in OPEN_ROUTES:
                operation["security"] = [{"key": []}]
                operation["responses"]["401"] = {"description": "Unauthorized", "content": error}
