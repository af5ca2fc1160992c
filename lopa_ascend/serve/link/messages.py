"""The messages between the HTTP process and the engine process: msgpack over a zmq PAIR socket, one in each frame."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from lopa_ascend.admission import Limits
from lopa_ascend.config import EngineConfig
from lopa_ascend.core import Request
from lopa_ascend.engine.commands import PROFILE_NAME as PROFILE_NAME
from lopa_ascend.engine.commands import Abort, StartProfile, StopProfile
from lopa_ascend.types import EngineStats, RankReport, Update


class Start(msgspec.Struct, tag=True, frozen=True):
    """The first message to the engine."""

    config: EngineConfig


class Ready(msgspec.Struct, tag=True, frozen=True):
    """The model is loaded."""

    limits: Limits
    model_name: str
    dtype: str
    """Of the weights in effect."""
    device: str
    kv_cache_memory: int
    """Bytes of the KV pages of one rank."""
    seed: int
    """From it requests draw theirs."""
    ranks: tuple[RankReport, ...]
    """By rank."""


class Failed(msgspec.Struct, tag=True, frozen=True):
    """The engine cannot start, and its process ends."""

    message: str
    """For the operator."""


class Stepped(msgspec.Struct, tag=True, frozen=True):
    """Sent after every step and, as a heartbeat, about once a second while there is nothing to do."""

    updates: list[Update]
    """Empty in a heartbeat."""
    stats: EngineStats
    engine: str = ""
    """Which of several engines has sent it."""


class Profiled(msgspec.Struct, tag=True, frozen=True):
    """The answer to ``StartProfile`` and to ``StopProfile``."""

    traces: list[str] = []
    """Written by all ranks, below the configured folder."""
    refusal: str | None = None
    """Why no profile can begin, or end, now."""
    failures: list[str] = []
    """What kept ranks from recording."""


class Lost(msgspec.Struct, tag=True, frozen=True):
    """One of several engines has ended while it generated a request."""

    request_id: str
    engine: str
    message: str
    """For the client."""


class Left(msgspec.Struct, tag=True, frozen=True):
    """One of several engines takes no more requests."""

    engine: str


ToEngine = Start | Request | Abort | StartProfile | StopProfile
FromEngine = Ready | Failed | Stepped | Profiled | Lost | Left

encode_message = msgspec.msgpack.Encoder().encode
decode_to_engine: Callable[[bytes], ToEngine] = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine: Callable[[bytes], FromEngine] = msgspec.msgpack.Decoder(FromEngine).decode
