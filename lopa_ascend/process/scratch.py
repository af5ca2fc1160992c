"""Temporary folders that do not outlive their processes, however these end."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
import weakref
from contextlib import suppress
from pathlib import Path

_PREFIX = "lopa-scratch-"  # short, because the path of a socket has at most 107 characters
_NAME = re.compile(_PREFIX + "[a-z0-9_]{8}")


class ScratchFolder:
    """A folder that only its owner may enter. ``close``, the end of this object or of the process removes it. If the
    process is killed, the next ``remove_abandoned`` does: the folder's lock ends with the process."""

    def __init__(self) -> None:
        self.path, lock = _locked_folder()
        self.close = weakref.finalize(self, _remove, self.path, lock)
        """Removes the folder. Does nothing the second time."""


def _locked_folder() -> tuple[Path, int]:
    """A new folder, and the file descriptor of its lock."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        lock = os.open(path, os.O_RDONLY)
        with suppress(OSError):  # a file system without locks, where nobody else gets one either
            fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists():  # otherwise another process took it for abandoned before it was locked
            return path, lock
        os.close(lock)


def _remove(path: Path, lock: int) -> None:
    shutil.rmtree(path, ignore_errors=True)
    os.close(lock)


def remove_abandoned() -> None:
    """Removes this user's folders after their processes have ended."""
    with os.scandir(tempfile.gettempdir()) as entries:
        found = [entry.path for entry in entries if _NAME.fullmatch(entry.name)]
    for path in found:
        with suppress(OSError):  # another user's, in use, or removed in this moment
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(lock).st_uid == os.geteuid():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)
