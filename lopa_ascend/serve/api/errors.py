"""Every error leaves the server as OpenAI's ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from lopa_ascend.config import ParameterError

MAX_MESSAGE = 1000
"""Characters; messages quote the client's values, and those can be megabytes."""
CLIENT_CLOSED_REQUEST = 499
RETRY_AFTER = 1
"""Seconds after which a client that got a 503 may ask again."""

KINDS = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
    HTTPStatus.GATEWAY_TIMEOUT: "timeout_error",
}
"""``type`` by status; "invalid_request_error" for the other 4xx, "server_error" for the other 5xx."""


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(BaseModel):
    error: ErrorDetail


class ApiError(Exception):
    """An answer other than 200. ``param`` names the field of the body at fault, ``code`` the kind of error."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str = "invalid_value",
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        client_error = self.status < HTTPStatus.INTERNAL_SERVER_ERROR
        kind = KINDS.get(HTTPStatus(self.status), "invalid_request_error" if client_error else "server_error")
        message = self.message if len(self.message) <= MAX_MESSAGE else self.message[:MAX_MESSAGE] + "..."
        detail = ErrorDetail(message=message, type=kind, param=self.param, code=self.code)
        return ErrorBody(error=detail).model_dump()

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status, self.headers)


def unavailable(message: str, code: str = "service_unavailable") -> ApiError:
    """A 503 that tells when to try again."""
    headers = {"Retry-After": str(RETRY_AFTER)}
    return ApiError(HTTPStatus.SERVICE_UNAVAILABLE, message, code=code, headers=headers)


def _on_api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


def _on_parameter_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ParameterError)
    return ApiError(HTTPStatus.BAD_REQUEST, str(error), param=error.param).response()


def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message, code = f"{error.detail}: {request.method} {request.url.path}", HTTPStatus(error.status_code).name.lower()
    return ApiError(error.status_code, message, code=code, headers=error.headers).response()


def _on_disconnect(_: Request, __: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


def install_handlers(app: FastAPI) -> None:
    """Of every exception that a route may raise; whatever else there is, is a bug, and ``access`` answers it."""
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(ParameterError, _on_parameter_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
