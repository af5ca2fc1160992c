"""The directory in which compiled steps outlive the process.

Its content is code: compiled libraries, Python sources and pickles, which run when they are loaded. So a directory is
used only if nobody but this user and root could have written to it, or can now. If it cannot be used, for example
because the disk is full or a file is damaged, a temporary one takes its place.
"""

from __future__ import annotations

import logging
import os
import stat
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from torch import Tensor

from lopa_ascend.backend.compiler import Compiler, GraphError, Run, Step
from lopa_ascend.backend.memory import is_out_of_memory
from lopa_ascend.config import ParameterError
from lopa_ascend.process.scratch import ScratchFolder, remove_abandoned

logger = logging.getLogger(__name__)

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class GraphCache:
    """A directory for compiled steps, which is made if it does not exist; None: a temporary one, deleted with this
    object. ParameterError if others could have written, or can write, what would run, or this user cannot write there.
    """

    def __init__(self, directory: Path | None):
        self._temporary: ScratchFolder | None = None
        if directory is None:
            self._use_temporary()
            return
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.path = directory.resolve()
            check_private(self.path)
        except (FileExistsError, NotADirectoryError, PermissionError) as error:
            raise ParameterError("graph_cache", f"{directory} cannot be used ({error.strerror})") from error
        except OSError as error:  # a disk that is full or fails
            self.path = directory
            self.abandon(error)

    @property
    def is_kept(self) -> bool:
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
        remove_abandoned()
        self._temporary = ScratchFolder()
        self.path = self._temporary.path


class CachingCompiler(Compiler):
    """Compiles into a directory, or loads from there what an earlier process compiled; in a temporary one if the
    directory cannot be used."""

    def __init__(self, cache: GraphCache):
        super().__init__()
        self._cache = cache

    def _compile(self, step: Step, name: str, tensors: Sequence[Tensor], kv_lengths: list[int]) -> Run:
        num_loaded, num_compilations = self.num_loaded, self.num_compilations
        with private_files():
            try:
                return self._compile_cached(step, name, tensors, kv_lengths)
            except GraphError:
                raise
            # Damaged files may raise anything. If they were not the reason, the second attempt raises the same again.
            except Exception as error:
                if not self._cache.is_kept or is_out_of_memory(error):
                    raise
                self._abandon_cache(error)
        self.num_loaded, self.num_compilations = num_loaded, num_compilations
        return self._compile_cached(step, name, tensors, kv_lengths)

    @abstractmethod
    def _compile_cached(self, step: Step, name: str, tensors: Sequence[Tensor], kv_lengths: list[int]) -> Run:
        """Compiles a bucket into the directory, or loads it from there."""

    def _abandon_cache(self, error: Exception) -> None:
        self._cache.abandon(error)


# ---- who may write ---------------------------------------------------------------------------------------------------


@contextmanager
def private_files() -> Iterator[None]:
    """Lets no one else write files that this process makes inside the ``with``, whatever its umask."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def check_private(directory: Path) -> None:
    """Refuses a directory (without symbolic links) that others could have written to, or can write to.

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
