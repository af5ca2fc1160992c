"""How a server is started."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from lopa_ascend.config import EngineConfig
from lopa_ascend.config.files import shown
from lopa_ascend.config.kinds import AnyText, Boolean, Bytes, Integer, Kind, Number, Strings
from lopa_ascend.config.settings import Section, declare, settings

DAY = 86400


@dataclass(frozen=True)
class Origins(Strings):
    """Origins of web pages as browsers send them, or "*" for all. One that can never match is refused."""

    metavar: ClassVar[str] = "ORIGIN"
    _PATTERN: ClassVar[re.Pattern[str]] = re.compile(
        r"\*|null|(?!http://.*:80$|https://.*:443$)"
        r"[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[^\s/?#@:*\[\]A-Z\x80-\U0010ffff]+)(:[1-9][0-9]{0,4})?"
    )

    def checked(self, value: object) -> object:
        origins = super().checked(value)
        assert isinstance(origins, tuple)
        for origin in origins:
            if not self._PATTERN.fullmatch(origin):
                message = (
                    "is not * or an origin as browsers send it, such as https://example.org:8443: in lower case and "
                    "ASCII, without a path, a * inside it or the usual port"
                )
                raise ValueError(f"{origin!r} {message}")
        return origins


@dataclass(frozen=True)
class UrlPath(AnyText):
    """A path as it stands in a URL, without a slash at its end; or nothing."""

    metavar: ClassVar[str] = "PATH"
    _PATTERN: ClassVar[re.Pattern[str]] = re.compile(r"(/[A-Za-z0-9._~!$&'()*+,;=:@%-]+)*")

    def checked(self, value: object) -> object:
        if not isinstance(value, str) or not self._PATTERN.fullmatch(value):
            raise ValueError(f"{value!r} is not a path of a URL such as /models/demo, percent-encoded where not ASCII")
        return value


@dataclass(frozen=True)
class JsonObject(Kind):
    metavar: ClassVar[str] = "JSON"

    def parse(self, text: str) -> Any:
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"must be {self.allowed()}, got {shown(text)}: {error}") from None

    def checked(self, value: object) -> object:
        if not isinstance(value, dict):
            raise ValueError(f"must be {self.allowed()}, got {shown(value)}")
        return value

    def allowed(self) -> str:
        return 'a JSON object such as {"enable_thinking": false}'


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Values are checked where they are read: on the command line and in the YAML file."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    served_model_name: str | None = declare(
        None,
        AnyText(),
        "name of the model in the API",
        group=Section.MODEL,
        metavar="NAME",
        default_text='"demo", or the name of the directory `model`, or ORG/NAME',
    )
    chat_template: str | None = declare(
        None,
        AnyText(),
        "Jinja template that makes a prompt of a conversation",
        group=Section.MODEL,
        metavar="FILE",
        default_text="the model's own",
    )
    default_chat_template_kwargs: Mapping[str, Any] | None = declare(
        None,
        JsonObject(),
        "variables that the chat template gets unless a request's chat_template_kwargs says otherwise",
        group=Section.MODEL,
        default_text="none",
    )
    split_special_tokens: bool = declare(
        False,
        Boolean(),
        "special tokens in the texts of messages are plain text, so that nobody can write other roles' turns",
        group=Section.MODEL,
    )
    max_num_queued_reqs: int = declare(
        1024,
        Integer(0, 2**31 - 1),
        "answers that may wait (a request has n for each prompt); further requests get a 503 with Retry-After",
        group=Section.ENGINE,
    )
    replicas: int | None = declare(
        None,
        Integer(1, 4096),
        "engines behind this address, on Ray Serve: on a cluster of this machine, or the one that RAY_ADDRESS names",
        group=Section.RANKS,
        default_text="one engine, without Ray",
    )
    max_replicas: int | None = declare(
        None,
        Integer(1, 4096),
        "how far `replicas` may grow while answers wait for an engine",
        group=Section.RANKS,
        default_text="it does not grow",
    )
    preset: str | None = declare(
        None,
        AnyText(),
        "defaults for requests from a published evaluation, e.g. S13 of the LoPA paper, which the flags below "
        "override; list: print all presets. It chooses neither a model nor ranks",
        group=Section.DECODING,
        metavar="NAME",
    )
    host: str = declare("127.0.0.1", AnyText(), "address to listen on", group=Section.SERVER, metavar="ADDRESS")
    port: int = declare(8000, Integer(0, 65535), "port to listen on; 0: a free one", group=Section.SERVER)
    uds: str | None = declare(
        None,
        AnyText(),
        "Unix socket to listen on in place of `host` and `port`; the umask says who may connect",
        group=Section.SERVER,
        metavar="PATH",
        default_text="none",
    )
    api_key: str | None = declare(
        None,
        AnyText(),
        "key that clients must send; better given in the environment variable LOPA_API_KEY, which ps does not show",
        group=Section.SERVER,
        metavar="KEY",
        secret=True,
    )
    allowed_origins: tuple[str, ...] = declare(
        (),
        Origins(),
        "origins whose web pages may call this server, e.g. https://example.org; *: all",
        group=Section.SERVER,
        default_text="pages from this machine (localhost, any port)",
    )
    root_path: str = declare(
        "", UrlPath(), "path under which a proxy shows this server, e.g. /models", group=Section.SERVER
    )
    ui: bool = declare(True, Boolean(), "show answers as they grow on a page at /", group=Section.SERVER)
    max_body_size: int = declare(
        2**20, Bytes(0), "largest body of a request, in bytes or e.g. 512KiB", group=Section.SERVER
    )
    request_timeout: float | None = declare(
        None,
        Number(0.001, DAY, unit="seconds"),
        "longest time that a request may take; then the client gets a 504",
        group=Section.SERVER,
        metavar="SECONDS",
        default_text="no limit",
    )
    keep_alive_interval: float = declare(
        15.0,
        Number(0, DAY, unit="seconds"),
        "after so long without an event a stream has a comment, so that proxies keep it open; 0: never",
        group=Section.SERVER,
        metavar="SECONDS",
    )
    watchdog_timeout: float = declare(
        60.0,
        Number(2, DAY, unit="seconds"),
        "longest silence of the engine, e.g. during one step; then /health answers 503",
        group=Section.SERVER,
        metavar="SECONDS",
    )
    shutdown_timeout: float = declare(
        0.0,
        Number(0, DAY, unit="seconds"),
        "how long running requests may go on after Ctrl-C or SIGTERM before they are ended",
        group=Section.SERVER,
        metavar="SECONDS",
    )
    enable_log_requests: bool = declare(
        False, Boolean(), "write the prompts and parameters of requests to the log", group=Section.SERVER
    )
    ssl_certfile: str | None = declare(None, AnyText(), "certificate in PEM format", group=Section.TLS, metavar="FILE")
    ssl_keyfile: str | None = declare(
        None, AnyText(), "private key of the certificate in PEM format", group=Section.TLS, metavar="FILE"
    )
    ssl_keyfile_password: str | None = declare(
        None, AnyText(), "password of the private key", group=Section.TLS, metavar="PASSWORD", secret=True
    )
    ssl_ca_certs: str | None = declare(
        None,
        AnyText(),
        "certificates of the authorities that clients' own certificates are checked against",
        group=Section.TLS,
        metavar="FILE",
    )
    decoding: Mapping[str, Any] = field(default_factory=dict)
    """The defaults of requests, as far as they were given, by name."""


SECRETS = tuple(name for name, setting in settings(ServeConfig).items() if setting.secret)
"""Settings whose values are never shown."""
