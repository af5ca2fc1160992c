"""What a running engine can be asked, in the form in which it travels between processes."""

from __future__ import annotations

import msgspec

from lopa_ascend.core import Request


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


Command = Request | Admit | Abort | StartProfile | StopProfile
"""Everything that a running engine can be asked."""
