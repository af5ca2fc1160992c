"""What errors of a device say."""

from __future__ import annotations

from collections.abc import Iterator


def causes(error: BaseException) -> Iterator[BaseException]:
    """An error and those before it. An error in a capture is followed by another one at the end of the capture."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error, or one before it, says that a device or this machine had no memory.

    The texts count as well: torch raises a plain RuntimeError on a CPU, and torch_npu for the workspace of a kernel.
    """
    return any(
        isinstance(cause, MemoryError) or "out of memory" in str(cause) or "can't allocate memory" in str(cause)
        for cause in causes(error)
    )
