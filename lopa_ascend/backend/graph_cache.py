"""The directory in which compiled steps outlive the process.

What lies there is code: compiled libraries, Python sources and pickles, which run when they are loaded. So a directory
is used only if nobody but this user and root could have written to it, and nobody else can write to it now. A damaged
file is deleted, and its step is compiled anew. If the directory cannot be used, for example because the disk is full, a
temporary directory takes its place.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lopa_ascend.config import ParameterError
from lopa_ascend.config.files import read_json_object

logger = logging.getLogger(__name__)

DIGESTS = "lopa-digests.json"
"""File in the directory with the digest of every other file, by path in the directory."""
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_TRANSIENT = (".lock", ".tmp")
"""Endings of files that change while steps are compiled and hold nothing."""


class GraphCache:
    """A directory for compiled steps.

    Args:
        directory: it is made if it does not exist; None: a temporary one, which is deleted with this object.
        is_shared: other programs of this user write there too, so no digests are kept.

    Raises:
        ParameterError: others could have written, or can write, what would run; or it is no directory that this user
            can write to.
    """

    def __init__(self, directory: Path | None, *, is_shared: bool = False):
        self._is_shared = is_shared
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        if directory is None:
            self._use_temporary()
            return
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.path = directory.resolve()
            check_private(self.path)
            self._remove_damaged()
        except (FileExistsError, NotADirectoryError, PermissionError) as error:
            raise ParameterError("graph_cache", f"{directory} cannot be used ({error.strerror})") from error
        except OSError as error:  # a disk that is full or fails
            self.path = directory
            self.abandon(error)

    @property
    def is_kept(self) -> bool:
        """Whether the directory outlives the process."""
        return self._temporary is None

    def abandon(self, reason: Exception) -> None:
        """Goes on in a temporary directory, with a warning that says why."""
        inner = getattr(reason, "inner_exception", reason)  # torch's errors name the compiler before the reason
        what = f"{type(inner).__name__}: {inner}".partition("\n")[0][:300]
        logger.warning(
            "graph_cache: %s cannot be used (%s): compiling anew without it. If its disk is not full, delete it",
            self.path,
            what,
        )
        self._use_temporary()

    def _use_temporary(self) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="lopa-graphs-")  # its owner alone may enter it
        self.path = Path(self._temporary.name)

    # ---- digests -----------------------------------------------------------------------------------------------------

    def seal(self) -> None:
        """Notes the digests of all files, by which the next start recognises damage."""
        if not self.is_kept or self._is_shared:
            return
        try:
            digests = {str(file.relative_to(self.path)): _digest(file) for file in self._files()}
            with private_files(), tempfile.NamedTemporaryFile("w", dir=self.path, suffix=".tmp", delete=False) as file:
                json.dump(digests, file)
            os.replace(file.name, self.path / DIGESTS)
        except OSError as error:
            logger.warning("graph_cache: %s cannot be written (%s)", self.path, error.strerror)

    def _remove_damaged(self) -> None:
        """Removes files that have changed since ``seal`` noted their digests."""
        try:
            known = read_json_object(self.path / DIGESTS, ValueError, optional=True, max_bytes=2**26)
        except ValueError as error:
            logger.warning("graph_cache: %s; all files are treated as damaged", error)
            names = [str(file.relative_to(self.path)) for file in self._files()]
            no_digest = ""  # differs from the digest of every file, so all of them are removed
            known = dict.fromkeys([*names, DIGESTS], no_digest)
        for name, digest in known.items():
            file = self.path / name
            with suppress(FileNotFoundError):  # another rank may have removed it
                if file.resolve().is_relative_to(self.path) and file.is_file() and _digest(file) != digest:
                    logger.warning("graph_cache: %s is damaged, and is compiled anew", file)
                    file.unlink()

    def _files(self) -> Iterator[Path]:
        for file in sorted(self.path.rglob("*")):
            if file.is_file() and file.name != DIGESTS and file.suffix not in _TRANSIENT:
                yield file


def _digest(file: Path) -> str:
    return hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest()


# ---- who may write ---------------------------------------------------------------------------------------------------


@contextmanager
def private_files() -> Iterator[None]:
    """Lets no one else write files that this process makes inside the ``with``, whatever its umask is."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def check_private(directory: Path) -> None:
    """Refuses a directory that others could have written to, or can write to.

    Args:
        directory: without symbolic links.

    Raises:
        ParameterError: somebody else than this user and root owns the directory, something in it or a directory above
            it, or may write there; or it holds something else than files and directories.
        OSError: it cannot be looked at.
    """
    for parent in directory.parents:
        status = parent.lstat()
        # Where the sticky bit is set, as on /tmp, others cannot replace what they do not own.
        if status.st_mode & _OTHERS_WRITE and not status.st_mode & stat.S_ISVTX:
            raise _refusal(directory, parent, "others may write to", "chmod go-w")
        if parent != parent.parent:
            _check_owner(directory, parent, status)
    for path in (directory, *directory.rglob("*")):
        with suppress(FileNotFoundError):  # another process has just removed it
            status = path.lstat()
            if not (stat.S_ISDIR(status.st_mode) or stat.S_ISREG(status.st_mode)):
                raise _refusal(directory, path, "it holds something that is neither a file nor a directory:", "rm")
            _check_owner(directory, path, status)
            if status.st_mode & _OTHERS_WRITE:
                raise _refusal(directory, path, "others may write to", "chmod -R go-w")


def _check_owner(directory: Path, path: Path, status: os.stat_result) -> None:
    if status.st_uid not in (os.geteuid(), 0):
        raise _refusal(directory, path, f"user {status.st_uid} owns", "choose a directory of your own instead of")


def _refusal(directory: Path, path: Path, problem: str, remedy: str) -> ParameterError:
    return ParameterError(
        "graph_cache",
        f"{directory} must be writable by this user alone, because the code in it runs at the next start, but "
        f"{problem} {path}. Make sure that nobody has changed it, then: {remedy} {path}",
    )
