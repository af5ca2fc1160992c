"""Every error leaves the server as OpenAI's ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

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


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(BaseModel):
    error: ErrorDetail


class ApiError(Exception):
    """An answer other than 200. ``param`` names the field of the body at fault, ``code`` the kind of error."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str = "invalid_value"):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"
        message = self.message if len(self.message) <= MAX_MESSAGE else self.message[:MAX_MESSAGE] + "..."
        detail = ErrorDetail(message=message, type=kind, param=self.param, code=self.code)
        return ErrorBody(error=detail).model_dump()

    def response(self, headers: dict[str, str] | None = None) -> JSONResponse:
        return JSONResponse(self.body(), self.status, headers)


def unavailable(message: str) -> ApiError:
    return ApiError(HTTPStatus.SERVICE_UNAVAILABLE, message, code="service_unavailable")


def _on_api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


def _on_parameter_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ParameterError)
    return ApiError(HTTPStatus.BAD_REQUEST, str(error), param=error.param).response()


def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message, code = f"{error.detail}: {request.method} {request.url.path}", HTTPStatus(error.status_code).name.lower()
    headers = dict(error.headers) if error.headers else None
    return ApiError(error.status_code, message, code=code).response(headers)


def _on_disconnect(_: Request, __: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


def _on_bug(_: Request, error: Exception) -> Response:
    # Starlette raises it again after this answer, so uvicorn logs the traceback.
    message = f"{type(error).__name__}: {error}"
    return ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, message, code="internal_error").response()


def install_handlers(app: FastAPI) -> None:
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(ParameterError, _on_parameter_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    app.add_exception_handler(Exception, _on_bug)
