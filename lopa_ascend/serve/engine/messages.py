"""What the HTTP process and the engine process say to each other: msgpack over a zmq PAIR socket, one a frame."""

from __future__ import annotations

import msgspec

from lopa_ascend.config import EngineConfig, Limits
from lopa_ascend.engine.commands import Abort, Generate
from lopa_ascend.types import EngineStats, RankReport, Update


class Start(msgspec.Struct, tag=True, frozen=True):
    """The first message to the engine."""

    config: EngineConfig


class Ready(msgspec.Struct, tag=True, frozen=True):
    """The model is loaded. ``dtype`` and ``device`` are the effective ones; ``ranks`` in their order."""

    limits: Limits
    model_name: str
    dtype: str
    device: str
    kv_cache_memory: int
    ranks: tuple[RankReport, ...]


class Failed(msgspec.Struct, tag=True, frozen=True):
    """The engine cannot start; the process ends."""

    message: str


class Stepped(msgspec.Struct, tag=True, frozen=True):
    """After a step, and as a heartbeat about once a second while there is nothing to do (then without updates)."""

    updates: list[Update]
    stats: EngineStats


ToEngine = Start | Generate | Abort
FromEngine = Ready | Failed | Stepped
