"""CPU time of a short computation, for scripts that measure what this processor reaches."""

from __future__ import annotations

import time
from collections.abc import Callable


def fastest_call(call: Callable[[], object], repeats: int) -> float:
    """CPU seconds of this process for the fastest of some equal calls; never 0, so that rates can be computed.

    Args:
        call: what is timed.
        repeats: how many calls are made.
    """
    fastest = float("inf")
    for _ in range(repeats):
        start = time.process_time()
        call()
        fastest = min(fastest, time.process_time() - start)
    return max(fastest, 1e-9)
