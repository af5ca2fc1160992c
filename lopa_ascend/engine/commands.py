"""The commands to a running engine, as they travel between processes."""

from __future__ import annotations

import msgspec

from lopa_ascend.core import Request


class Admit(msgspec.Struct, tag=True, frozen=True):
    """Lets a request run whose grammar rank 0 has compiled; only rank 0 sends it."""

    request_id: str


class Abort(msgspec.Struct, tag=True, frozen=True):
    """Ends a request before the next step. Unknown ids are ignored: the request may have finished meanwhile."""

    request_id: str


PROFILE_NAME = "%Y%m%d-%H%M%S-%f"


class StartProfile(msgspec.Struct, tag=True, frozen=True):
    """Records steps from the next one on."""

    name: str
    """Folder for the traces."""
    ranks: list[int]
    delay_steps: int
    """Steps left out; one more is the profiler's warm-up."""
    num_steps: int


class StopProfile(msgspec.Struct, tag=True, frozen=True):
    """Ends the profile; the answer says what was written."""


class ProfileError(ValueError):
    """A profile cannot begin, or none is there to end."""


Command = Request | Admit | Abort | StartProfile | StopProfile
