"""Profiles of an engine: every rank counts the steps, chosen ranks record them."""

from __future__ import annotations

import itertools
import logging
import shutil
from contextlib import AbstractContextManager
from datetime import datetime
from pathlib import Path

import msgspec

from lopa_ascend.backend import find_device
from lopa_ascend.backend.interface import RunningProfile
from lopa_ascend.config import EngineConfig
from lopa_ascend.engine.commands import PROFILE_NAME, ProfileError, StartProfile
from lopa_ascend.parallel.mesh import Mesh
from lopa_ascend.probe import no_probe
from lopa_ascend.runner.runner import Runner

logger = logging.getLogger(__name__)

MOST_KEPT = 8
"""Profiles in the configured folder; the oldest go when another begins."""
WARM_UP = 1
"""Steps."""


class RankTraces(msgspec.Struct, frozen=True):
    files: tuple[str, ...] = ()
    """Traces below the configured folder; on an NPU each is a folder."""
    failure: str | None = None
    """Why the rank could not record what it should have."""


def remove_oldest(folder: Path) -> None:
    """Removes all but the newest profiles, and nothing else."""
    for path in sorted(path for path in folder.iterdir() if _is_profile(path))[:-MOST_KEPT]:
        shutil.rmtree(path, ignore_errors=True)  # another rank may do the same


def _is_profile(path: Path) -> bool:
    try:
        return f"{datetime.strptime(path.name, PROFILE_NAME):{PROFILE_NAME}}" == path.name
    except ValueError:
        return False


class Profiles:
    """The profiles of one rank, one at a time. The parts of the runner's steps are ranges in the traces."""

    def __init__(self, config: EngineConfig, mesh: Mesh, runner: Runner) -> None:
        self._folder = None if config.profile_dir is None else Path(config.profile_dir)
        self._profiler, self._mesh, self._runner = find_device(config.device).profiler, mesh, runner
        self._asked: StartProfile | None = None
        """The latest profile, until ``stop`` reports it."""
        self._steps_left = 0
        """Including those left out."""
        self._profile: RunningProfile | None = None
        self._failure: str | None = None
        self._numbers = itertools.count()

    def start(self, asked: StartProfile) -> None:
        """Begins a profile; every rank must be told the same. ProfileError if one runs, or there is no folder for
        traces."""
        if self._folder is None:
            raise ProfileError("there is no profile_dir, the folder for traces")
        if self._steps_left:
            raise ProfileError("a profile runs")
        self._asked, self._failure = asked, None
        self._steps_left = asked.delay_steps + WARM_UP + asked.num_steps
        if self._mesh.rank in asked.ranks:
            try:
                folder = self._folder / asked.name
                folder.mkdir(parents=True, exist_ok=True)
                remove_oldest(self._folder)
                self._profile = self._profiler.start_profile(
                    folder, f"rank{self._mesh.rank}", asked.delay_steps, asked.num_steps
                )
                self._runner.set_probe(self._mark)
            except (OSError, RuntimeError) as error:
                self._fail(error)

    def _mark(self, part: str, _: object) -> AbstractContextManager[object]:
        return self._profiler.mark(part)

    def step(self) -> None:
        """Counts a step that has ended; the last one writes the profile."""
        if not self._steps_left:
            return
        self._steps_left -= 1
        if self._profile is not None:
            try:
                self._profile.step()
            except (OSError, RuntimeError) as error:
                self._fail(error)
        if not self._steps_left:
            self._end()

    def _end(self) -> None:
        """Ends this rank's recording, and writes recorded steps."""
        profile, self._profile = self._profile, None
        self._steps_left = 0
        self._runner.set_probe(no_probe)
        if profile is not None:
            try:
                profile.stop()
            except (OSError, RuntimeError) as error:
                self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Gives up this rank's profile; the engine goes on."""
        self._failure, self._profile = f"{self._mesh.describe_rank(self._mesh.rank)}: {error}", None
        logger.error("no profile: %s", self._failure)

    def check_stop(self) -> None:
        """Raises ProfileError if no profile runs, and none has ended by itself since the last ``stop``."""
        if self._asked is None:
            raise ProfileError("no profile runs")

    def stop(self) -> list[RankTraces]:
        """Ends the profile; returns every rank's record once all have written. Every rank must call it."""
        asked, self._asked = self._asked, None
        assert asked is not None
        assert self._folder is not None
        if self._steps_left:
            self._end()
        found = (self._folder / asked.name).glob(f"rank{self._mesh.rank}[._]*")
        own = RankTraces(tuple(sorted(str(path.relative_to(self._folder)) for path in found)), self._failure)
        # Not by a collective: while others wait, a rank may take longer to write than a collective may take.
        texts = self._mesh.all_gather_text(f"profile {next(self._numbers)}", msgspec.json.encode(own).decode())
        return [msgspec.json.decode(text, type=RankTraces) for text in texts]
