"""What reaches a running engine from outside, in the form in which it travels between processes."""

from __future__ import annotations

import msgspec

from lopa_ascend.config import DecodingParams


class Generate(msgspec.Struct, tag=True, frozen=True):
    """Begin a request. It was checked against the engine's limits."""

    request_id: str
    prompt_token_ids: list[int]
    params: DecodingParams
    trace: bool = False


class Abort(msgspec.Struct, tag=True, frozen=True):
    """End a request before the next step; unknown ids, which have finished meanwhile, mean nothing."""

    request_id: str


Command = Generate | Abort
