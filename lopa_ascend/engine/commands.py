"""Requests to a running engine, in the form in which they travel between processes."""

from __future__ import annotations

import msgspec

from lopa_ascend.config import DecodingParams
from lopa_ascend.types import GappedText


class Generate(msgspec.Struct, tag=True, frozen=True):
    """Begin a request, which has been checked against the engine's limits."""

    request_id: str
    """Any text that no running request has as its id."""
    prompt_token_ids: list[int]
    params: DecodingParams
    trace: bool = False
    """Whether each of the request's updates carries a record of its step."""
    continuations: tuple[tuple[int, ...], ...] = ()
    """If there are any, nothing is generated: how probable is each of them after the prompt? ``max_new_tokens`` is the
    length of the longest."""
    gapped: GappedText | None = None
    """The canvas, which ``max_new_tokens`` is the length of; None: masks alone."""


class Admit(msgspec.Struct, tag=True, frozen=True):
    """Let a request run whose grammar rank 0 has compiled. Rank 0 alone sends this."""

    request_id: str


class Abort(msgspec.Struct, tag=True, frozen=True):
    """End a request before the next step. The engine ignores ids that it does not know: the request may have finished
    in the meantime."""

    request_id: str


PROFILE_NAME = "%Y%m%d-%H%M%S-%f"
"""Names of profiles, of which the newest are kept, as the moment of their beginning."""


class StartProfile(msgspec.Struct, tag=True, frozen=True):
    """Record steps from the next one on."""

    name: str
    """Of the new folder for the traces."""
    ranks: list[int]
    """The ranks that record."""
    delay_steps: int
    """Steps that are left out; one more is the profiler's warm-up."""
    num_steps: int
    """Steps that are recorded, at most."""


class StopProfile(msgspec.Struct, tag=True, frozen=True):
    """End the profile, and say what was written."""


class ProfileError(ValueError):
    """A profile cannot begin, or there is none to end."""


Command = Generate | Admit | Abort | StartProfile | StopProfile
"""Everything that a running engine can be asked."""
