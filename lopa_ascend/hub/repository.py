"""One repository of the hub: what it has, what of it is here, and the download of the rest."""

from __future__ import annotations

import glob
import shutil
import sys
from collections.abc import Callable, Collection
from contextlib import suppress
from fnmatch import filter as matching
from pathlib import Path

from filelock import FileLock, Timeout
from huggingface_hub import HfApi, constants, get_token
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]  # it is in no list of names

from lopa_ascend.backend.memory import causes
from lopa_ascend.config import ConfigError, ParameterError
from lopa_ascend.config.files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, INDEX, SINGLE_FILE, read_json_object, shown
from lopa_ascend.config.int4_files import OWN_FILES
from lopa_ascend.config.kinds import format_size
from lopa_ascend.config.quantized_files import DESCRIPTION, MODELSLIM_WEIGHTS
from lopa_ascend.families import FAMILIES
from lopa_ascend.hub import Name

FIRST = ("generation_config.json", DESCRIPTION, *OWN_FILES, INDEX, f"{MODELSLIM_WEIGHTS}.index.json")
"""Patterns of the files that say, with config.json, what to download and whether it fits."""
TEXTS = (
    "config.json", *FIRST, "tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "added_tokens.json",
    "special_tokens_map.json", "chat_template.jinja",
)  # fmt: skip
"""Patterns of all files that are read of a model beside the weights."""
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
TIMEOUT = 10.0
"""Seconds for the hub to answer."""
WORKERS = 2
"""Downloads at a time. If the process ends, unfinished ones start anew, so few lose less on a slow line."""

_ERRORS: tuple[type[BaseException], ...] = (OSError, ValueError, *HfHubHTTPError.__bases__)
"""huggingface_hub's errors derive from its HTTP client's, which differ in each major version."""


class Repository:
    """What a name on the hub means at present: a commit, with its configuration in ``directory`` from the beginning.
    That is in the cache of huggingface_hub. ``weight_bytes`` is as the hub says; 0 if it does not.

    Raises:
        ParameterError: no such repository or revision, or it lacks a file; or the hub cannot be reached, and the cache
            does not have all of it.
    """

    def __init__(self, name: Name):
        self.name, self.weight_bytes = name, 0
        self._folder = Path(constants.HF_HUB_CACHE, f"models--{name.repository.replace('/', '--')}")
        self._locks = Path(constants.HF_HUB_CACHE, ".locks", self._folder.name)
        """With huggingface_hub's lock for each file."""
        self._is_model = name.param == "model"
        self._config = "config.json" if self._is_model else ADAPTER_CONFIG
        self._api = HfApi(library_name="lopa_ascend")
        self._sizes: dict[str, int] = {}
        """By file on the hub; 0 if it does not say."""
        self._wanted: list[str] = []
        if constants.HF_HUB_OFFLINE:
            self._take_cached("HF_HUB_OFFLINE is set")
            return
        try:
            self._look()
        except ParameterError:
            raise
        except _ERRORS as error:
            answer = _answer(error)
            if answer is not None and answer.response.status_code < 500 and answer.response.status_code != 429:
                raise self._refusal(answer) from None
            self._take_cached(_reason(error))

    def __str__(self) -> str:
        revision = self.name.revision
        return self.name.repository + ("" if revision == "main" else f"@{revision}")

    @property
    def missing(self) -> list[str]:
        return [file for file in self._wanted if not (self.directory / file).exists()]

    # ---- what there is ---------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Asks the hub for the commit's files, and downloads ``FIRST``."""
        repository, revision = self.name.repository, self.name.revision
        info = self._api.model_info(repository, revision=revision, files_metadata=True, timeout=TIMEOUT)
        self._sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
        if self._config not in self._sizes:
            raise self._error(f"{self} has no {self._config}: it is no {'model' if self._is_model else 'PEFT adapter'}")
        # Under the name of the revision, so that the cache knows its commit when there is no network.
        self.directory = Path(self._api.hf_hub_download(repository, self._config, revision=revision)).parent
        texts = _matching(self._sizes, TEXTS) if self._is_model else [self._config]
        for file in _matching(texts, FIRST):
            self._api.hf_hub_download(repository, file, revision=self.directory.name)
        weights = self._weights(self._sizes)
        if absent := [file for file in weights if file not in self._sizes]:
            pickles = _matching(self._sizes, PICKLES)
            never = f"; {pickles[0]} is never read, because a pickle can run code" if pickles else ""
            raise self._error(f"{self} has no {shown(absent[0])}, expected weights in safetensors{never}")
        self.weight_bytes = sum(self._sizes[file] for file in weights) or self._claimed_bytes()
        self._wanted = [*texts, *weights, *self._draft_adapter()]

    def _draft_adapter(self) -> list[str]:
        """The files of the adapter for drafts that some families have in a folder of its own."""
        if not self._is_model:
            return []
        try:
            model_type = read_json_object(self.directory / self._config, ConfigError).get("model_type")
        except ConfigError:  # the engine refuses the file
            return []
        folders = {family.draft_adapter for family in FAMILIES.values() if family.model_type == model_type}
        files = [f"{folder}/{name}" for folder in folders for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)]
        return [file for file in files if file in self._sizes]

    def _weights(self, files: Collection[str]) -> list[str]:
        """As the loader finds them among these."""
        if not self._is_model:
            return [ADAPTER_WEIGHTS]
        if INDEX not in files or SINGLE_FILE in files:
            return [SINGLE_FILE] if SINGLE_FILE in files else matching(files, MODELSLIM_WEIGHTS) or [SINGLE_FILE]
        weight_map = self._index().get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise self._error(f"{self}: {INDEX} has no weight_map")
        return sorted({*weight_map.values()})

    def _index(self) -> dict[str, object]:
        try:
            return read_json_object(self.directory / INDEX, ConfigError, optional=True)
        except ConfigError as error:
            raise self._error(str(error)) from error

    def _claimed_bytes(self) -> int:
        """The weights' size in the index, for a mirror that does not say it."""
        match self._index():
            case {"metadata": {"total_size": int(size)}}:
                return size
        return 0

    def _take_cached(self, reason: str) -> None:
        """Takes the revision from the cache. Raises ParameterError if that does not have all."""
        ref = self._folder / "refs" / self.name.revision
        self.directory = self._folder / "snapshots" / (ref.read_text() if ref.is_file() else self.name.revision)
        files = [file.name for file in self.directory.iterdir()] if self.directory.is_dir() else []
        if files:
            self._wanted = [self._config, *self._weights(files)]
        if not files or self.missing:
            lacks = f"lacks {', '.join(self.missing[:3])}" if files else "is not there"
            where = f"in the cache {constants.HF_HUB_CACHE}"
            remedy = "start once with a network, or give a directory"
            raise self._error(f"{reason}, and {where} {self} {lacks}; {remedy}") from None
        if not constants.HF_HUB_OFFLINE:
            _say(f"{self}: {reason}; taking commit {self.directory.name[:7]} from the cache")

    # ---- the download ----------------------------------------------------------------------------------------------

    def download(self, check: Callable[[Path, int], str] | None = None) -> None:
        """Downloads what is missing. Of several processes of this machine one does, and the others wait. ``check`` gets
        the directory and ``weight_bytes`` first; it raises ParameterError, or returns what the user should know.

        Raises:
            ParameterError: there is no room on the disk, or the download broke off.
        """
        if not self.missing:
            return
        self._locks.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(self._locks / "lopa_ascend.lock"):
            if not (missing := self.missing):
                return
            self._remove_abandoned()
            size = sum(self._sizes[file] for file in missing) or self.weight_bytes
            free = shutil.disk_usage(self.directory).free
            to = f"to {constants.HF_HUB_CACHE}, where {format_size(free)} are free"
            _say(f"{self}: {format_size(size)} in {len(missing)} file{'s'[: len(missing) > 1]} to download {to}")
            if check is not None:
                _say(f"{self}: {check(self.directory, self.weight_bytes)}")
            if size > free:
                raise self._error(f"{self}: {format_size(size)} do not fit onto the disk; HF_HOME chooses another one")
            weights = matching(missing, "*.safetensors")
            # Weights come last: a cache that has them has all.
            for files in ([file for file in missing if file not in weights], weights):
                self._download(files)

    def _download(self, files: Collection[str]) -> None:
        if not files:
            return
        patterns = [glob.escape(file) for file in files]
        try:
            self._api.snapshot_download(
                self.name.repository, revision=self.directory.name, allow_patterns=patterns, max_workers=WORKERS
            )
        except _ERRORS as error:
            if (answer := _answer(error)) is not None and answer.response.status_code < 500:
                raise self._refusal(answer) from None
            raise self._error(f"the download of {self} has broken off: {_reason(error)}; start again") from None

    def _remove_abandoned(self) -> None:
        """Removes parts of files of killed downloads: their names have a number that no other download takes."""
        for part in (self._folder / "blobs").glob("*.????????.incomplete"):
            with suppress(Timeout), FileLock(self._locks / f"{part.name.split('.')[0]}.lock", timeout=0):
                part.unlink(missing_ok=True)

    # ---- errors ----------------------------------------------------------------------------------------------------

    def _error(self, message: str) -> ParameterError:
        return ParameterError(self.name.param, message)

    def _refusal(self, error: HfHubHTTPError) -> ParameterError:
        page, status = f"{constants.ENDPOINT}/{self.name.repository}", error.response.status_code
        if isinstance(error, GatedRepoError):
            message = f"{self} is gated: accept its conditions on {page}, and set HF_TOKEN to a token of that account"
        elif isinstance(error, RevisionNotFoundError):
            message = f"{self.name.repository} has no revision {self.name.revision!r}; {page} shows which it has"
        elif isinstance(error, RepositoryNotFoundError) or (status == 401 and get_token() is None):
            message = (
                f"{self} is no directory here, and no repository that {constants.ENDPOINT} shows you ({status}); look "
                f"at {page}, and for a private one set HF_TOKEN"
            )
        elif status in (401, 403):
            message = f"{page} is refused ({status}); check what the token in HF_TOKEN may read"
        else:
            message = f"{page} cannot be read ({status})"
        return self._error(message)


def _matching(files: Collection[str], patterns: Collection[str]) -> list[str]:
    return [file for pattern in patterns for file in matching(files, pattern)]


def _answer(error: BaseException) -> HfHubHTTPError | None:
    """The hub's answer, if that is the cause of an error."""
    answers = (cause for cause in causes(error) if isinstance(cause, HfHubHTTPError) and cause.response is not None)
    return next(answers, None)


def _reason(error: BaseException) -> str:
    """The first cause of an error, in one line."""
    *_, first = causes(error)
    if isinstance(first, OSError) and first.filename is not None:
        return f"{first.filename} cannot be written ({first.strerror}; HF_HOME names another folder)"
    return f"{constants.ENDPOINT} cannot be reached ({(str(first) or type(first).__name__).splitlines()[0][:200]})"


def _say(text: str) -> None:
    if sys.stderr is not None:  # it was closed when Python started
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
