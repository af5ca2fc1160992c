"""Standard streams of a process that must go on when nobody reads its greeting and its log."""

from __future__ import annotations

import io
import os
import select
import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

PATIENCE = 1000
"""Milliseconds to wait for a full pipe; then lines are lost until its reader reads again."""


class _BestEffort(io.FileIO):
    """A file on which every write succeeds, also on a full disk or a pipe without a reader."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._room = select.poll()
        self._room.register(descriptor, select.POLLOUT)
        self._is_stuck = False

    def write(self, data: ReadableBuffer, /) -> int:
        content = memoryview(data).cast("B")
        try:
            for start in range(0, len(content), select.PIPE_BUF):  # as much as a pipe with room takes without waiting
                self._is_stuck = not self._room.poll(0 if self._is_stuck else PATIENCE)
                if not self._is_stuck:
                    super().write(content[start : start + select.PIPE_BUF])
        except OSError:
            pass
        return len(content)


def open_closed_streams() -> None:
    """Opens closed standard streams as /dev/null. Otherwise the next file or socket takes their number, and receives
    their text. Call it before anything is opened."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            assert opened == number, (opened, number)  # the lowest free number
            os.set_inheritable(number, True)
            setattr(sys, name, open(number, "r" if number == 0 else "w", encoding="utf-8", closefd=False))


def write_as_possible() -> None:
    """Makes lost output of stdout and stderr no error."""
    sys.stdout, sys.stderr = _best_effort(sys.stdout), _best_effort(sys.stderr)


def _best_effort(stream: TextIO) -> TextIO:
    binary = io.BufferedWriter(_BestEffort(stream.fileno()))
    return io.TextIOWrapper(binary, stream.encoding, errors="backslashreplace", line_buffering=True)
