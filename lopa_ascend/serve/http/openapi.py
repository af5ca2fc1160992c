"""The OpenAPI document, /openapi.json.

``http.body`` reads and checks the bodies of requests, because FastAPI would answer mistakes with 422. So FastAPI does
not know their schemas; they are added here, together with the limits of the served model.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema

from lopa_ascend.admission import Limits
from lopa_ascend.config import DecodingParams
from lopa_ascend.serve.http.access import OPEN_ROUTES
from lopa_ascend.serve.http.api_error import error_body

TEXT_WITHOUT_NUL = r"^[^\u0000]*$"
SCHEMAS = "#/components/schemas/{model}"
READING = (400, 408, 413, 415, 503)
"""Statuses of errors that any request with a body can get."""


def events(description: str) -> dict[str, Any]:
    data = {"type": "string", "description": description}
    event = {"type": "object", "properties": {"data": data}, "required": ["data"]}
    return {"text/event-stream": {"schema": event}}


def errors(*statuses: int, route: str = "") -> dict[int | str, dict[str, Any]]:
    """The errors of a route, for ``responses``. Its path decides their form."""
    return {status: {"model": error_body(route)} for status in statuses}


def body_of(model: type[BaseModel], *, required: bool = True) -> dict[str, Any]:
    """For ``openapi_extra``."""
    schema = {"$ref": SCHEMAS.format(model=model.__name__)}
    return {"requestBody": {"required": required, "content": {"application/json": {"schema": schema}}}}


def document(
    app: FastAPI,
    bodies: Sequence[type[BaseModel]],
    parts: Sequence[type[BaseModel]],
    limits: Limits,
    *,
    with_key: bool,
) -> None:
    """Makes ``app.openapi`` return the complete document, with the bodies of routes, schemas of events (``parts``), the
    limits of the model and, ``with_key``, the API key."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
            schema["components"]["schemas"] |= _schemas(bodies, limits) | _definitions(parts, "serialization")
            _finish_operations(schema, with_key)
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _schemas(bodies: Sequence[type[BaseModel]], limits: Limits) -> dict[str, Any]:
    definitions = _definitions(bodies, "validation")
    for model in bodies:
        _limit_values(definitions[model.__name__]["properties"], limits)
    _refuse_nul(definitions)
    return definitions


def _definitions(models: Sequence[type[BaseModel]], mode: JsonSchemaMode) -> dict[str, Any]:
    _, schemas = models_json_schema([(model, mode) for model in models], ref_template=SCHEMAS)
    return copy.deepcopy(schemas["$defs"])  # pydantic returns parts of the models' own definitions


def _limit_values(properties: dict[str, Any], limits: Limits) -> None:
    parameters = DecodingParams.parameters()
    for name, maximum in limits.maxima().items():
        for field in properties.keys() & {name, *parameters[name].aliases}:
            properties[field].setdefault("maximum", maximum)  # a route may take more, and give less
    for field in properties.keys() & {"prompt", "tokens", "eos_token_id", "bad_words"}:
        _limit_token_ids(properties[field], limits.vocab_size - 1)


def _limit_token_ids(schema: Any, maximum: int) -> None:
    if isinstance(schema, dict):
        if schema.get("type") == "integer":
            schema["maximum"] = maximum
        for part in schema.values():
            _limit_token_ids(part, maximum)
    if isinstance(schema, list):
        for part in schema:
            _limit_token_ids(part, maximum)


def _refuse_nul(schema: Any) -> None:
    """Strings refuse NUL characters, as ``http.body`` does."""
    if isinstance(schema, dict):
        if schema.get("type") == "string" and not schema.keys() & {"enum", "const"}:
            schema["pattern"] = TEXT_WITHOUT_NUL
        for part in schema.values():
            _refuse_nul(part)
    if isinstance(schema, list):
        for part in schema:
            _refuse_nul(part)


def _finish_operations(schema: dict[str, Any], with_key: bool) -> None:
    """Removes FastAPI's 422 from every route; adds the API key and its 401."""
    if with_key:
        own_header = {"type": "apiKey", "in": "header", "name": "x-api-key"}
        schemes = {"key": {"type": "http", "scheme": "bearer"}, "x-api-key": own_header}
        schema["components"]["securitySchemes"] = schemes
    for path, operations in schema["paths"].items():
        error = {"application/json": {"schema": {"$ref": SCHEMAS.format(model=error_body(path).__name__)}}}
        for operation in operations.values():
            operation["responses"].pop("422", None)
            if with_key and path not in OPEN_ROUTES:
                operation["security"] = [{"key": []}, {"x-api-key": []}]
                operation["responses"]["401"] = {"description": "Unauthorized", "content": error}
