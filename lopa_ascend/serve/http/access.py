"""Who may call the server: keys, names of hosts, origins of web pages. Also the ids of requests, and their log."""

from __future__ import annotations

import hmac
import json
import logging
import re
import uuid
from collections.abc import Collection, Mapping, Sequence
from http import HTTPStatus
from ipaddress import IPv6Address, ip_address
from typing import Any
from urllib.parse import urlsplit

from fastapi import FastAPI
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lopa_ascend.serve.config import ServeConfig
from lopa_ascend.serve.http.api_error import CLOSE, ApiError
from lopa_ascend.serve.http.body import check_json

logger = logging.getLogger("uvicorn.error")
request_logger = logging.getLogger("lopa_ascend.requests")

OPEN_ROUTES = ("/health", "/ready", "/version")
"""Answered without a key, and for any Host: load balancers have no key, and names of their own."""
PAGE = re.compile("/|/view/[^/]+")
"""Routes of the live view, answered without a key: a browser that opens an address has none."""
SHORT_BODY = 2**16
"""Bytes of a body that may still come after an answer."""
PORT = re.compile(r":\d*$")
VALID_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
READS = ("GET", "HEAD", "OPTIONS")
NOT_FRAMED = "frame-ancestors 'none'"
"""The content policy of answers without one: no page may show them in a frame, and so catch clicks."""
LOCAL_HOSTS = ("localhost", "127.0.0.1", "[::1]")
LOCAL_ORIGIN = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"


def request_id(scope: Scope) -> str:
    """The client's X-Request-Id if that is valid, else a random one."""
    return str(scope["state"]["request_id"])


def log_line(**values: Any) -> None:
    request_logger.info(json.dumps(values))


def set_up_request_log() -> None:
    """The log goes to stderr; by default the root logger would drop it."""
    if not request_logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(message)s"))
        request_logger.addHandler(handler)
        request_logger.setLevel(logging.INFO)
        request_logger.propagate = False


class Access:
    """ASGI middleware that gives every request an id, checks its key and host, tidies its path, and answers unexpected
    exceptions. ``hosts`` may stand in the header Host, without ports; None: any."""

    def __init__(self, app: ASGIApp, api_key: str | None, hosts: Collection[str] | None = None):
        self._app = app
        self._key = None if api_key is None else api_key.encode()
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # Clients that join a base URL and a route write doubled slashes, and slashes at the end.
        path = re.sub("/+", "/", scope["path"]).rstrip("/")
        scope["path"] = path if path != scope.get("root_path", "") else f"{path}/"
        headers, response_started = Headers(scope=scope), False
        sent_id = headers.get("x-request-id", "")
        own_id = sent_id if VALID_ID.fullmatch(sent_id) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = own_id

        async def send_with_id(message: Message) -> None:
            nonlocal response_started
            if message["type"] == "http.response.start":
                response_started = True
                answered = MutableHeaders(scope=message)
                answered["x-request-id"] = answered["request-id"] = own_id  # the latter is Anthropic's
                answered.setdefault("content-security-policy", NOT_FRAMED)
            await send(message)

        refusal = self._refusal(scope["path"].removeprefix(scope.get("root_path", "")), scope["method"], headers)
        if scope["method"] == "HEAD":  # uvicorn drops the body of the answer
            scope = {**scope, "method": "GET"}
        if refusal is not None:
            await refusal.response(scope)(scope, receive, send_with_id)
            return
        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            logger.exception("request %s failed", own_id)
            if not response_started:
                message = f"{type(error).__name__}: {error}"
                answer = ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, message, code="internal_error").response(scope)
                await answer(scope, receive, send_with_id)

    def _refusal(self, route: str, method: str, headers: Headers) -> ApiError | None:
        if route in OPEN_ROUTES:
            return None
        wrong_key = None if PAGE.fullmatch(route) else self._wrong_key(headers)
        unasked = None if method in READS else _unasked(headers)
        return self._wrong_host(headers) or wrong_key or unasked or _wrong_encoding(headers)

    def _wrong_host(self, headers: Headers) -> ApiError | None:
        """Against DNS rebinding: a web page lets its own domain name resolve to this machine. Then the browser takes
        page and server for one origin, and lets the page read every answer."""
        host = PORT.sub("", headers.get("host", ""))
        if self._hosts is None or not host or host.lower() in self._hosts:
            return None
        message = (
            f"the header Host names {host[:100]!r}, and this server, which has no API key, answers "
            f"{', '.join(sorted(self._hosts))} alone; start it with --allowed-origins or --api-key"
        )
        return ApiError(HTTPStatus.FORBIDDEN, message, code="invalid_host", headers=_closing(headers))

    def _wrong_key(self, headers: Headers) -> ApiError | None:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        sent = [*headers.getlist("x-api-key"), *([key] if scheme.lower() == "bearer" else [])]
        # A bare strip() would take 0xA0 and 0x85 too, which end characters.
        keys = [each.strip(" \t").encode("latin-1") for each in sent]
        if self._key is None or any(hmac.compare_digest(each, self._key) for each in keys):
            return None
        message = "the API key is missing or wrong; send it in the header Authorization: Bearer KEY, or x-api-key: KEY"
        challenge = {"WWW-Authenticate": "Bearer", **_closing(headers)}
        return ApiError(HTTPStatus.UNAUTHORIZED, message, code="invalid_api_key", headers=challenge)


def _unasked(headers: Headers) -> ApiError | None:
    """Refuses a web page's request that its browser has sent without asking, whatever the page's origin.

    For JSON alone a browser first asks ``allow_origins``. It names the origin in each request that is no read.
    """
    if "origin" not in headers:
        return None
    try:
        check_json(headers)
    except ApiError as error:
        return ApiError(error.status, error.message, code=error.code, headers=_closing(headers))
    return None


def _wrong_encoding(headers: Headers) -> ApiError | None:
    encodings = {part.strip().lower() for part in ",".join(headers.getlist("content-encoding")).split(",")}
    if encodings <= {"", "identity"}:
        return None
    message = (
        f"the body has Content-Encoding {', '.join(sorted(encodings - {''}))[:100]!r}; send it as it is, without one"
    )
    hint = {"Accept-Encoding": "identity", **_closing(headers)}
    return ApiError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, message, code="unsupported_encoding", headers=hint)


def _closing(headers: Headers) -> Mapping[str, str]:
    """Headers that end the connection after an answer that leaves the body unread, unless that is short."""
    length = headers.get("content-length", "0")
    is_short = "transfer-encoding" not in headers and length.isdecimal() and int(length) <= SHORT_BODY
    return {} if is_short else CLOSE


def hosts_of(config: ServeConfig, address: str) -> frozenset[str] | None:
    """The names that the header Host may have, in lower case; None for any.

    They are checked if nothing else keeps strangers out: on a server without a key that listens on this machine alone.
    No web page reaches a Unix socket. ``address`` is numeric, where ``config.host`` may be a name.
    """
    if config.uds is not None or config.api_key is not None or "*" in config.allowed_origins:
        return None
    if not _is_loopback(address):
        return None
    of_origins = {host for origin in config.allowed_origins if (host := urlsplit(origin).hostname)}
    named = {address, config.host.lower(), *of_origins}
    in_urls = {f"[{name}]" for name in named if ":" in name}
    return frozenset({*LOCAL_HOSTS, *named, *in_urls})


def _is_loopback(address: str) -> bool:
    parsed = ip_address(address)
    mapped = parsed.ipv4_mapped if isinstance(parsed, IPv6Address) else None
    return (mapped or parsed).is_loopback


def allow_origins(app: FastAPI, origins: Sequence[str]) -> None:
    """Lets browsers give answers to pages from these origins; without any, to pages from this machine.

    Added last, so it is the outermost middleware: a browser's preflight request carries no API key.
    """
    app.add_middleware(
        CORSMiddleware,
        allow_origins=origins,
        allow_origin_regex=None if origins else LOCAL_ORIGIN,
        allow_methods=["*"],
        allow_headers=["*"],
        expose_headers=["X-Request-Id"],
    )
