"""What every request passes on its way in and out: its id, the key, and an answer where our own code failed.

Also the log of requests: one JSON object a line, on stderr.
"""

from __future__ import annotations

import hmac
import json
import logging
import re
import uuid
from http import HTTPStatus
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lopa_ascend.serve.api.errors import ApiError

logger = logging.getLogger("uvicorn.error")
request_logger = logging.getLogger("lopa_ascend.requests")

OPEN_ROUTES = ("/health", "/version")
"""Answered without the key: load balancers have none."""
SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def request_id(scope: Scope) -> str:
    """The id of the request under way: the client's X-Request-Id if it is a sane one, else ours."""
    return str(scope["state"]["request_id"])


def log_line(**values: Any) -> None:
    request_logger.info(json.dumps(values))


def open_request_log() -> None:
    """Without it the lines go wherever the root logger's go, which by default is nowhere."""
    if not request_logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(message)s"))
        request_logger.addHandler(handler)
        request_logger.setLevel(logging.INFO)
        request_logger.propagate = False


class Access:
    """ASGI middleware. Without ``api_key`` everyone may ask."""

    def __init__(self, app: ASGIApp, api_key: str | None):
        self._app = app
        self._expected = None if api_key is None else f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, begun = Headers(scope=scope), False
        given = headers.get("x-request-id", "")
        identity = given if SANE_ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = identity

        async def send_with_id(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                MutableHeaders(scope=message)["x-request-id"] = identity
            await send(message)

        if not self._may_pass(scope, headers):
            await _unauthorized()(scope, receive, send_with_id)
            return
        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            logger.exception("request %s failed", identity)
            if not begun:
                message = f"{type(error).__name__}: {error}"
                answer = ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, message, code="internal_error").response()
                await answer(scope, receive, send_with_id)

    def _may_pass(self, scope: Scope, headers: Headers) -> bool:
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if self._expected is None or path in OPEN_ROUTES:
            return True
        return hmac.compare_digest(headers.get("authorization", "").encode("latin-1"), self._expected)


def _unauthorized() -> ASGIApp:
    message = "the API key is missing or wrong; send Authorization: Bearer KEY"
    headers = {"WWW-Authenticate": "Bearer"}
    return ApiError(HTTPStatus.UNAUTHORIZED, message, code="invalid_api_key", headers=headers).response()
