"""Errors of the HTTP API. They have OpenAI's form ``{"error": {"message", "type", "param", "code"}}``, or on the routes
of Anthropic's API its form ``{"type": "error", "error": {"type", "message", "details"}, "request_id"}``."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Literal

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Scope

from lopa_ascend.config import ContextLengthError, ParameterError

MAX_TEXT = 1000
"""Most characters of a message or of the name of a field. Both quote bodies, which can be megabytes long."""
CLIENT_CLOSED_REQUEST = 499
"""Status in the log if the client has closed the connection."""
RETRY_AFTER = 1
"""Seconds after which a client that got a 503 may try again."""

CLOSE = {"Connection": "close"}

TYPES = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
    HTTPStatus.GATEWAY_TIMEOUT: "timeout_error",
}
"""``type`` by status. For other statuses it is "invalid_request_error" (4xx) or "server_error" (5xx)."""
MESSAGES = "/v1/messages"
MESSAGES_TYPES = {
    **TYPES,
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
}
"""``type`` by status, there; for others "invalid_request_error" or "api_error"."""


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(BaseModel):
    error: ErrorDetail


class MessagesErrorCode(BaseModel):
    error_code: str


class MessagesErrorDetail(BaseModel):
    type: str
    message: str
    details: MessagesErrorCode


class MessagesErrorBody(BaseModel):
    type: Literal["error"] = "error"
    error: MessagesErrorDetail
    request_id: str | None


def error_body(route: str) -> type[ErrorBody | MessagesErrorBody]:
    return MessagesErrorBody if route == MESSAGES or route.startswith(f"{MESSAGES}/") else ErrorBody


class ApiError(Exception):
    """An answer with an error. ``message`` says what is wrong, what is allowed and what to do; ``param`` is the wrong
    field, if it is one; ``code`` names the kind for programs."""

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
        other = "invalid_request_error" if self.status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"
        error_type = TYPES.get(HTTPStatus(self.status), other)
        param = None if self.param is None else _shortened(self.param)
        detail = ErrorDetail(message=_shortened(self.message), type=error_type, param=param, code=self.code)
        return ErrorBody(error=detail).model_dump()

    def messages_body(self, request_id: str | None = None) -> dict[str, Any]:
        other = "invalid_request_error" if self.status < HTTPStatus.INTERNAL_SERVER_ERROR else "api_error"
        error_type = MESSAGES_TYPES.get(HTTPStatus(self.status), other)
        code = MessagesErrorCode(error_code=self.code)
        # By these words Claude Code knows that it must shorten the conversation.
        known_by = "prompt is too long: " if self.code == "context_length_exceeded" else ""
        detail = MessagesErrorDetail(type=error_type, message=_shortened(known_by + self.message), details=code)
        return MessagesErrorBody(error=detail, request_id=request_id).model_dump()

    def response(self, scope: Scope) -> JSONResponse:
        """The answer to a request; its route decides the form."""
        route = scope["path"].removeprefix(scope.get("root_path", ""))
        is_of_messages = error_body(route) is MessagesErrorBody
        body = self.messages_body(scope["state"]["request_id"]) if is_of_messages else self.body()
        return JSONResponse(body, self.status, self.headers)


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + "..."


def unavailable(message: str, code: str = "service_unavailable") -> ApiError:
    headers = {"Retry-After": str(RETRY_AFTER)}
    return ApiError(HTTPStatus.SERVICE_UNAVAILABLE, message, code=code, headers=headers)


def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response(request.scope)


def _on_parameter_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ParameterError)
    code = "context_length_exceeded" if isinstance(error, ContextLengthError) else "invalid_value"
    return ApiError(HTTPStatus.BAD_REQUEST, str(error), param=error.param, code=code).response(request.scope)


def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message, code = f"{error.detail}: {request.method} {request.url.path}", HTTPStatus(error.status_code).name.lower()
    return ApiError(error.status_code, message, code=code, headers=error.headers).response(request.scope)


def _on_disconnect(_: Request, __: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


def install_handlers(app: FastAPI) -> None:
    """Adds a handler for each exception that routes raise on purpose. Others are bugs, which ``Access`` answers."""
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(ParameterError, _on_parameter_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
